"""Heat maps: a row of squares for each kind of tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from aprfmt.html.page import text

_TICKS = 16
_LABEL_CHARS = 36


@dataclass(frozen=True, slots=True)
class Cell:
    """One square of a heat map: the strength of its colour (0 to 1; None: left empty), the colour, words on hover."""

    strength: float | None
    words: str = ""
    colour: int = 0


def against_median(values: Sequence[float]) -> list[tuple[float, int, float]]:
    """(strength, colour, ratio) of each value relative to the median; full strength below a quarter and above four
    times.

    Colour 0 is above the median, 1 below. If the median is not positive, only values that differ from it have a colour.
    """
    middle = median(values) if values else 0.0
    found = []
    for value in values:
        ratio = value / middle if middle > 0 else 1.0 if value == middle else math.inf
        far = abs(math.log2(ratio)) if 0 < ratio < math.inf else 2.0
        found.append((min(1.0, far / 2), int(ratio < 1), ratio))
    return found


@dataclass(frozen=True, slots=True)
class Legend:
    """Legend: words for single colours, a ramp of the first colour from pale to full, a remark."""

    cells: Sequence[tuple[str, Cell]] = ()
    ramp: tuple[str, str] | None = None
    note: str = ""


def heat_map(
    title: str, rows: Sequence[tuple[str, Sequence[Cell]]], columns: Sequence[str], legend: Legend, x_name: str
) -> str:
    """A square for each row and column; captions of every few columns below, and `x_name` under them.

    Rows are laid out as text lines: on a phone the name is above its squares, and in print no row is cut.
    """
    if not rows or not columns:
        return ""
    body = "".join(_row(name, cells, columns, is_first=i == 0) for i, (name, cells) in enumerate(rows))
    step = -(-len(columns) // _TICKS)
    ticks = "".join(
        f'<span style="left:{100 * (i + 0.5) / len(columns):.2f}%">{text(columns[i])}</span>'
        for i in range(0, len(columns), step)
    )
    axis = f"<div class=row aria-hidden=true><span></span><div class=ticks>{ticks}<b>{text(x_name)}</b></div></div>"
    caption = f"<figcaption><b>{text(title)}</b>{''.join(_legend(legend))}</figcaption>"
    width = 0.49 * min(_LABEL_CHARS, max(len(name) for name, _ in rows))
    return f'<figure class=map style="--label:{width:.1f}rem">{caption}{body}{axis}<output></output></figure>'


def _legend(legend: Legend) -> Iterator[str]:
    if legend.note:
        yield f"<span class=note>{text(legend.note)}</span>"
    if legend.ramp is not None:
        yield f"<span>{text(legend.ramp[0])}<i class=ramp></i>{text(legend.ramp[1])}</span>"
    for name, cell in legend.cells:
        yield f'<span><i class="dot k{cell.colour}" style="opacity:{_opacity(cell)}"></i>{text(name)}</span>'


def _row(name: str, cells: Sequence[Cell], columns: Sequence[str], *, is_first: bool) -> str:
    squares = []
    for i, cell in enumerate(cells):
        if cell.strength is None:
            squares.append(f'<rect class="cell none" x="{i}" width="1" height="1"/>')
            continue
        look = f'class="cell f{cell.colour}" fill-opacity="{_opacity(cell)}"'
        squares.append(f'<rect {look} x="{i}" width="1" height="1"><title>{text(cell.words)}</title></rect>')
    known = [cell.words for cell in cells if cell.strength is not None]
    label = f"{name}: {known[0]} … {known[-1]}" if len(known) > 1 else f"{name}: {(known or ['nothing'])[0]}"
    return (
        f'<div class=row><span title="{text(name)}"><bdi>{text(name)}</bdi></span>'
        f'<svg viewBox="0 0 {len(columns)} 1" preserveAspectRatio="none" role="img" '
        f'tabindex={0 if is_first else -1} aria-label="{text(label)}">{"".join(squares)}</svg></div>'
    )


def _opacity(cell: Cell) -> str:
    return f"{0.12 + 0.88 * min(1.0, max(0.0, cell.strength or 0.0)):.2f}"
