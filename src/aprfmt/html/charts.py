"""Charts as inline SVG: curves, histograms, bars, in units of a view box 400 wide; numbers have one decimal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import fmean

from aprfmt.html.page import text
from aprfmt.text import format_number

WIDTH, HEIGHT = 400.0, 214.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 8.0, 10.0, 38.0
_POINTS = 400
"""Maximum number of points of a curve: one per unit of the view box."""
_NOISY = 60
"""Minimum number of points of a curve that is also drawn smoothed."""
_LOG_RATIO = 30.0
"""Ratio above which a positive curve has a logarithmic axis."""
_ROUNDING = 1e-9
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True, slots=True)
class Series:
    """One curve; a y of None is a gap.

    `look`: "line" (noisy: a mean beside it), "exact", "points" (few, joined), "scatter" (not joined, at most 400, with
    the words of each point in `labels`) or "level" (one height, dashed).
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    look: str = "line"
    colour: int = 0
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """An event, drawn as a vertical line; red if `bad`."""

    x: float
    words: str
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over one axis.

    Attributes:
        title: of the figure.
        series: the curves; those without a point are left out.
        x_name, y_name: axis titles, with the unit.
        kind: of the y values: "number", "count" (of tokens or the like) or "percent" (fractions of one).
        x_kind: of the x values; also "whole" (layers, runs), with ticks at integers only.
        latest: show the last value of each series in the legend, as for a running process.
        zero: the y axis begins at zero.
        x_range, y_range: limits of the axes, if several charts share them.
        marks: vertical lines.
    """

    title: str
    series: Sequence[Series]
    x_name: str
    y_name: str
    kind: str = "number"
    x_kind: str = "number"
    latest: bool = True
    zero: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    marks: Sequence[Mark] = ()

    @property
    def values(self) -> list[float]:
        """The y values of every series."""
        return [y for s in self.series for y in s.ys if y is not None]

    @property
    def is_log(self) -> bool:
        """Whether the y axis is logarithmic; never for fractions of one."""
        ends = self.y_range or (min(self.values, default=0.0), max(self.values, default=0.0))
        return self.kind != "percent" and not self.zero and ends[0] > 0 and ends[1] / ends[0] > _LOG_RATIO


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to units of the view box."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False
    is_whole: bool = False

    def at(self, value: float) -> float:
        """Position of `value`."""
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """About four round values within the limits."""
        found = _log_ticks(self.low, self.high) if self.is_log else _ticks(self.low, self.high)
        return [value for value in found if abs(value - round(value)) < _ROUNDING] if self.is_whole else found


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


def _y_axis(chart: Chart, start: float, end: float) -> Axis:
    low, high = chart.y_range or (min(chart.values), max(chart.values))
    if chart.is_log:
        return Axis(low / 1.15, high * 1.15, start, end, is_log=True)
    if chart.zero:
        low = min(low, 0.0)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Axis(low if chart.zero and low == 0 else low - room, high + room, start, end)


def thin(
    xs: Sequence[float], ys: Sequence[float | None]
) -> tuple[list[float], list[float | None], list[tuple[float, float] | None]]:
    """At most _POINTS points: for each range of neighbours their mean, minimum, maximum (empty if nothing is lost)."""
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
    """Means over a window of 4 % of the points, smaller at the ends; gaps stay gaps."""
    n, out = len(ys), list[float | None]()
    for i, y in enumerate(ys):
        half = min(max(1, n // 50), i, n - 1 - i)  # symmetric, or the ends would bend
        near = [v for v in ys[max(0, i - half) : i + half + 1] if v is not None]
        out.append(None if y is None else fmean(near))
    return out


def draw(chart: Chart) -> str:
    """A figure with its legend; "" if no series has a point."""
    drawn = [s for s in chart.series if any(y is not None for y in s.ys)]
    if not drawn:
        return ""
    low, high = chart.x_range or (min(min(s.xs) for s in drawn), max(max(s.xs) for s in drawn))
    x = Axis(low, high if high > low else low + 1, _LEFT, WIDTH - _RIGHT, is_whole=chart.x_kind == "whole")
    y = _y_axis(chart, HEIGHT - _BOTTOM, _TOP)
    say = _SAY[chart.kind]
    last = say if chart.latest else None
    body = [*_grid(x, y, say, _SAY[chart.x_kind]), *_marks(x, chart.marks), *_axis_names(chart.x_name, chart.y_name)]
    legend, kept, spoken = [_note("log scale")] if y.is_log else [], [], []
    for s in drawn:
        curve = _Curve.of(s)
        points: dict[str, object] = {"x": [_digits(v) for v in curve.xs], "y": [_digits(v) for v in curve.ys]}
        kept.append({"n": s.name} | points | ({"t": [*s.labels]} if s.labels else {}))
        body += _curve(curve, x, y)
        legend.append(_entry(curve, last))
        known = [v for v in s.ys if v is not None]
        ends = f"{say(known[0])} to {say(known[-1])}" if len(known) > 1 else say(known[0])
        spoken.append(f"{s.name} {ends}, lowest {say(min(known))}, highest {say(max(known))}")
    data: dict[str, object] = {"w": WIDTH, "l": x.start, "r": x.end, "lo": x.low, "hi": x.high}
    data |= {"k": chart.kind, "xk": chart.x_kind, "x": chart.x_name, "s": kept}
    scale = ", log scale" if y.is_log else ""
    words = f"{chart.title}: {chart.y_name}{scale} over {chart.x_name}. {'; '.join(spoken)}."
    return _figure(chart.title, words, body, HEIGHT, legend="".join(legend), data=json.dumps(data))


@dataclass(frozen=True, slots=True)
class _Curve:
    """A series prepared for drawing: thinned, and smoothed if it is noisy."""

    series: Series
    xs: list[float]
    ys: list[float | None]
    spans: list[tuple[float, float] | None]
    smooth: list[float | None]

    @classmethod
    def of(cls, s: Series) -> _Curve:
        xs, ys, spans = thin(s.xs, s.ys)
        noisy = s.look == "line" and len(xs) >= _NOISY and not spans
        return cls(s, xs, ys, spans, _smooth(ys) if noisy else [])

    @property
    def is_smoothed(self) -> bool:
        """Whether the bold line is a smoothed one."""
        spread = any(span is not None and span[0] < span[1] for span in self.spans)
        return bool(self.smooth) or (self.series.look == "line" and spread)


def histograms(
    title: str,
    rows: Sequence[Sequence[float]],
    reach: float,
    labels: tuple[str, str] = ("", ""),
    *,
    x_name: str = "value",
    y_name: str = "share of the fullest bin",
) -> str:
    """Stacked histograms: rows of bins from -reach to reach, each scaled to its fullest bin; "" without rows.

    `labels` are shown beside the first row, above the rows, and beside the last row.
    """
    if not rows or not rows[0]:
        return ""
    height = min(12.0 * len(rows) + 22, HEIGHT - _TOP - _BOTTOM)
    x = Axis(-reach, reach, _LEFT, WIDTH - _RIGHT)
    floors = [_TOP + height * (i + 1) / len(rows) for i in range(len(rows))]
    body = [*_x_axis(x, _TOP + height, format_number), *_x_title(x_name, _TOP + height)]
    for floor, bins in zip(floors, rows, strict=True):
        scale = 0.95 * height / len(rows) / (max(bins) or 1.0)
        middles = (-reach + (i + 0.5) * 2 * reach / len(bins) for i in range(len(bins)))
        outline = _path([(x.at(middle), floor - n * scale) for middle, n in zip(middles, bins, strict=True)])
        body.append(f'<path class="area f0" d="{outline}V{floor:.1f}H{x.at(-reach + reach / len(bins)):.1f}Z"/>')
    for floor, label in zip((floors[0], floors[-1]), labels if len(rows) > 1 else labels[:1], strict=False):
        body.append(f'<text x="{_LEFT - 6:g}" y="{floor:.1f}" text-anchor="end">{text(label)}</text>')
    many = f"{len(rows)} histograms from {labels[0]} to {labels[1]}" if len(rows) > 1 else "histogram"
    words = f"{title}: {many} of the values from {format_number(-reach)} to {format_number(reach)}."
    legend = f"<span>height: {text(y_name)}</span>"
    return _figure(title, words, body, _TOP + height + _BOTTOM, legend=legend)


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from zero to `value`, with a whisker from `low` to `high`."""

    name: str
    value: float
    low: float
    high: float
    words: str


