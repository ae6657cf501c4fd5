"""Curves stand where their values say, over axes that suit them; nothing is made of nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
from pages import Page

from aprfmt.html.charts import HEIGHT, WIDTH, Bar, Chart, Mark, Series, bars, draw, histograms, thin
from aprfmt.html.heatmaps import Cell, Legend, against_median, heat_map
from aprfmt.html.page import page, table, text


def chart(title: str, series: Sequence[Series], **more: Any) -> str:
    return draw(Chart(title, series, more.pop("x_name", "x"), more.pop("y_name", "y"), **more))


def curve(figure: str, number: int = 0) -> list[tuple[float, float]]:
    """The points of the bold path of that number."""
    found = re.findall(r'<path class="curve s\d" d="([^"]*)"', figure)[number]
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", found)]


def ticks(figure: str) -> list[str]:
    """The words at the y axis, from below."""
    return re.findall(r'text-anchor="end">([^<]*)</text>', figure.split("</svg>", maxsplit=1)[0])


def test_points_lie_on_straight_lines_of_the_axes() -> None:
    points = curve(chart("t", [Series("s", [0, 50, 100], [1.0, 2.0, 3.0])]))
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.11)
    assert 0 < x0 < x2 <= WIDTH
    assert 0 <= y2 < y0 <= HEIGHT


def test_decades_are_as_far_apart_as_others() -> None:
    figure = chart("t", [Series("s", [0, 1, 2], [0.01, 0.1, 1.0])])
    (_, a), (_, b), (_, c) = curve(figure)
    assert a - b == pytest.approx(b - c, abs=0.11)
    assert ticks(figure)[:3] == ["0.01", "0.1", "1"]
    linear = curve(chart("t", [Series("s", [0, 1, 2], [0.01, 0.1, 1.0])], zero=True))
    assert linear[0][1] - linear[1][1] == pytest.approx((linear[1][1] - linear[2][1]) / 10, abs=0.2)
    assert curve(chart("t", [Series("s", [0, 1, 2], [0.01, 0.1, 1.0])], kind="percent")) != curve(figure)


def test_figures_share_a_range_and_marks_stand_in_it() -> None:
    figure = chart("t", [Series("s", [50], [1.0])], x_range=(0, 100), marks=[Mark(50, "m"), Mark(200, "far")])
    (place,) = re.findall(r'class="mark" x1="([\d.]+)"', figure)
    (dot,) = re.findall(r'cx="([\d.]+)"', figure)
    assert place == dot
    assert "far" not in figure


def test_a_gap_stays_one() -> None:
    (path,) = re.findall(r'<path class="curve s0" d="([^"]*)"', chart("t", [Series("s", [0, 1, 2], [1, None, 2])]))
    assert path.count("M") == 2
    assert "L" not in path


def test_nothing_is_drawn_of_nothing() -> None:
    assert chart("t", []) == ""
    assert chart("t", [Series("s", [], []), Series("r", [1.0], [None])]) == ""


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-1e-300, 1e300], [0.0, 1e-12], [1e15, 1e15 + 1]])
def test_any_finite_values_can_be_drawn(values: list[float]) -> None:
    figure = chart("t", [Series("s", list(range(len(values))), values)])
    assert "nan" not in figure
    assert "inf" not in figure


def test_long_curves_are_thinned_and_keep_their_extremes() -> None:
    xs, ys = list(range(10_000)), [float(i % 7) for i in range(10_000)]
    ys[5003] = 99.0
    few_x, few_y, spans = thin(xs, ys)
    assert len(few_x) == len(few_y) == len(spans) == 400
    assert max(span[1] for span in spans if span) == 99.0
    assert 'class="band' in chart("t", [Series("s", xs, ys)])


def test_histograms_stand_one_above_the_other_each_as_high_as_its_fullest_bin() -> None:
    assert histograms("h", [], 1.0) == ""
    figure = histograms("h", [[0, 4, 1], [0, 0, 9]], 1.5, ("first", "last"))
    outlines = re.findall(r'class="area f0" d="M([^V]*)V([\d.]+)H', figure)
    rows = [[tuple(map(float, at.split())) for at in points.split("L")] for points, _ in outlines]
    floors = [float(floor) for _, floor in outlines]
    assert [x for x, _ in rows[0]] == [x for x, _ in rows[1]]
    rises = [[round(floor - y, 1) for _, y in row] for row, floor in zip(rows, floors, strict=True)]
    assert rises[0][0] == rises[1][0] == rises[1][1] == 0
    assert rises[0][1] == rises[1][2] == pytest.approx(4 * rises[0][2], abs=0.3)
    assert floors[0] < floors[1] - rises[1][2], "no row reaches into the one above"
    assert ticks(figure)[-2:] == ["first", "last"]


def test_a_heat_map_needs_rows_and_columns() -> None:
    assert heat_map("t", [], ["1"], Legend(), "layer") == ""
    text = heat_map("t", [("a" * 50, [Cell(1.0, "w"), Cell(0.0, "v"), Cell(None)])], ["1", "2", "3"], Legend(), "layer")
    assert re.findall(r'fill-opacity="([\d.]+)"', text) == ["1.00", "0.12"]
    assert 'aria-label="' + "a" * 50 + ': w … v"' in text


def test_a_square_is_coloured_by_its_distance_from_what_is_normal() -> None:
    assert against_median([1.0, 1.0, 2.0, 4.0, 0.5]) == [
        (0.0, 0, 1.0), (0.0, 0, 1.0), (0.5, 0, 2.0), (1.0, 0, 4.0), (0.5, 1, 0.5),
    ]  # fmt: skip
    assert against_median([3.0, 3.0, 48.0])[2][:2] == (1.0, 0), "fourfold and more have full colour"
    assert against_median([0.0, 0.0, 5.0]) == [(0.0, 0, 1.0), (0.0, 0, 1.0), (1.0, 0, math.inf)]
    assert against_median([2.0, 2.0, 0.0])[2] == (1.0, 1, 0.0)
    assert against_median([]) == []


def test_a_legend_says_what_is_smoothed_and_over_which_scale() -> None:
    noisy = [1.0 + (i % 3) / 10 for i in range(100)]
    assert "s (smoothed): 1.07" in chart("t", [Series("s", range(100), noisy)])
    assert "smoothed" not in chart("t", [Series("s", range(100), noisy, "exact")])
    assert "(smoothed)" in chart("t", [Series("s", range(1000), noisy * 10)]), "means of neighbours"
    wide = chart("t", [Series("s", [0, 1], [0.01, 1.0])], x_name="tokens", y_name="nats")
    assert "<span class=note>log scale</span>" in wide
    assert 'aria-label="t: nats, log scale over tokens. s 0.01 to 1, lowest 0.01, highest 1."' in wide
    assert [name in wide for name in (">tokens</text>", ">nats</text>")] == [True, True]
    assert "log scale" not in chart("t", [Series("s", [0, 1], [0.5, 1.0])])


def test_a_legend_says_the_last_value_only_of_what_goes_on_in_time() -> None:
    of = [Series("mean", [1, 2], [10.0, 45.0], "points")]
    assert "</i>mean: 45<" in chart("t", of)
    assert "</i>mean<" in chart("t", of, latest=False)


def test_runs_and_layers_are_not_divided() -> None:
    def below(figure: str) -> list[str]:
        return re.findall(r'text-anchor="(?:middle|start|end)">([\d.]+)</text>', figure.split("</svg>", maxsplit=1)[0])

    of = [Series("s", [1, 2], [1.0, 1.0])]
    assert "1.25" in below(chart("t", of, y_range=(0, 8)))
    assert below(chart("t", of, y_range=(0, 8), x_kind="whole"))[-2:] == ["1", "2"]


def test_bars_are_as_long_as_their_values() -> None:
    figure = bars("speed", [Bar("a", 50.0, 40.0, 60.0, "50"), Bar("b", 100.0, 90.0, 110.0, "100")], "tokens/s")
    widths = [float(w) for w in re.findall(r'<rect class="area f\d" [^>]*width="([\d.]+)"', figure)]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    assert bars("speed", [], "tokens/s") == ""


def test_a_box_searches_also_what_is_not_in_the_document() -> None:
    rows = [[f"blk.{i}.x", str(i)] for i in range(5)]
    found = table(["tensor", "n"], rows, right="n", search="tensors", shown=2)
    assert found.count("<tr>") == 3
    assert "the first 2 of 5 tensors" in found
    assert "blk.4.x" in found.split("<table")[0]
    assert "<table" in table(["tensor", "n"], rows, search="tensors")
    assert "5 tensors" in table(["tensor", "n"], rows, search="tensors")


def test_text_is_escaped_everywhere() -> None:
    evil = '"><script>x</script>'
    body = [chart(evil, [Series(evil, [1, 2], [1, 2])], x_name=evil, marks=[Mark(1, evil)]), table([evil], [[evil]])]
    found = Page(page(evil, body))
    assert len(found.tags["script"]) == 1, "the page's own"
    assert found.titles == [evil]
    assert text("a\x00\x1b\ud800") == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}?"
