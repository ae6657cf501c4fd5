"""Heat maps: a row of squares for each kind of tensor, one colour scale for the whole map."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aprfmt.html.page import text
from aprfmt.text import format_number

_LOG_RATIO = 30.0
"""Positive values that span more than this are coloured by their logarithms."""
_TICKS = 16
_LABEL_CHARS = 36


@dataclass(frozen=True, slots=True)
class Cell:
    """One square of a heat map: the strength of its colour (0 to 1; None: left empty), the colour, words on hover."""

    strength: float | None
    words: str = ""
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to strengths of a colour, the same for every square of a map."""

    low: float
    high: float
    is_log: bool

    @classmethod
    def of(cls, values: Sequence[float]) -> Scale:
        """From zero to the largest of `values`, none negative; where they span much, from the least, by logarithms."""
        positive = [value for value in values if value > 0]
        low, high = min(positive, default=0.0), max(positive, default=0.0)
        is_log = low > 0 and high / low > _LOG_RATIO
        return cls(low if is_log else 0.0, high, is_log)

    def strength(self, value: float) -> float:
        """Of 0 to 1."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else 0.0
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0

    @property
    def legend(self) -> Legend:
        """The scale as a ramp between its ends."""
        note = "log scale" if self.is_log else ""
        return Legend(ramp=(format_number(self.low), format_number(self.high)), note=note)


@dataclass(frozen=True, slots=True)
class Legend:
    """What the colours mean: words of single ones, a ramp of the first colour from pale to full, a remark."""

    cells: Sequence[tuple[str, Cell]] = ()
    ramp: tuple[str, str] | None = None
    note: str = ""


def heat_map(
    title: str, rows: Sequence[tuple[str, Sequence[Cell]]], columns: Sequence[str], legend: Legend, x_name: str
) -> str:
    """A square for each row and column; every few columns have their caption below, and under these `x_name`.

    Rows stand in the text's own lines: on a phone the name stands above its squares, on paper no row is cut.
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
    said = f"{name}: {known[0]} … {known[-1]}" if len(known) > 1 else f"{name}: {(known or ['nothing'])[0]}"
    return (
        f'<div class=row><span title="{text(name)}"><bdi>{text(name)}</bdi></span>'
        f'<svg viewBox="0 0 {len(columns)} 1" preserveAspectRatio="none" role="img" '
        f'tabindex={0 if is_first else -1} aria-label="{text(said)}">{"".join(squares)}</svg></div>'
    )


def _opacity(cell: Cell) -> str:
    return f"{0.12 + 0.88 * min(1.0, max(0.0, cell.strength or 0.0)):.2f}"
