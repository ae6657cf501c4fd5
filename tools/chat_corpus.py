"""Conversations out of real text: python tools/chat_corpus.py -o chats.jsonl [FOLDER...]

The text are the docstrings and the code of installed Python, or of the folders given. A conversation asks what a
function or class does, how it is called, what its code is, which methods it has; the answers are what stands in the
sources. Its length follows theirs: one to four answers. What is written depends on names and contents alone.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

Message = dict[str, str]
_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

WHAT = (
    "What does {what} `{name}` of the Python module `{module}` do?",
    "Explain {what} `{name}` from `{module}`.",
    "I found {what} `{name}` in `{module}`. What is it for?",
    "What is `{name}`? It is {what} of `{module}`.",
)
HOW = ("How is it called?", "What are its arguments?", "Show me its signature.")
CODE = ("Show me its code.", "What does the implementation look like?", "How is it written?")
METHODS = ("Which methods does it have?", "What can I call on it?")
SYSTEM = ("You answer questions about Python libraries.", "Be brief and exact.")

LEAST, MOST = 40, 1500
"""Characters of an answer about what something does."""

CODE_LINES = 30


def conversations(path: Path, module: str) -> Iterator[list[Message]]:
    """What can be asked about a file."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines()
    for node in tree.body:
        inner = [n for n in node.body if isinstance(n, _NAMED)] if isinstance(node, ast.ClassDef) else []
        for each in (node, *inner):
            if isinstance(each, _NAMED) and each.name[0] != "_":
                owner = f"{node.name}." if each is not node and isinstance(node, ast.ClassDef) else ""
                if found := _about(each, owner + each.name, module, lines):
                    yield found


def _about(
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str, module: str, lines: list[str]
) -> list[Message]:
    text = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n\n")[0]
    if not LEAST <= len(text) <= MOST or not text.isascii():
        return []
    lot = hashlib.sha256(f"{module} {name}".encode()).digest()
    is_class = isinstance(node, ast.ClassDef)
    what = "the class" if is_class else "the method" if "." in name else "the function"
    found = [] if lot[0] % 4 else [{"role": "system", "content": SYSTEM[lot[1] % len(SYSTEM)]}]
    found += _turn(WHAT[lot[2] % len(WHAT)].format(what=what, name=name, module=module), text)
    if isinstance(node, ast.ClassDef):
        methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
        if methods:
            found += _turn(METHODS[lot[3] % len(METHODS)], "\n".join(f"- `{method}`" for method in methods))
        return found
    if lot[4] % 2:
        found += _turn(HOW[lot[5] % len(HOW)], f"```python\n{node.name}({ast.unparse(node.args)})\n```")
    code = lines[node.lineno - 1 : node.end_lineno]
    if lot[6] % 2 and 1 < len(code) < CODE_LINES:
        found += _turn(CODE[lot[7] % len(CODE)], "```python\n" + textwrap.dedent("\n".join(code)) + "\n```")
    return found


def _turn(asked: str, said: str) -> list[Message]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def main() -> int:
    """Writes the file and says how much there is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="sources; else installed Python's")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--most", type=int, default=1 << 62, help="conversations to write")
    options = parser.parse_args()
    paths = sysconfig.get_paths()
    n, n_answers = 0, 0
    with open(options.output, "w", encoding="utf-8") as file:
        for folder in options.folders or dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib")):
            for path in sorted(folder.rglob("*.py")):
                module = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
                for messages in conversations(path, module.removeprefix("site-packages.")):
                    if n < options.most:
                        file.write(json.dumps({"messages": messages}) + "\n")
                        n += 1
                        n_answers += sum(message["role"] == "assistant" for message in messages)
    print(f"{n:,} conversations, {n_answers:,} answers, {options.output.stat().st_size / 1e6:.1f} MB")
    return 0 if n else 1


if __name__ == "__main__":
    sys.exit(main())
