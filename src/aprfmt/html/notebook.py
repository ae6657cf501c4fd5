"""HTML representations in notebooks: small tables and figures, without a page's styles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aprfmt.html.page import text

_STYLE = (
    ".aprfmt svg{max-width:420px;width:100%;height:auto;display:block}"
    ".aprfmt svg text{font:11px system-ui,sans-serif;fill:currentColor}"
    ".aprfmt figure{margin:0}.aprfmt figcaption{font-size:.85em}.aprfmt figcaption span{margin-left:1em;opacity:.8}"
    ".aprfmt .area{fill:#4c7df0;opacity:.7}"
)


def small_table(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """A table with every cell escaped; without a `header` the first cell of each row is its title."""

    def line(cells: Sequence[object], first: str, rest: str) -> str:
        tags = (first, *[rest] * (len(cells) - 1))
        return f"<tr>{''.join(f'<{t}>{text(cell)}</{t}>' for t, cell in zip(tags, cells, strict=True))}</tr>"

    head = line(header, "th", "th") if header else ""
    return f"<table>{head}{''.join(line(row, 'td' if header else 'th', 'td') for row in rows)}</table>"


def small_figure(figure: str) -> str:
    """A chart of charts.py with the styles that it needs, scoped to it."""
    return f'<div class="aprfmt"><style>{_STYLE}</style>{figure}</div>' if figure else ""