def bars(title: str, rows: Sequence[Bar], x_name: str) -> str:
    """Horizontal bars from zero, each under its name; "" without rows."""
    if not rows:
        return ""
    x = Axis(0.0, max(1e-9, *(row.high for row in rows)) * 1.04, _RIGHT, WIDTH - 2 * _RIGHT)
    step, bottom = 38.0, _TOP + 38.0 * len(rows)
    body = [*_x_axis(x, bottom, format_number), *_x_title(x_name, bottom, (x.start + x.end) / 2)]
    for i, row in enumerate(rows):
        top = _TOP + step * i
        middle = top + 22
        body += [
            f'<text class="name" x="{x.start:g}" y="{top + 11:g}">{text(row.name)}</text>'
            f'<text x="{x.end:g}" y="{top + 11:g}" text-anchor="end">{text(row.words)}</text>'
            f'<rect class="area f{i % 4}" x="{x.start:g}" y="{top + 16:g}" width="{x.at(row.value) - x.start:.1f}" '
            f'height="12"/><path class="whisker" d="M{x.at(row.low):.1f} {middle:g}H{x.at(row.high):.1f}"/>'
        ]
    words = f"{title}, {x_name}: " + "; ".join(f"{row.name} {row.words}" for row in rows) + "."
    return _figure(title, words, body, bottom + _BOTTOM)


