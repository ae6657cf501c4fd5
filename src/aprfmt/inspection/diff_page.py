"""The page of a comparison by values: layer by layer, kind by kind, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from aprfmt.html.charts import Chart, Series, draw
from aprfmt.html.heatmaps import Cell, Legend, heat_map
from aprfmt.html.page import grid, heading, headline, page, paragraph, table, tiles
from aprfmt.inspection.distance import TensorFigures
from aprfmt.inspection.layers import Layers, by_layer
from aprfmt.text import cosine, decibels, format_bytes, percent, plural

if TYPE_CHECKING:
    from aprfmt.inspection.comparison import Comparison, ModelDifference

_SHOWN_ROWS = 500
"""Rows in the document, the worst ones: the search box finds the others too."""

_NO_LOSS_DB, _LOST_DB = 60.0, 0.0
"""SNR of the palest and of the fullest colour of the map."""


def html(found: Comparison) -> str:
    """The page of `found`, whose values were compared."""
    rows = found.tensors or ()
    parts = [*_head(found), _tiles(found)]
    if figures := layer_figures(rows):
        parts += [heading("Layers"), *figures]
    if rows:
        parts += [heading("Tensors, worst first"), _table(rows)]
    others = [row for row in found.differences if row.distance is None]
    if others:
        parts += [heading("Not compared by value"), _others(others)]
    return page(f"{Path(found.a).name} and {Path(found.b).name}", parts)


def layer_figures(rows: Sequence[TensorFigures]) -> list[str]:
    """A heat map of the SNR by layer and kind, and a chart a kind; empty without layers."""
    kinds, _ = by_layer(rows, lambda row: row.name)
    layers = sorted({layer for of_kind in kinds.values() for layer in of_kind})
    return [_map(kinds, layers), grid(map(draw, _charts(kinds)))] if layers else []


def _head(found: Comparison) -> Iterator[str]:
    yield headline("Difference between two models")
    for side, name in (("A", found.a), ("B", found.b)):
        yield paragraph(f"{side}: {name}")
    words = "the values are the same" if found.identical else plural(len(found.differences), "difference")
    compared = f"{plural(found.tensors_compared, 'tensor')} compared, {words}. All metrics are relative to A."
    yield paragraph(compared, "lead")
    odd = sum(row.distance.nonfinite_different for row in found.tensors or ())
    if odd:
        where = "only one model has NaN or infinity"
        yield paragraph(f"In {plural(odd, 'place')} {where}; metrics cover the other values.", "bad")
    for note in found.notes:
        yield paragraph(note)


def _tiles(found: Comparison) -> str:
    total = found.total
    if total is None:
        return ""
    rows = [
        ("relative RMSE", percent(total.distance.relative_rmse), "relative to A's RMS", ""),
        ("SNR", f"{decibels(total.distance.snr_db)} dB", "signal: A, noise: A - B", ""),
        ("cosine", cosine(total.distance.cosine), "", ""),
    ]
    for side, size, bits in (("A", total.size_a, total.bits_a), ("B", total.size_b, total.bits_b)):
        rows.append((f"size of {side}", format_bytes(size), "" if bits is None else f"{bits:.2f} bits per weight", ""))
    return tiles(rows)


def _map(kinds: dict[str, Layers[TensorFigures]], layers: Sequence[int]) -> str:
    """The lower the SNR, the fuller the colour; orange if a NaN replaces a number."""

    def cell(kind: str, layer: int, rows: Sequence[TensorFigures]) -> Cell:
        worst = max(rows, key=lambda row: row.distance.badness).distance
        strength = 0.0 if worst.is_zero else 1.0
        if worst.snr_db is not None:
            strength = min(1.0, max(0.05, (_NO_LOSS_DB - worst.snr_db) / (_NO_LOSS_DB - _LOST_DB)))
        types = f"{rows[0].a} and {rows[0].b}"
        words = f"layer {layer} {kind}: SNR {decibels(worst.snr_db)} dB, relative RMSE {percent(worst.relative_rmse)}"
        return Cell(strength, f"{words}, {types}", 1 if worst.nonfinite_different else 0)

    squares = [
        (kind, [cell(kind, layer, of[layer]) if layer in of else Cell(None) for layer in layers])
        for kind, of in kinds.items()
    ]
    legend = Legend([("NaN", Cell(1.0, colour=1))], ("60 dB or more", "0 dB"))
    return heat_map("SNR of B, in dB", squares, [str(layer) for layer in layers], legend, "layer")


def _charts(kinds: dict[str, Layers[TensorFigures]]) -> list[Chart]:
    """One chart per kind, all with the same range."""
    curves = {
        kind: Series(
            "mean SNR", layers := sorted(of), [_mean([row.distance.snr_db for row in of[i]]) for i in layers], "exact"
        )
        for kind, of in kinds.items()
    }
    values = [y for curve in curves.values() for y in curve.ys if y is not None]
    ends = (min(0.0, *values), max(values)) if values else None
    return [
        Chart(kind, [curve], "layer", "SNR of B, dB", x_kind="whole", latest=False, y_range=ends, zero=True)
        for kind, curve in curves.items()
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else None


def _table(rows: Sequence[TensorFigures]) -> str:
    header = ["tensor", "A", "B", "bits A", "bits B", "relative RMSE", "SNR, dB", "cosine", "largest", "differ", "NaN"]
    cells = [
        [
            *(row.name, row.a, row.b, f"{row.bits_a:.2f}", f"{row.bits_b:.2f}", percent(row.distance.relative_rmse)),
            *(decibels(row.distance.snr_db), cosine(row.distance.cosine)),
            *(_plain(row.distance.max_diff), f"{row.distance.n_different:,}"),
            f"{row.distance.nonfinite_different:,}",
        ]
        for row in rows
    ]
    right = "|".join(header[3:])
    return table(header, cells, right=right, sortable=True, stack=True, search="tensors", shown=_SHOWN_ROWS)


def _plain(value: float) -> str:
    """Without a unit, so that a column can be sorted."""
    return f"{value:.4g}" if math.isfinite(value) else "∞"


def _others(rows: Sequence[ModelDifference]) -> str:
    def words(value: object) -> str:
        return "–" if value is None else str(value)

    return table(["what", "name", "A", "B"], [[r.what or r.kind, r.name, words(r.a), words(r.b)] for r in rows])
