"""Curves, histograms and heat maps as inline SVG; colours come from the style sheet of the page (`STYLE`, `SCRIPT`).

Coordinates are in units of the view box, 400 wide; numbers are written with one decimal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from aprfmt.html.page import text
from aprfmt.text import format_number

WIDTH, HEIGHT = 400.0, 200.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 8.0, 10.0, 24.0
_POINTS = 400
"""Points of a drawn curve at most: one a unit of the view box."""
_NOISY = 60
"""From so many points on a curve gets a mean over its neighbours beside it."""
_LOG_RATIO = 30.0
"""A positive curve that spans more than this is drawn over a logarithmic axis."""

STYLE = """
.axis{stroke:var(--grid);stroke-width:1;vector-effect:non-scaling-stroke}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round;vector-effect:non-scaling-stroke}
.raw{stroke-width:1;opacity:.35}.level{stroke-dasharray:5 4}.band{opacity:.18;stroke:none}
.mark{stroke:var(--soft);stroke-dasharray:2 3;vector-effect:non-scaling-stroke}
.mark.bad{stroke:var(--bad)}.cursor{stroke:var(--soft);vector-effect:non-scaling-stroke}
""" + "".join(
    f".s{n}{{stroke:var(--c{n})}}.f{n}{{fill:var(--c{n})}}figcaption i.k{n}{{background:var(--c{n})}}"
    for n in range(4)
)

SCRIPT = """
for (const f of document.querySelectorAll("figure[data-chart]")) {
  const d = JSON.parse(f.dataset.chart), svg = f.querySelector("svg");
  const line = f.querySelector(".cursor"), said = f.querySelector("output");
  const put = (v, k) => v == null ? "–" : k == "percent" ? (100 * v).toFixed(1) + " %"
    : Math.abs(v) >= 1e12 ? (v / 1e12).toPrecision(4) + "T" : Math.abs(v) >= 1e9 ? (v / 1e9).toPrecision(4) + "G"
    : Math.abs(v) >= 1e6 ? (v / 1e6).toPrecision(4) + "M" : Math.abs(v) >= 1e4 ? (v / 1e3).toPrecision(4) + "k"
    : String(+v.toPrecision(4));
  const hide = () => { line.setAttribute("visibility", "hidden"); said.textContent = ""; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", e => {
    const b = svg.getBoundingClientRect(), u = (e.clientX - b.left) / b.width * d.w;
    const x = d.lo + (u - d.l) / (d.r - d.l) * (d.hi - d.lo);
    const near = s => s.x.reduce((a, v, i) => Math.abs(v - x) < Math.abs(s.x[a] - x) ? i : a, 0);
    const first = d.s[0], at = first.x[near(first)], p = d.l + (at - d.lo) / ((d.hi - d.lo) || 1) * (d.r - d.l);
    line.setAttribute("x1", p); line.setAttribute("x2", p); line.setAttribute("visibility", "visible");
    said.textContent = d.x + " " + put(at) + "   " + d.s.map(s => s.n + " " + put(s.y[near(s)], d.k)).join("   ");
  });
}
"""


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


def thinned(
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
    kind: str = "number",
    zero: bool = False,
    marks: Sequence[Mark] = (),
) -> str:
    """A figure with its legend; "" where no series has a point.

    Args:
        title: of the figure.
        series: what is drawn; those without a point are left out.
        x_name: what the x axis counts.
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
        xs, ys, spans = thinned(s.xs, s.ys)
        kept.append({"n": s.name, "x": [_digits(v) for v in xs], "y": [_digits(v) for v in ys]})
        body += _curve(s, xs, ys, spans, x, y)
    data = {
        "w": WIDTH,
        "l": x.start,
        "r": x.end,
        "lo": x.low,
        "hi": x.high,
        "k": kind,
        "x": x_name,
        "s": kept,
    }
    return _figure(title, _legend(drawn, say), "".join(body), HEIGHT, json.dumps(data))


def _figure(title: str, legend: str, body: str, height: float, data: str = "") -> str:
    bound = f' data-chart="{text(data)}"' if data else ""
    cursor = (
        f'<line class="cursor" y1="{_TOP:g}" y2="{height - _BOTTOM:g}" visibility="hidden"/>' if data else ""
    )
    said = "<output></output>" if data else ""
    return (
        f"<figure{bound}><figcaption><b>{text(title)}</b>{legend}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{text(title)}">{body}{cursor}</svg>'
        f"{said}</figure>"
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
    ticks = x.ticks()
    for value in ticks:
        at = x.at(value)
        anchor = "end" if at > x.end - 12 else "middle"
        yield f'<text x="{at:.1f}" y="{y.start + 16:g}" text-anchor="{anchor}">{text(format_number(value))}</text>'


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
        yield _band(s.colour, xs, spans, x, y)
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


def _band(
    colour: int, xs: Sequence[float], spans: Sequence[tuple[float, float] | None], x: Axis, y: Axis
) -> str:
    known = [(x.at(u), y.at(span[0]), y.at(span[1])) for u, span in zip(xs, spans, strict=True) if span]
    there = [f"{u:.1f} {top:.1f}" for u, _, top in known]
    back = [f"{u:.1f} {bottom:.1f}" for u, bottom, _ in reversed(known)]
    return f'<path class="band f{colour}" d="M{"L".join([*there, *back])}Z"/>'
