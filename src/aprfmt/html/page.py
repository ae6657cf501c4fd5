"""Self-contained HTML pages: no network, no libraries; light and dark mode, any width, print, keyboard.

Each function returns HTML, rendered by a macro of pieces.html, which escapes everything by `text`. See charts.py and
heatmaps.py for figures, page.css for colours and print, page.js for pointer, keys and search.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2.environment import TemplateModule

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

LIVE_POLICY = f"{_POLICY}; connect-src 'self'"
"""Content-Security-Policy of a served page, which may send requests to its own server."""

Tone = tuple[str, str]
"""Text and its colour: "good", "bad", "warn" or "" for none."""


def _read(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8").rstrip()


@cache
def _macros() -> TemplateModule:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def escaped(value: object) -> object:
        return value if isinstance(value, Markup) else Markup(text(value))

    return (
        Environment(autoescape=True, undefined=StrictUndefined, finalize=escaped)
        .from_string(_read("pieces.html"))
        .module
    )


def _piece(name: str, *values: object) -> str:
    return str(getattr(_macros(), name)(*values))


def text(value: object) -> str:
    """`value` as text that is safe inside an element and inside a quoted attribute."""
    words = str(value).encode("utf-8", "replace").decode()
    return escape("".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in words))


def page(title: str, parts: Iterable[str], *, live: bool = False, viewer: bool = False) -> str:
    """A whole document with `parts` in its body.

    With `live` it polls its server for newer parts; with `viewer` it contains an explorer or a slider.
    """
    scripts = ["page.js", *(["live.js"] if live else []), *(["viewer.js"] if viewer else [])]
    code = "\n".join(map(_read, scripts))
    return _piece("page", title, LIVE_POLICY if live else _POLICY, _read("page.css"), code, [p for p in parts if p])


def headline(words: str, pill: Tone | None = None) -> str:
    """The page's title, with a verdict beside it."""
    return _piece("headline", words, pill)


def heading(words: str) -> str:
    """A section heading."""
    return _piece("heading", words)


def paragraph(words: str, look: str = "soft") -> str:
    """A line of text in a style: "lead", "soft", "good", "bad", "warn", or "" for plain."""
    return _piece("paragraph", words, look) if words else ""


def tiles(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """Big numbers: (label, value, note, "good" | "bad" | "" as the note's colour)."""
    return _piece("tiles", rows)


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str | Tone]],
    *,
    right: str = "",
    code: str = "",
    sortable: bool = False,
    stack: bool = False,
    search: str = "",
    shown: int | None = None,
) -> str:
    """A table in a card; `right` and `code` name columns by header, separated by |.

    Args:
        header: titles of the columns.
        rows: cells, with a colour if they are a Tone.
        right: columns of numbers.
        code: columns of code.
        sortable: clicking a header sorts the table.
        stack: on a phone show each row as a list of titled cells: for many columns or long texts.
        search: what the search box above the table finds, such as "tensors"; "": no box.
        shown: number of rows shown at first; the search box, which `search` adds, finds the others.
    """
    lines = [[(cell, "") if isinstance(cell, str) else cell for cell in row] for row in rows]
    if not lines:
        return ""
    marks = dict.fromkeys(code.split("|"), "code") | dict.fromkeys(right.split("|"), "n") | {"": ""}
    kinds = [marks.get(name, "") for name in header]
    cells = (
        [(words, f"{kind} {tone}".strip()) for kind, (words, tone) in zip(kinds, row, strict=True)]
        for row in lines[:shown]
    )
    looks = " ".join(look for look, is_so in (("sortable", sortable), ("stack", stack)) if is_so)
    box = ""
    if search:
        more = [[words for words, _ in row] for row in lines[shown:]] if shown is not None else []
        first = f"the first {shown:,} of {len(lines):,} {search}" if more else f"{len(lines):,} {search}"
        box = _piece("search", search, json.dumps([kinds, more], ensure_ascii=False) if more else "", first)
    return box + _piece("table", looks, list(zip(header, kinds, strict=True)), cells, stack)


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names with their values, in a card; "" if missing."""
    found = list(rows)
    return _piece("facts", found) if found else ""


def fold(words: str, inner: str, *, wide: bool = False) -> str:
    """A collapsible section with `inner`; `wide`: collapsed on a phone only."""
    return _piece("fold", words, inner, wide) if inner else ""


def code(words: str) -> str:
    """Preformatted text in a card."""
    return _piece("code", words) if words else ""


def branch(label: str, what: str, inner: str = "") -> str:
    """A node of a tree, collapsible if it has an `inner`."""
    return _piece("branch", label, what, inner)


def branches(inner: str) -> str:
    """A tree in a card."""
    return _piece("branches", inner) if inner else ""


def explorer(spec: str, example: str) -> str:
    """A text field that the page tokenizes (viewer.js); `spec` is JSON of inspection/token_explorer.py."""
    return _piece("explorer", spec, example)


def memory_slider(data: str, kinds: Sequence[str]) -> str:
    """A slider for the context length and a choice of the KV cache's type (viewer.js); `data` is JSON."""
    return _piece("memory", data, kinds)


def grid(pieces: Iterable[str]) -> str:
    """Figures side by side, wrapping to the width."""
    found = [piece for piece in pieces if piece]
    return _piece("grid", found) if found else ""


def track(share: float) -> str:
    """A progress bar, filled to `share` (0 to 1)."""
    return _piece("track", f"{100 * min(1.0, max(0.0, share)):.1f}")
