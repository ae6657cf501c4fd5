"""HTML pages that stand alone, and their charts as inline SVG: no network, no libraries, light and dark, any width.

Every function gives a piece of HTML; text from outside is escaped in `text` and nowhere else. Charts are drawn in
units of the view box, 400 wide (800 for a heat map); numbers are written with one decimal. Colours: page.css.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import pairwise
from statistics import fmean

from aprfmt.text import format_number

WIDTH, HEIGHT = 400.0, 200.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 8.0, 10.0, 24.0
_NAME = 14.0
"""Room below a chart for the name of its x axis."""
_POINTS = 400
"""Points of a drawn curve at most: one a unit of the view box."""
_NOISY = 60
"""From so many points on a curve gets a mean over its neighbours beside it."""
_LOG_RATIO = 30.0
"""A positive curve that spans more than this is drawn over a logarithmic axis."""
_MAP_WIDTH, _MAP_LABELS, _MAP_ROW, _MAP_LABEL_CHARS = 800.0, 210.0, 17.0, 33
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, parts: Iterable[str], *, interactive: bool = False) -> str:
    """A whole document with `parts` in its body; in an `interactive` one charts show the values under the pointer."""
    body = "\n".join(part for part in parts if part)
    style = (files(__package__) / "page.css").read_text("utf-8").rstrip()
    code = (files(__package__) / "chart.js").read_text("utf-8") if interactive else ""
    script = f"<script>\n{code}</script>\n" if interactive else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n{script}</body>\n</html>\n"
    )


def text(value: object) -> str:
    """`value` as text that is safe inside an element and inside a quoted attribute."""
    words = str(value).encode("utf-8", "replace").decode()
    return escape("".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in words))


def heading(words: str) -> str:
    """The title of a section."""
    return f"<h2>{text(words)}</h2>"


def tiles(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """Big numbers: (label, value, note, "good" | "bad" | "" as the note's colour)."""
    cells = (
        f"<div class=tile><span>{text(label)}</span><b>{text(value)}</b>"
        + (f'<small class="{tone}">{text(note)}</small>' if note else "")
        + "</div>"
        for label, value, note, tone in rows
    )
    return f"<div class=tiles>{''.join(cells)}</div>"


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, right: str = "", code: str = "", sortable: bool = False
) -> str:
    """A table in a card; `right` and `code` name columns (by header, separated by |) of numbers and of code.

    A `sortable` one in an interactive page is sorted by the column whose title is clicked.
    """
    numeric, coded = ({name for name in names.split("|") if name} for names in (right, code))
    kinds = ["n" if name in numeric else "code" if name in coded else "" for name in header]

    def cells(tag: str, row: Sequence[str]) -> str:
        marked = (f' class="{kind}"' if kind and (tag == "td" or kind == "n") else "" for kind in kinds)
        return "".join(f"<{tag}{mark}>{text(cell)}</{tag}>" for mark, cell in zip(marked, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    kind = " class=sortable" if sortable else ""
    return f"<div class=card><table{kind}><tr>{cells('th', header)}</tr>{body}</table></div>" if body else ""


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names with their values, in a card; "" where there are none."""
    body = "".join(f"<tr><th>{text(name)}</th><td class=code>{text(value)}</td></tr>" for name, value in rows)
    return f"<div class=card><table>{body}</table></div>" if body else ""


def fold(words: str, inner: str) -> str:
    """`inner` behind a line that opens it."""
    return f"<details><summary>{text(words)}</summary>{inner}</details>" if inner else ""


def grid(pieces: Iterable[str]) -> str:
    """Figures side by side, as many as fit."""
    inner = "\n".join(piece for piece in pieces if piece)
    return f"<div class=grid>\n{inner}\n</div>" if inner else ""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve; a y of None is a gap.

    `look`: "line" (noisy: a mean beside it), "exact", "points" (few, joined) or "level" (one height, dashed).
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    look: str = "line"
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment that every curve shows as an upright line; a `bad` one in red."""

    x: float
    words: str
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to units of the view box."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Where `value` lies."""
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values between the ends, about four."""
        return _log_ticks(self.low, self.high) if self.is_log else _ticks(self.low, self.high)


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5)):
        found = [n * 10.0**p for p in powers for n in steps if low <= n * 10.0**p <= high]
        if len(found) >= 3:
            break
    return found[:: max(1, math.ceil(len(found) / 6))]


def is_wide(values: Sequence[float], kind: str) -> bool:
    """Whether `values` are best seen over a logarithmic axis, which shares of one never are."""
    return kind != "percent" and min(values) > 0 and max(values) / min(values) > _LOG_RATIO


def _axis(values: Sequence[float], start: float, end: float, kind: str, *, zero: bool) -> Axis:
    low, high = min(values), max(values)
    if is_wide(values, kind) and not zero:
        return Axis(low / 1.15, high * 1.15, start, end, is_log=True)
    if zero:
        low = min(low, 0.0)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Axis(low if zero and low == 0 else low - room, high + room, start, end)


def thin(
    xs: Sequence[float], ys: Sequence[float | None]
) -> tuple[list[float], list[float | None], list[tuple[float, float] | None]]:
    """At most _POINTS points: means of neighbours, and the least and largest of each (empty where none is lost)."""
    n = len(xs)
    if n <= _POINTS:
        return list(xs), list(ys), []
    edges = [n * i // _POINTS for i in range(_POINTS + 1)]
    few_x, few_y, spans = [], [], []
    for a, b in pairwise(edges):
        known = [y for y in ys[a:b] if y is not None]
        few_x.append(fmean(xs[a:b]))
        few_y.append(fmean(known) if known else None)
        spans.append((min(known), max(known)) if known else None)
    return few_x, few_y, spans


def _smooth(ys: Sequence[float | None]) -> list[float | None]:
    """Means over a window of 4 % of the points, less at the ends; a gap stays one."""
    n, out = len(ys), list[float | None]()
    for i, y in enumerate(ys):
        half = min(max(1, n // 50), i, n - 1 - i)  # as far to both sides, or the ends would bend
        near = [v for v in ys[max(0, i - half) : i + half + 1] if v is not None]
        out.append(None if y is None else fmean(near))
    return out


def chart(
    title: str,
    series: Sequence[Series],
    *,
    x_name: str = "",
    x_range: tuple[float, float] | None = None,
    y_name: str = "",
    kind: str = "number",
    zero: bool = False,
    marks: Sequence[Mark] = (),
) -> str:
    """A figure with its legend; "" where no series has a point.

    Args:
        title: of the figure.
        series: what is drawn; those without a point are left out.
        x_name: what the x axis counts.
        y_name: what the y axis measures, with its unit; where it is given both names stand at their axes.
        x_range: its ends, where several figures share them.
        kind: "number" or "percent" (shares of one).
        zero: the y axis begins at zero.
        marks: upright lines.
    """
    drawn = [s for s in series if any(y is not None for y in s.ys)]
    values = [y for s in drawn for y in s.ys if y is not None]
    if not values:
        return ""
    low, high = x_range or (min(min(s.xs) for s in drawn), max(max(s.xs) for s in drawn))
    x = Axis(low, high if high > low else low + 1, _LEFT, WIDTH - _RIGHT)
    y = _axis(values, HEIGHT - _BOTTOM, _TOP, kind, zero=zero)
    say = _percent if kind == "percent" else format_number
    body = [*_grid(x, y, say), *_marks(x, marks)]
    kept = []
    for s in drawn:
        xs, ys, spans = thin(s.xs, s.ys)
        kept.append({"n": s.name, "x": [_digits(v) for v in xs], "y": [_digits(v) for v in ys]})
        body += _curve(s, xs, ys, spans, x, y)
    data = {"w": WIDTH, "l": x.start, "r": x.end, "lo": x.low, "hi": x.high, "k": kind, "x": x_name, "s": kept}
    body += _axis_names(x_name, y_name) if y_name else ()
    height = HEIGHT + (_NAME if y_name else 0)
    return _figure(title, body, height, legend=_legend(drawn, say), data=json.dumps(data))


def histograms(title: str, rows: Sequence[Sequence[float]], reach: float, labels: tuple[str, str] = ("", "")) -> str:
    """Rows of bins from -reach to reach, one above the other, each as high as its fullest bin; "" without rows.

    `labels` stand beside the first row, on top, and the last.
    """
    if not rows or not rows[0]:
        return ""
    height = min(12.0 * len(rows) + 22, HEIGHT - _TOP - _BOTTOM)
    x = Axis(-reach, reach, _LEFT, WIDTH - _RIGHT)
    floors = [_TOP + height * (i + 1) / len(rows) for i in range(len(rows))]
    body = [*_x_axis(x, _TOP + height)]
    for floor, bins in zip(floors, rows, strict=True):
        scale = 0.95 * height / len(rows) / (max(bins) or 1.0)
        middles = (-reach + (i + 0.5) * 2 * reach / len(bins) for i in range(len(bins)))
        outline = _path([(x.at(middle), floor - n * scale) for middle, n in zip(middles, bins, strict=True)])
        body.append(f'<path class="area f0" d="{outline}V{floor:.1f}H{x.at(-reach + reach / len(bins)):.1f}Z"/>')
    for floor, label in zip((floors[0], floors[-1]), labels if len(rows) > 1 else labels[:1], strict=False):
        body.append(f'<text x="{_LEFT - 6:g}" y="{floor:.1f}" text-anchor="end">{text(label)}</text>')
    return _figure(title, body, _TOP + height + _BOTTOM)


@dataclass(frozen=True, slots=True)
class Cell:
    """One square of a heat map: the strength of its colour (0 to 1; None: left empty), the colour, words on hover."""

    strength: float | None
    words: str = ""
    colour: int = 0


def heat_map(
    title: str,
    rows: Sequence[tuple[str, Sequence[Cell]]],
    columns: Sequence[str],
    legend: Sequence[tuple[str, Cell]] = (),
    x_name: str = "",
) -> str:
    """A square for each row and column; every few columns have their caption below, and under these `x_name`.

    `legend`: words of a colour.
    """
    if not rows or not columns:
        return ""
    size = (_MAP_WIDTH - _MAP_LABELS) / len(columns)
    height = _MAP_ROW * len(rows) + 22
    body = [part for i, (name, cells) in enumerate(rows) for part in _map_row(i * _MAP_ROW, name, cells, size)]
    for i in range(0, len(columns), -(-len(columns) // 16)):
        at = _MAP_LABELS + (i + 0.5) * size
        body.append(f'<text x="{at:.1f}" y="{height - 7:g}" text-anchor="middle">{text(columns[i])}</text>')
    if x_name:
        middle = (_MAP_LABELS + _MAP_WIDTH) / 2
        body.append(f'<text class="name" x="{middle:g}" y="{height + 8:g}" text-anchor="middle">{text(x_name)}</text>')
        height += _NAME
    words = "".join(
        f'<span><i class="dot k{cell.colour}" style="opacity:{_opacity(cell)}"></i>{text(name)}</span>'
        for name, cell in legend
    )
    return _figure(title, body, height, legend=words, width=_MAP_WIDTH)


def _map_row(top: float, name: str, cells: Sequence[Cell], size: float) -> Iterator[str]:
    short = name if len(name) <= _MAP_LABEL_CHARS else "…" + name[1 - _MAP_LABEL_CHARS :]
    yield f'<text x="{_MAP_LABELS - 8:g}" y="{top + 12:g}" text-anchor="end">{text(short)}</text>'
    for i, cell in enumerate(cells):
        place = f'x="{_MAP_LABELS + i * size:.1f}" y="{top:g}" width="{size:.1f}" height="{_MAP_ROW:g}"'
        if cell.strength is None:
            yield f'<rect class="cell none" {place}/>'
            continue
        yield (
            f'<rect class="cell f{cell.colour}" fill-opacity="{_opacity(cell)}" {place}>'
            f"<title>{text(cell.words)}</title></rect>"
        )


def _opacity(cell: Cell) -> str:
    return f"{0.12 + 0.88 * min(1.0, max(0.0, cell.strength or 0.0)):.2f}"


def _figure(
    title: str, body: Sequence[str], height: float, *, legend: str = "", data: str = "", width: float = WIDTH
) -> str:
    """A figure of SVG elements; `data` is what chart.js shows under the pointer."""
    kind = ' class="wide"' if width > WIDTH else ""
    bound = f' data-chart="{text(data)}"' if data else ""
    cursor = f'<line class="cursor" y1="{_TOP:g}" y2="{min(height, HEIGHT) - _BOTTOM:g}" visibility="hidden"/>'
    return (
        f"<figure{kind}{bound}><figcaption><b>{text(title)}</b>{legend}</figcaption>"
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{text(title)}">'
        f"{''.join(body)}{cursor if data else ''}</svg>{'<output></output>' if data else ''}</figure>"
    )


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _legend(series: Sequence[Series], say: Callable[[float], str]) -> str:
    words = []
    for s in series:
        last = next(y for y in reversed(s.ys) if y is not None)
        shape = " dot" if s.look == "points" else ""
        words.append(f'<span><i class="k{s.colour}{shape}"></i>{text(s.name)}: {text(say(last))}</span>')
    return "".join(words)


def _grid(x: Axis, y: Axis, say: Callable[[float], str]) -> Iterator[str]:
    for value in y.ticks():
        at = y.at(value)
        yield f'<line class="axis" x1="{x.start:g}" x2="{x.end:g}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{x.start - 6:g}" y="{at + 4:.1f}" text-anchor="end">{text(say(value))}</text>'
    yield from _x_axis(x, y.start)


def _x_axis(x: Axis, bottom: float) -> Iterator[str]:
    for value in x.ticks():
        at = x.at(value)
        anchor = "end" if at > x.end - 12 else "middle"
        yield f'<text x="{at:.1f}" y="{bottom + 16:g}" text-anchor="{anchor}">{text(format_number(value))}</text>'


def _axis_names(x_name: str, y_name: str) -> Iterator[str]:
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    yield f'<text class="name" x="{middle:g}" y="{HEIGHT + _NAME - 5:g}" text-anchor="middle">{text(x_name)}</text>'
    place = f'transform="translate(10 {(_TOP + HEIGHT - _BOTTOM) / 2:g}) rotate(-90)"'
    yield f'<text class="name" {place} text-anchor="middle">{text(y_name)}</text>'


def _marks(x: Axis, marks: Sequence[Mark]) -> Iterator[str]:
    for mark in marks:
        if x.low <= mark.x <= x.high:
            at, tone = x.at(mark.x), " bad" if mark.bad else ""
            yield (
                f'<line class="mark{tone}" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP:g}" y2="{HEIGHT - _BOTTOM:g}">'
                f"<title>{text(mark.words)}</title></line>"
            )


def _curve(
    s: Series,
    xs: Sequence[float],
    ys: Sequence[float | None],
    spans: Sequence[tuple[float, float] | None],
    x: Axis,
    y: Axis,
) -> Iterator[str]:
    at = [None if v is None else (x.at(u), y.at(v)) for u, v in zip(xs, ys, strict=True)]
    if s.look == "level":
        height = next(p[1] for p in at if p is not None)
        yield f'<path class="curve level s{s.colour}" d="M{x.start:g} {height:.1f}H{x.end:g}"/>'
        return
    if spans:
        known = [(x.at(u), y.at(span[0]), y.at(span[1])) for u, span in zip(xs, spans, strict=True) if span]
        there = [f"{u:.1f} {top:.1f}" for u, _, top in known]
        back = [f"{u:.1f} {bottom:.1f}" for u, bottom, _ in reversed(known)]
        yield f'<path class="band f{s.colour}" d="M{"L".join([*there, *back])}Z"/>'
    if s.look == "line" and len(xs) >= _NOISY and not spans:
        yield f'<path class="curve raw s{s.colour}" d="{_path(at)}"/>'
        at = [None if v is None else (x.at(u), y.at(v)) for u, v in zip(xs, _smooth(ys), strict=True)]
    yield f'<path class="curve s{s.colour}" d="{_path(at)}"/>'
    if s.look == "points" or len(xs) == 1:
        radius = 3.2 if len(xs) <= 20 else 2.2
        for p in at:
            if p is not None:
                yield f'<circle class="f{s.colour}" cx="{p[0]:.1f}" cy="{p[1]:.1f}" r="{radius}"/>'


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    words, pen = [], "M"
    for p in points:
        if p is None:
            pen = "M"
            continue
        words.append(f"{pen}{p[0]:.1f} {p[1]:.1f}")
        pen = "L"
    return "".join(words)
