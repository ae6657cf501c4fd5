"""Writes tests/house/strings.txt: every sentence of src/ that a user can read, by file, one line each.

    python tools/strings.py

A sentence is a string of the code with a space between two words: help, messages, hints, rows of reports, notes and
headings; of docstrings, those of commands and of public functions, which become help and the manual. A value in an
f-string is written as `{}`. Markup is left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src"
INVENTORY = ROOT / "tests" / "house" / "strings.txt"

_PROSE = re.compile(r"[A-Za-z{}'’`)][,;:.…]? [(\"'`{]?[A-Za-z{]")
_WORD = re.compile(r"(?<![\w{.])[a-z]{2,}(?![\w}])")
_MARKUP = re.compile(r"\s*<[a-z!/]")
_NOT_PRINTED = SOURCES / "aprfmt" / "running" / "qa_text.py"  # what `apr qa` lets a model read
_DOCUMENTED = {"src/aprfmt/api.py", "src/aprfmt/convert/api.py", "src/aprtrain/api.py"}
"""Modules of which the public functions make the reference of the manual."""


def sentences(path: Path) -> Iterator[str]:
    """The sentences of one module, in the order of its syntax tree."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = path.relative_to(ROOT).as_posix()
    documented = name.startswith("src/aprfmt/cli/") or name in _DOCUMENTED
    docstrings = {id(node.value): kept and documented for node, kept in _docstrings(tree)}
    for text in (_text(node) for node in _strings(tree) if docstrings.get(id(node), True)):
        if _PROSE.search(text) and _WORD.search(text) and not _MARKUP.match(text):
            yield " ".join(text.split())


def _docstrings(tree: ast.Module) -> Iterator[tuple[ast.Expr, bool]]:
    """Each string that is a statement, and whether it is the docstring of a public function or class."""
    for node in ast.walk(tree):
        first = node.body[0] if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_" else None
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                yield child, child is first


def _strings(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    """The string literals below `node`; one inside a value of an f-string is its own."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node
    elif isinstance(node, ast.JoinedStr):
        yield node
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                yield from _strings(part.value)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child)


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def inventory() -> str:
    """The whole file."""
    blocks = []
    for path in sorted({*SOURCES.rglob("*.py")} - {_NOT_PRINTED}):
        if lines := list(sentences(path)):
            blocks.append("\n".join([f"== {path.relative_to(SOURCES).as_posix()}", *lines]))
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    INVENTORY.write_text(inventory(), encoding="utf-8")
