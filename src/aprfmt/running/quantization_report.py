"""What a quantization made of each tensor, beside the presets and the best files of every size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from aprfmt.convert.bit_allocation import Allocation, TypeOption, fit_bytes, hull, smallest, total_bytes, total_loss
from aprfmt.convert.report import QuantizedGroup, Report
from aprfmt.errors import AprError

if TYPE_CHECKING:
    from aprfmt.convert.quantization import QuantizedTensor
    from aprfmt.running.target_types import ConversionPlanner, TypeChooser

_POINTS = 48
"""Sizes of the front."""


class FrontPoint(NamedTuple):
    """A file that could be written: its size, and its predicted KL in nats per token."""

    n_bytes: int
    kl: float


class PresetPoint(NamedTuple):
    """A preset: its size and predicted KL, and the predicted KL of the best types within that size (None: none fit)."""

    name: str
    n_bytes: int
    kl: float
    best: float | None


@dataclass(frozen=True, slots=True)
class TypedTensor:
    """A quantized tensor: type and bits per value before and after, relative squared error, share of predicted KL."""

    name: str
    before: str
    after: str
    bits_before: float
    bits: float
    error: float
    share: float


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """What the page shows.

    Attributes:
        report: of the conversion.
        file: where it lies: its size and predicted KL.
        tensors: those that are quantized, in the order of the file.
        groups: the same by role and layers.
        front: files of the least predicted KL for their size, the smallest first.
        presets: llama.cpp's presets, or mlx_lm's bits and recipes, that these tensors can have.
        is_measured: whether llama.cpp measured what errors cost.
    """

    report: Report
    file: FrontPoint
    tensors: Sequence[TypedTensor]
    groups: Sequence[QuantizedGroup]
    front: Sequence[FrontPoint]
    presets: Sequence[PresetPoint]
    is_measured: bool


def report_on(
    chooser: TypeChooser, chosen: Allocation, report: Report, plan: ConversionPlanner, *, is_measured: bool
) -> QuantizationReport:
    """Everything about a quantization to the types `chosen`; `plan(options, observe)` plans that of a preset."""
    loss = total_loss(chooser.tensors, chosen) or 1.0
    tensors = [
        TypedTensor(
            name=tensor.name,
            before=chooser.sources[tensor.name].dtype,
            after=(option := chosen[tensor.name]).dtype,
            bits_before=8 * chooser.sources[tensor.name].n_bytes / chooser.sizes[tensor.name],
            bits=8 * option.n_bytes / chooser.sizes[tensor.name],
            error=option.error,
            share=tensor.loss(option) / loss,
        )
        for tensor in chooser.tensors
    ]
    return QuantizationReport(
        report=report, file=FrontPoint(report.output_bytes, chooser.predicted(chosen)), tensors=tensors,
        groups=chooser.groups(chosen), front=[*front(chooser)], presets=[*presets(chooser, plan)],
        is_measured=is_measured,
    )  # fmt: skip


def front(chooser: TypeChooser, n: int = _POINTS) -> Iterator[FrontPoint]:
    """Files of the least predicted KL for their size, from the smallest types to the most precise ones."""
    least = total_bytes(smallest(chooser.tensors))
    most = sum(hull(tensor.options)[-1].n_bytes for tensor in chooser.tensors)
    sizes = sorted({round(least * (most / least) ** (i / (n - 1))) for i in range(n)})
    for size in sizes:
        if (chosen := fit_bytes(chooser.tensors, size)) is not None:
            yield FrontPoint(chooser.other_bytes + total_bytes(chosen), chooser.predicted(chosen))


def presets(chooser: TypeChooser, plan: ConversionPlanner) -> Iterator[PresetPoint]:
    """The standard choices that need no type but the measured ones, and no matrix beyond the one at hand."""
    options = {tensor.name: {option.dtype: option for option in tensor.options} for tensor in chooser.tensors}
    for name, choice in chooser.types.presets.items():
        seen: Sequence[QuantizedTensor] = ()

        def observe(architecture: str | None, found: Sequence[QuantizedTensor]) -> None:
            nonlocal seen
            seen = found

        try:
            planned = plan(choice, observe)
        except AprError:  # a type that needs importance, or whose blocks do not divide the rows
            continue
        types: dict[str, TypeOption] = {}
        for row in seen:
            option = options.get(row.tensor.name, {}).get(row.target.dtype)
            if option is not None:
                types[row.tensor.name] = option
        if len(types) == len(options):
            best = fit_bytes(chooser.tensors, total_bytes(types))
            kl = None if best is None else chooser.predicted(best)
            yield PresetPoint(name, planned.output_bytes, chooser.predicted(types), kl)
