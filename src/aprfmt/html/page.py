"""HTML pages that stand alone: no network, no libraries, light and dark, any width, paper, keyboard.

Every function gives a piece of HTML; text from outside is escaped in `text` and nowhere else. Charts and heat maps:
charts.py, heatmaps.py; colours and paper: page.css; what answers to pointer, keys and search: page.js.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

Tone = tuple[str, str]
"""Words and their colour: "good", "bad", "warn" or "" for none."""


def page(title: str, parts: Iterable[str]) -> str:
    """A whole document with `parts` in its body."""
    body = "\n".join(part for part in parts if part)
    style, code = ((files(__package__) / name).read_text("utf-8").rstrip() for name in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}\n</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>\n{code}\n</script>\n</body>\n</html>\n"
    )


def text(value: object) -> str:
    """`value` as text that is safe inside an element and inside a quoted attribute."""
    words = str(value).encode("utf-8", "replace").decode()
    return escape("".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in words))


def headline(words: str, pill: Tone | None = None) -> str:
    """The title of the page, with a verdict beside it."""
    verdict = f' <span class="pill {pill[1]}">{text(pill[0])}</span>' if pill is not None else ""
    return f"<h1>{text(words)}{verdict}</h1>"


def heading(words: str) -> str:
    """The title of a section."""
    return f"<h2>{text(words)}</h2>"


def paragraph(words: str, look: str = "soft") -> str:
    """A line of text: "lead", "soft", "good", "bad", "warn", or "" as it is."""
    return f'<p class="{look}">{text(words)}</p>' if words else ""


def tiles(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """Big numbers: (label, value, note, "good" | "bad" | "" as the note's colour)."""
    cells = (
        f"<div class=tile><dt>{text(label)}</dt><dd><b>{text(value)}</b>"
        + (f'<small class="{tone}">{text(note)}</small>' if note else "")
        + "</dd></div>"
        for label, value, note, tone in rows
    )
    return f"<dl class=tiles>{''.join(cells)}</dl>"


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
    """A table in a card; `right` and `code` name columns (by header, separated by |) of numbers and of code.

    Args:
        header: titles of the columns.
        rows: cells, with a colour where they are a Tone.
        right: columns of numbers.
        code: columns of code.
        sortable: the table is sorted by the column whose title is clicked.
        stack: on a phone a row is a list of its cells, each with its title: for many columns or long texts.
        search: what a box above the table looks for, such as "tensors"; "" for no box.
        shown: the first rows that stand in the document; the box finds the others too, which need `search`.
    """
    lines = list(rows)
    if not lines:
        return ""
    numeric, coded = ({name for name in names.split("|") if name} for names in (right, code))
    kinds = ["n" if name in numeric else "code" if name in coded else "" for name in header]

    def cell(title: str, kind: str, value: str | Tone) -> str:
        words, tone = (value, "") if isinstance(value, str) else value
        marks = " ".join(mark for mark in (kind, tone) if mark)
        marks = f' class="{marks}"' if marks else ""
        return f"<td{marks}" + (f' data-title="{text(title)}"' if stack else "") + f">{text(words)}</td>"

    titles = "".join(
        f"<th scope=col{' class=n' if kind == 'n' else ''}>{text(name)}</th>"
        for name, kind in zip(header, kinds, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(cell, header, kinds, row))}</tr>" for row in lines[:shown])
    looks = " ".join(look for look, is_so in (("sortable", sortable), ("stack", stack)) if is_so)
    mark = f' class="{looks}"' if looks else ""
    grid = f"<table{mark}><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
    return _search(search, lines, shown, kinds) + f"<div class=card>{grid}</div>"


def _search(what: str, rows: Sequence[Sequence[str | Tone]], shown: int | None, kinds: Sequence[str]) -> str:
    """The box above a table, with the rows that are not in it."""
    if not what:
        return ""
    more = [[v if isinstance(v, str) else v[0] for v in row] for row in rows[shown:]] if shown is not None else []
    data = f' data-more="{text(json.dumps([kinds, more], ensure_ascii=False))}"' if more else ""
    first = f"the first {shown:,} of {len(rows):,} {what}" if more else f"{len(rows):,} {what}"
    return (
        f"<div class=search{data}>"
        f'<input type=search placeholder="Search {text(what)}" aria-label="Search {text(what)}">'
        f"<output>{text(first)}</output></div>"
    )


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names with their values, in a card; "" where there are none."""
    body = "".join(f"<tr><th scope=row>{text(name)}</th><td class=code>{text(value)}</td></tr>" for name, value in rows)
    return f"<div class=card><table class=facts>{body}</table></div>" if body else ""


def fold(words: str, inner: str) -> str:
    """`inner` behind a line that opens it."""
    return f"<details><summary>{text(words)}</summary>{inner}</details>" if inner else ""


def grid(pieces: Iterable[str]) -> str:
    """Figures side by side, as many as fit."""
    inner = "\n".join(piece for piece in pieces if piece)
    return f"<div class=grid>\n{inner}\n</div>" if inner else ""


def track(share: float) -> str:
    """A bar that is full to `share` of one."""
    return f'<div class=track><i style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></i></div>'
