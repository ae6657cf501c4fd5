"""The result of a conversion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TypedDict

from aprfmt.canonical.packed import BlockChange
from aprfmt.canonical.requantized import RequantizedWeight
from aprfmt.codecs.dtypes import DtypeTotals
from aprfmt.llama.client import Verification
from aprfmt.text import format_bytes


class PlannedTensor(TypedDict):
    """A tensor of a planned output."""

    name: str
    dtype: str
    shape: list[int]
    size_bytes: int


class QuantizedGroup(TypedDict):
    """Tensors of one role in neighbouring layers, whose types were chosen for a target.

    `layers` is "" outside of layers; `dtypes` counts tensors, `error` is their mean relative squared error, `share`
    their part of the predicted KL divergence.
    """

    role: str
    layers: str
    dtypes: dict[str, int]
    size_bytes: int
    bits_per_weight: float
    error: float
    share: float


@dataclass(slots=True, repr=False, kw_only=True)
class Report:
    """The result of a conversion (import_model, export_model, ...); `to_json` is the CLI's object.

    Attributes:
        source, output: paths as given.
        format: id of the written container: "apr-v2", "gguf", "safetensors", "hf", "mlx", or a plugin's.
        label: its user-facing name: "APR v2", "HF folder".
        architecture: id in arch.table, or the name in the source.
        tensor_count: tensors in the output.
        input_bytes, output_bytes: sizes of all files read and written.
        dtypes: of the output's tensors.
        param_count: parameters of the model; quantized weights count by their decoded elements.
        bits_per_weight: stored bits per parameter; None without parameters.
        lossless: whether the source can be restored byte for byte from the output.
        losses: what the output drops or rounds, one sentence each.
        differences: how llama.cpp differs from transformers: `what`, one sentence; `beyond`, the text length in tokens
            above which logits differ, None if all texts are affected; `slight`, whether the most likely tokens keep
            their order.
        changes: quantized weights with unchanged codes and rounded scales: `tensor`, `from`, `to`,
            `largest_relative_change` of a value, relative to the largest that its block can represent.
        requantized: weights that were quantized again after an adapter was merged: `tensor`, `from`, `to`,
            `relative_error`, the RMSE of that step over the RMS of the values; empty in a plan.
        proven: whether `lossless` was verified: each written file matches the digest that the `.apr` records for its
            source file.
        verify: the result of loading the output in llama.cpp, if requested.
        memory_bytes: estimate of the peak working memory.
        tensors: of the output; filled for plans.
        groups: types chosen for a target, by role and layers.
        predicted_kl: predicted KL divergence of the chosen types in nats per token.
        measured_kl: measured by llama.cpp with --max-kl; `rounds`, the number of measured outputs.
        signature: who signed the source, and whether that was verified; None without a signature.
        files: paths of an output in several sibling files; `output` is the first.
        written: name and bytes of each file of a folder or split output.
    """

    source: str
    output: str
    format: str
    label: str
    architecture: str | None
    tensor_count: int
    input_bytes: int
    output_bytes: int
    dtypes: dict[str, DtypeTotals]
    param_count: int | None = None
    bits_per_weight: float | None = field(init=False)
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)
    lossless: bool
    proven: bool = False
    losses: list[str] = field(default_factory=list)
    differences: list[dict[str, object]] = field(default_factory=list)
    changes: list[BlockChange] = field(default_factory=list)
    requantized: list[RequantizedWeight] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    written: dict[str, int] = field(default_factory=dict)
    verify: Verification | None = None
    plan: bool = False
    memory_bytes: int = 0
    tensors: list[PlannedTensor] = field(default_factory=list)
    groups: list[QuantizedGroup] = field(default_factory=list)
    predicted_kl: float | None = None
    measured_kl: float | None = None
    rounds: int = 0
    signature: str | None = None

    def __post_init__(self) -> None:
        if self.param_count is None:
            self.param_count = sum(row["params"] for row in self.dtypes.values())
        n_bits = 8 * sum(row["bytes"] for row in self.dtypes.values())
        self.bits_per_weight = n_bits / self.param_count if self.param_count else None

    def __repr__(self) -> str:
        return f"Report({', '.join(f'{name} {value!r}' for name, value in self._facts())})"

    def _repr_html_(self) -> str:
        from aprfmt.html.notebook import small_table

        return small_table(self._facts())

    def _facts(self) -> Iterator[tuple[str, object]]:
        yield from (("source", self.source), ("output", self.output), ("format", self.label))
        yield from (("architecture", self.architecture), ("tensors", self.tensor_count))
        yield "size", f"{format_bytes(self.output_bytes)} from {format_bytes(self.input_bytes)}"
        yield from (("lossless", self.lossless), ("plan", self.plan))
        yield from (("losses", len(self.losses)), ("warnings", len(self.warnings)))

    def to_json(self) -> dict[str, object]:
        """The keys of the JSON contract; plans add plan, memory_bytes and tensors."""
        rare = ["requantized", "files", "written", "verify", "groups", "predicted_kl", "measured_kl", "rounds"]
        left_out = {"label", *(name for name in (*rare, "signature") if not getattr(self, name))}
        if not self.plan:
            left_out |= {"plan", "memory_bytes", "tensors"}
        body = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        bits = self.bits_per_weight
        rounded = {"bits_per_weight": round(bits, 3) if bits is not None else None, "seconds": round(self.seconds, 3)}
        return body | rounded
