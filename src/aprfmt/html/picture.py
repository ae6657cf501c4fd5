"""Renders charts as one picture with matplotlib, for a slide or a chat."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aprfmt.errors import MissingDependencyError
from aprfmt.html.charts import Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3


def png(title: str, charts: Sequence[Chart]) -> bytes:
    """The non-empty charts, three per row. Raises MissingDependencyError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "a picture of the curves needs matplotlib", hint="pip install matplotlib, or write a page: -o report.html"
        ) from error
    drawn = [chart for chart in charts if chart.values]
    rows = max(1, -(-len(drawn) // _COLUMNS))
    figure = Figure(figsize=(14, 3.4 * rows + 0.6), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title.replace("$", r"\$"))  # $ would begin a formula
    for chart, axes in zip(drawn, figure.subplots(rows, _COLUMNS, squeeze=False).flat, strict=False):
        _draw(axes, chart)
    for axes in figure.axes[len(drawn) :]:
        axes.set_visible(False)
    out = io.BytesIO()
    canvas.print_png(out)
    return out.getvalue()


def _draw(axes: Axes, chart: Chart) -> None:
    for s in chart.series:
        ys = [float("nan") if y is None else y for y in s.ys]
        if not ys:
            continue
        if s.look == "level":
            axes.axhline(ys[-1], linestyle="--", color=f"C{s.colour}", label=s.name)
        else:
            marker, width = "o" if s.look in ("points", "scatter") else None, 0 if s.look == "scatter" else 1.2
            axes.plot(s.xs, ys, marker=marker, linewidth=width, color=f"C{s.colour}", label=s.name)
    for mark in chart.marks:
        axes.axvline(mark.x, linestyle=":", color="red" if mark.bad else "grey")
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_name)
    axes.set_ylabel(chart.y_name)
    if chart.zero:
        axes.set_ylim(bottom=0)
    elif chart.is_log:
        axes.set_yscale("log")
    if chart.kind == "percent":
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:.0%}")
    axes.grid(alpha=0.3)
    axes.legend()