def _figure(title: str, words: str, body: Sequence[str], height: float, *, legend: str = "", data: str = "") -> str:
    """A figure of SVG elements; `words` is its text for screen readers, `data` what page.js shows on hover and keys."""
    bound = f' data-chart="{text(data)}"' if data else ""
    cursor = f'<line class="cursor" y1="{_TOP:g}" y2="{height - _BOTTOM:g}" visibility="hidden"/>' if data else ""
    keys = " tabindex=0" if data else ""
    return (
        f"<figure{bound}><figcaption><b>{text(title)}</b>{legend}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img"{keys} aria-label="{text(words)}">'
        f"{''.join(body)}{cursor}</svg>{'<output></output>' if data else ''}</figure>"
    )


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _count(value: float) -> str:
    """text.format_count without trailing zeros."""
    limit, unit = next(((limit, f" {unit}") for limit, unit in _COUNTS if abs(value) >= limit), (1.0, ""))
    return f"{value / limit:.4g}{unit}"


_SAY: dict[str, Callable[[float], str]] = {
    "number": format_number,
    "percent": _percent,
    "count": _count,
    "whole": format_number,
}


def _note(words: str) -> str:
    return f"<span class=note>{text(words)}</span>"


def _entry(curve: _Curve, say: Callable[[float], str] | None) -> str:
    """Legend entry of a series: colour, name and, with `say`, last value and whether it is a mean."""
    s = curve.series
    known = [y for y in curve.ys if y is not None]
    last = fmean(known[-max(1, len(known) // 25) :]) if curve.smooth else known[-1]
    shape = " dot" if s.look in ("points", "scatter") else " dash" if s.look == "level" else ""
    smoothed = " (smoothed)" if curve.is_smoothed else ""
    value = f": {text(say(last))}" if say is not None else ""
    return f'<span><i class="k{s.colour}{shape}"></i>{text(s.name)}{smoothed}{value}</span>'


def _grid(x: Axis, y: Axis, say: Callable[[float], str], say_x: Callable[[float], str]) -> Iterator[str]:
    for value in y.ticks():
        at = y.at(value)
        yield f'<line class="axis" x1="{x.start:g}" x2="{x.end:g}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{x.start - 6:g}" y="{at + 4:.1f}" text-anchor="end">{text(say(value))}</text>'
    yield from _x_axis(x, y.start, say_x)


def _x_axis(x: Axis, bottom: float, say: Callable[[float], str]) -> Iterator[str]:
    for value in x.ticks():
        at = x.at(value)
        anchor = "end" if at > x.end - 12 else "start" if at < _RIGHT + 4 else "middle"
        yield f'<text x="{at:.1f}" y="{bottom + 16:g}" text-anchor="{anchor}">{text(say(value))}</text>'


def _x_title(name: str, bottom: float, middle: float = (_LEFT + WIDTH - _RIGHT) / 2) -> Iterator[str]:
    yield f'<text class="name" x="{middle:g}" y="{bottom + 32:g}" text-anchor="middle">{text(name)}</text>'


def _axis_names(x_name: str, y_name: str) -> Iterator[str]:
    yield from _x_title(x_name, HEIGHT - _BOTTOM)
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


def _curve(curve: _Curve, x: Axis, y: Axis) -> Iterator[str]:
    s, xs = curve.series, curve.xs
    at = [None if v is None else (x.at(u), y.at(v)) for u, v in zip(xs, curve.ys, strict=True)]
    if s.look == "level":
        height = next(p[1] for p in at if p is not None)
        yield f'<path class="curve level s{s.colour}" d="M{x.start:g} {height:.1f}H{x.end:g}"/>'
        return
    if curve.spans:
        known = [(x.at(u), y.at(span[0]), y.at(span[1])) for u, span in zip(xs, curve.spans, strict=True) if span]
        there = [f"{u:.1f} {top:.1f}" for u, _, top in known]
        back = [f"{u:.1f} {bottom:.1f}" for u, bottom, _ in reversed(known)]
        yield f'<path class="band f{s.colour}" d="M{"L".join([*there, *back])}Z"/>'
    if curve.smooth:
        yield f'<path class="curve raw s{s.colour}" d="{_path(at)}"/>'
        at = [None if v is None else (x.at(u), y.at(v)) for u, v in zip(xs, curve.smooth, strict=True)]
    if s.look != "scatter":
        yield f'<path class="curve s{s.colour}" d="{_path(at)}"/>'
    if s.look in ("points", "scatter") or len(xs) == 1:
        radius = 3.2 if len(xs) <= 20 else 2.2
        for p, words in zip_longest(at, s.labels):
            if p is not None:
                title = f"<title>{text(words)}</title>" if words else ""
                yield f'<circle class="f{s.colour}" cx="{p[0]:.1f}" cy="{p[1]:.1f}" r="{radius}">{title}</circle>'


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    words, pen = [], "M"
    for p in points:
        if p is None:
            pen = "M"
            continue
        words.append(f"{pen}{p[0]:.1f} {p[1]:.1f}")
        pen = "L"
    return "".join(words)
