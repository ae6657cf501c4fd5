"""The page of `apr quantize --report`: size against KL divergence, the types of all tensors before and after."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from aprfmt.convert.report import QuantizedGroup
from aprfmt.html.charts import Chart, Series, draw
from aprfmt.html.heatmaps import Cell, Legend, heat_map
from aprfmt.html.page import Tone, fold, grid, heading, headline, page, paragraph, table, tiles
from aprfmt.inspection.layers import Layers, by_layer
from aprfmt.running.quantization_report import PresetPoint, QuantizationReport, TypedTensor
from aprfmt.running.sensitivity import role_of
from aprfmt.text import format_bytes, format_number, plural

_FEWEST_BITS, _MOST_BITS = 1.5, 16.0
"""Bits per value at which a square of a map of types is palest, and at which it is fullest."""

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_SHOWN_ROWS = 500


_CellOf = Callable[[TypedTensor], Cell]


def quantization_html(found: QuantizationReport) -> str:
    """The page."""
    report, name = found.report, Path(found.report.output).name
    what = "Plan of the quantization" if report.plan else "Quantization"
    parts = [headline(f"{what} of {Path(report.source).name}"), paragraph(f"{report.source} to {report.output}")]
    parts += [_tiles(found), heading("Size and KL divergence"), paragraph(_origin(found))]
    parts += [grid([draw(_front(found)), *map(draw, _by_layer(found.tensors))])]
    parts += [heading("Types"), *_maps(found.tensors), heading("Presets")]
    parts += [fold(plural(len(found.presets), "preset"), _presets(found), wide=True), heading("Roles and layers")]
    parts += [fold(plural(len(found.groups), "group"), _groups(found.groups), wide=True), heading("Tensors")]
    parts += [fold(plural(len(found.tensors), "tensor"), _tensors(found.tensors), wide=True)]
    return page(f"Quantization: {name}", parts)


def _tiles(found: QuantizationReport) -> str:
    report = found.report
    bits = report.bits_per_weight
    rows = [
        ("size", format_bytes(report.output_bytes), f"from {format_bytes(report.input_bytes)}", ""),
        ("bits per weight", "–" if bits is None else f"{bits:.2f}", "", ""),
        ("predicted KL", f"{found.file.kl:.4g}", "nats per token", ""),
    ]
    if report.measured_kl is not None:
        rows.append(("measured KL", f"{report.measured_kl:.4g}", "nats per token, in llama.cpp", ""))
    return tiles([*rows, ("tensors", f"{len(found.tensors):,}", "quantized", "")])


def _front(found: QuantizationReport) -> Chart:
    most = max([found.file.n_bytes, *(p.n_bytes for p in found.front), *(p.n_bytes for p in found.presets)])
    size, unit = next((row for row in _UNITS if most >= row[0]), _UNITS[-1])
    presets = sorted(found.presets, key=lambda point: point.n_bytes)
    kl = found.report.measured_kl
    series = [
        Series("best types", [p.n_bytes / size for p in found.front], [p.kl or None for p in found.front], "exact"),
        Series(
            "presets", [p.n_bytes / size for p in presets], [p.kl or None for p in presets], "scatter", 1,
            [p.name for p in presets],
        ),
        Series("this file", [found.file.n_bytes / size], [found.file.kl or None], "scatter", 2),
        Series("this file, measured", [found.file.n_bytes / size], [kl or None], "scatter", 3),
    ]  # fmt: skip
    return Chart("Predicted KL by file size", series, f"size, {unit}", "KL, nats per token", latest=False)


def _by_layer(tensors: Sequence[TypedTensor]) -> Iterator[Chart]:
    """Mean bits per value of the matrices of each layer, and their part of the predicted KL."""
    kinds, _ = by_layer(tensors, lambda tensor: tensor.name)
    layers = sorted({layer for of_kind in kinds.values() for layer in of_kind})
    rows = [[tensor for of_kind in kinds.values() for tensor in of_kind.get(layer, ())] for layer in layers]
    bits, shares = [fmean(t.bits for t in row) for row in rows], [sum(t.share for t in row) for row in rows]
    for title, y_name, kind, ys in (
        ("Mean bits by layer", "bits per value", "number", bits),
        ("Predicted KL by layer", "share", "percent", shares),
    ):
        yield Chart(title, [Series(y_name, layers, ys, "exact")], "layer", y_name, kind, "whole", False, True)


def _origin(found: QuantizationReport) -> str:
    if found.is_measured:
        return "KL is predicted from sensitivities that llama.cpp measured on --eval-data."
    return "KL is predicted with default costs and is a rough estimate; --measure calibrates it on --eval-data."


def _presets(found: QuantizationReport) -> str:
    def change(point: PresetPoint) -> str | Tone:
        if point.best is None or not point.kl:
            return "–"
        ratio = point.best / point.kl - 1
        return f"{100 * ratio:+.0f} %".replace("-", "\N{MINUS SIGN}"), "good" if ratio < 0 else ""

    header = ["preset", "size", "predicted KL", "best types at that size", "change"]
    cells = [
        [p.name, format_bytes(p.n_bytes), f"{p.kl:.4g}", "–" if p.best is None else f"{p.best:.4g}", change(p)]
        for p in sorted(found.presets, key=lambda point: -point.n_bytes)
    ]
    return table(header, cells, right="|".join(header[1:]), sortable=True, stack=True)


# --- maps ---


def _maps(tensors: Sequence[TypedTensor]) -> Iterator[str]:
    error_depth, error_legend = _scale([t.error for t in tensors])
    share_depth, share_legend = _scale([t.share for t in tensors])

    def before(tensor: TypedTensor) -> Cell:
        return Cell(_depth(tensor.bits_before), f"{tensor.name}: {tensor.before}, {tensor.bits_before:.2f} bits")

    def after(tensor: TypedTensor) -> Cell:
        words = f"{tensor.name}: {tensor.after}, {tensor.bits:.2f} bits, error {tensor.error:.2g}"
        return Cell(_depth(tensor.bits), words)

    def error(tensor: TypedTensor) -> Cell:
        return Cell(error_depth(tensor.error), f"{tensor.name}: error {tensor.error:.2g} in {tensor.after}")

    def share(tensor: TypedTensor) -> Cell:
        return Cell(share_depth(tensor.share), f"{tensor.name}: {tensor.share:.1%} of the predicted KL")

    bits = Legend(ramp=(f"{_FEWEST_BITS:g} bits", f"{_MOST_BITS:g} bits"), note="log scale")
    titles = (
        ("Bits per value, before", before, bits),
        ("Bits per value, after", after, bits),
        ("Relative squared error", error, error_legend),
        ("Share of the predicted KL", share, share_legend),
    )
    kinds, outside = by_layer(tensors, lambda tensor: tensor.name)
    for title, cell, legend in titles:
        yield _map(title, kinds, outside, cell, legend)


def _map(
    title: str, kinds: Mapping[str, Layers[TypedTensor]], outside: Sequence[TypedTensor], cell: _CellOf, legend: Legend
) -> str:
    """Layers by roles; in front of the layers a column for tensors outside of them."""
    layers = sorted({layer for of_kind in kinds.values() for layer in of_kind})
    head = [""] if outside else []
    rows = [(role_of(tensor.name), [cell(tensor), *[Cell(None)] * len(layers)]) for tensor in outside]
    rows += [
        (role_of(kind), [*[Cell(None)] * len(head), *(cell(of[i][0]) if i in of else Cell(None) for i in layers)])
        for kind, of in kinds.items()
    ]
    return heat_map(title, rows, [*head, *map(str, layers)], legend, "layer")


def _scale(values: Sequence[float]) -> tuple[Callable[[float], float], Legend]:
    """From values of 0 and more to strengths of a colour, logarithmic from the least positive one, and the legend."""
    positive = [value for value in values if value > 0]
    low, high = min(positive, default=1.0), max(positive, default=1.0)
    width = math.log(high / low) or 1.0

    def depth(value: float) -> float:
        return math.log(value / low) / width if value > 0 else 0.0

    return depth, Legend(ramp=(format_number(low), format_number(high)), note="log scale")


def _depth(bits: float) -> float:
    """From bits per value to the strength of a colour."""
    return math.log(max(bits, _FEWEST_BITS) / _FEWEST_BITS) / math.log(_MOST_BITS / _FEWEST_BITS)


# --- tables ---


def _groups(groups: Sequence[QuantizedGroup]) -> str:
    header = ["role", "layers", "types", "bits", "error", "share", "size"]
    cells = [
        [
            *(row["role"], row["layers"], ", ".join(f"{name} {n}" for name, n in row["dtypes"].items())),
            *(f"{row['bits_per_weight']:.2f}", f"{row['error']:.2g}", f"{100 * row['share']:.1f} %"),
            format_bytes(row["size_bytes"]),
        ]
        for row in groups
    ]
    return table(header, cells, right="bits|error|share|size", sortable=True, stack=True)


def _tensors(tensors: Sequence[TypedTensor]) -> str:
    header = ["tensor", "before", "after", "bits", "error", "share"]
    cells = [
        [t.name, t.before, t.after, f"{t.bits:.2f}", f"{t.error:.2g}", f"{100 * t.share:.2f} %"]
        for t in sorted(tensors, key=lambda t: -t.share)
    ]
    return table(
        header, cells, right="bits|error|share", sortable=True, stack=True, search="tensors", shown=_SHOWN_ROWS
    )
