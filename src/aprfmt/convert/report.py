"""What a conversion did, or with a plan would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypedDict

from aprfmt.codecs.dtypes import DtypeTotals
from aprfmt.llama.verify import Verification
from aprfmt.text import format_bytes, html_table


class PlannedTensor(TypedDict):
    """A tensor of a planned output."""

    name: str
    dtype: str
    shape: list[int]
    size_bytes: int


@dataclass(slots=True, repr=False)
class Report:
    """The result of import_model, export_model, convert_model and quantize_model; `to_json` is the CLI's object.

    Attributes:
        source, output: paths as given.
        format: id of the written container: "apr-v2", "gguf", "safetensors", "hf", "mlx", or a plugin's.
        label: the same as users know it: "APR v2", "HF folder".
        architecture: row id of arch.table, or the source's own word.
        tensor_count: tensors in the output.
        input_bytes, output_bytes: sizes of all files read and written.
        dtypes: of the output's tensors.
        lossless: whether the source can be restored byte for byte from the output.
        losses: what the output does not hold exactly, one sentence each.
        verify: what llama.cpp made of the output, where that was asked for.
        memory_bytes: estimate of the peak working memory.
        tensors: of the output; filled for plans.
        files: paths of an output in several files beside each other, of which `output` is the first.
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
    lossless: bool
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    verify: Verification | None = None
    plan: bool = False
    memory_bytes: int = 0
    tensors: list[PlannedTensor] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"Report({', '.join(f'{name} {value!r}' for name, value in self._facts())})"

    def _repr_html_(self) -> str:
        return html_table(self._facts())

    def _facts(self) -> Iterator[tuple[str, object]]:
        yield from (("source", self.source), ("output", self.output), ("format", self.label))
        yield from (("architecture", self.architecture), ("tensors", self.tensor_count))
        yield "size", f"{format_bytes(self.output_bytes)} from {format_bytes(self.input_bytes)}"
        yield from (("lossless", self.lossless), ("plan", self.plan))
        yield from (("losses", len(self.losses)), ("warnings", len(self.warnings)))

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits for each value of the output's tensors; None without any."""
        n_values = sum(row["params"] for row in self.dtypes.values())
        return 8 * sum(row["bytes"] for row in self.dtypes.values()) / n_values if n_values else None

    def to_json(self) -> dict[str, object]:
        """The keys of the JSON contract; plans add plan, memory_bytes and tensors."""
        bits = self.bits_per_weight
        body: dict[str, object] = {
            "source": self.source,
            "output": self.output,
            "format": self.format,
            "architecture": self.architecture,
            "tensor_count": self.tensor_count,
            "input_bytes": self.input_bytes,
            "output_bytes": self.output_bytes,
            "dtypes": self.dtypes,
            "bits_per_weight": round(bits, 3) if bits is not None else None,
            "seconds": round(self.seconds, 3),
            "warnings": self.warnings,
            "lossless": self.lossless,
            "losses": self.losses,
        }
        if self.files:
            body["files"] = self.files
        if self.verify is not None:
            body["verify"] = self.verify
        if self.plan:
            body |= {"plan": True, "memory_bytes": self.memory_bytes, "tensors": self.tensors}
        return body
