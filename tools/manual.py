"""What `make docs` adds to the pages of docs/: the reference of every command and of the Python API, the root's pages.

mkdocs calls the functions `on_...`. The reference is read off typer's definitions and the docstrings while the manual
is built, and lies in no file.
"""

from __future__ import annotations

import inspect
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT / "src") not in sys.path:
    sys.path.insert(0, str(ROOT / "src"))

import aprfmt  # noqa: E402

ROOT_PAGES = {
    name: f"project/{name.lower()}" for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
}
"""Pages of the repository's root -> their places in the manual."""

_LINK = re.compile(r"(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"(`[^`]*`)")
_CODE_LINE = re.compile(r"`[^`\n]+`")
_FIELD = re.compile(r"^(\*{0,2}\w+(?:, \w+)*): (.*)$")
_SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:", "Yields:")


def on_config(config: Any) -> Any:
    """Puts a page a command into the navigation, and below the guides what mkdocs.yml does not place."""
    placed = set(re.findall(r"[\w/-]+\.md", repr(config.nav)))
    others = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name not in {*placed, "commands.md"})
    for entry in config.nav:
        for title, pages in entry.items():
            if title == "Guides":
                pages += others
            if title == "Reference":
                pages.insert(0, {"Commands": ["commands.md", *(f"reference/{name}.md" for name in sorted(commands()))]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds what is generated and what lies in the repository's root."""
    from mkdocs.structure.files import File

    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    for name, path in ROOT_PAGES.items():
        files.append(File.generated(config, path, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links between files of the repository into links between pages, and GitHub's `\\|` in tables into a bar."""
    own = page.file.src_uri
    source = next((name for name, path in ROOT_PAGES.items() if path == own), f"docs/{own}")

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        if target == "README.md":
            target = "docs/index.md"
        place = ROOT_PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if place is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(place, posixpath.dirname(own) or '.')}{match[3]}"

    return _CODE_LINE.sub(lambda match: match[0].replace("\\|", "|"), _LINK.sub(moved, markdown))


def generated() -> dict[str, str]:
    """The pages of the reference: path -> Markdown."""
    pages = {f"reference/{name}.md": command_page(name, command) for name, command in commands().items()}
    return pages | {"reference/python.md": python_page()}


def commands() -> dict[str, Any]:
    """Every command by its name, as typer has it."""
    import typer

    from aprfmt.cli.group import build

    os.environ.setdefault("COLUMNS", "100")
    return dict(typer.main.get_command(build(None)).commands)  # type: ignore[attr-defined]


def command_page(name: str, command: Any) -> str:
    """The page of one command, from its typer definition."""
    lines = [f"# apr {name}", ""]
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            lines += ["```text", *paragraph.splitlines()[1:], "```", ""]
        else:
            lines += [escaped(paragraph), ""]
    context = command.make_context(f"apr {name}", [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    lines += ["```text", f"apr {name} {usage}", "```", ""]
    for title, parameters in command.sections(context).items():
        kind = parameters[0].param_type_name
        rows = [_row(parameter, context) for parameter in parameters if parameter.name != "help"]
        lines += [f"## {title}", "", f"| {kind} | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _row(parameter: Any, context: Any) -> str:
    """A line of the table of options."""
    value = parameter.make_metavar(context)
    if parameter.param_type_name == "argument":
        shown = f"`{value}`"
    else:
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        shown = names if parameter.is_flag else f"{names} `{value}`"
    help_text = getattr(parameter, "help", None) or ""
    default = parameter.default
    if parameter.param_type_name == "option" and not parameter.is_flag and isinstance(default, (int, float, str)):
        help_text += f" Default: `{default}`."
    if parameter.required:
        help_text += " Required."
    return f"| {shown.replace('|', chr(92) + '|')} | {escaped(help_text).replace('|', chr(92) + '|')} |"


def python_page() -> str:
    """Every public function and class of the package, from its signature and docstring."""
    names = [name for name in aprfmt.__all__ if not name.startswith("_")]
    values = {name: getattr(aprfmt, name) for name in names}
    lines = ["# Python", "", escaped(inspect.getdoc(aprfmt) or ""), ""]
    groups = {
        "Functions": [n for n in names if inspect.isroutine(values[n])],
        "Types": [n for n in names if inspect.isclass(values[n])],
        "Values": [n for n in names if not inspect.isroutine(values[n]) and not inspect.isclass(values[n])],
    }
    for title, members in groups.items():
        lines += [f"## {title}", ""]
        for name in sorted(members, key=str.lower):
            lines += [f"### {name}", "", *_described(name, values[name]), ""]
    return "\n".join(lines)


def _described(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield from _documented(value)
        for member, method in vars(value).items():
            if member.startswith("_") or not getattr(method, "__doc__", None):
                continue
            plain = method.__func__ if isinstance(method, classmethod | staticmethod) else method
            if isinstance(method, property | cached_property):
                yield from ("", f"#### {name}.{member}", "", *_documented(method))
            elif inspect.isfunction(plain):
                yield from ("", f"#### {name}.{member}", "", *_signature(member, plain), "", *_documented(plain))
    elif inspect.isroutine(value):
        yield from (*_signature(name, value), "", *_documented(value))
    else:
        yield f"`{value!r}`"


class _Bare(str):
    """An annotation as it is written: without quotes where a signature shows it."""

    __slots__ = ()
    __repr__ = str.__str__


def _signature(name: str, function: Any) -> list[str]:
    """The call as a block, a parameter a line where it is long."""
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=_bare(p.annotation), default=_Bare("…") if inspect.isfunction(p.default) else p.default)
        for p in signature.parameters.values()
    ]
    signature = signature.replace(parameters=parameters, return_annotation=_bare(signature.return_annotation))
    text = f"{name}{signature}"
    if len(text) > 88:
        inner = [str(p) for p in parameters]
        kinds = [p.kind for p in parameters]
        if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
            inner.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
        text = f"{name}(\n    " + ",\n    ".join(inner) + f",\n) -> {signature.return_annotation}"
    return ["```python", text, "```"]


def _bare(annotation: Any) -> Any:
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def _documented(value: Any) -> Iterator[str]:
    """A docstring as Markdown: sections of fields become lists."""
    inside = False
    for line in (inspect.getdoc(value) or "").splitlines():
        text = line.strip()
        if text in _SECTIONS:
            inside = True
            yield from ("", f"**{text.removesuffix(':')}**", "")
        elif inside and text and (found := _FIELD.match(text)) and len(line) - len(line.lstrip()) == 4:
            yield f"* `{found[1]}`: {escaped(found[2])}"
        elif inside and text and line.startswith(" "):
            yield f"  {escaped(text)}"
        else:
            inside = inside and not text
            yield escaped(text)


def escaped(text: str) -> str:
    """Text in which nothing but code between backticks is Markdown."""
    parts = _CODE.split(text)
    return "".join(p if n % 2 else re.sub(r"([*_<>\[\]\\])", r"\\\1", p) for n, p in enumerate(parts))
