"""What a conversion did, or with a plan would do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aprfmt.codecs.pieces import DtypeTotals
from aprfmt.llama.verify import Verification


@dataclass(slots=True)
class Report:
    """The result of import_model, export_model and convert_model; `to_json` is the CLI's object.

    Attributes:
        source, output: paths as given.
        format: id of the written container: "apr-v2", "gguf", "safetensors", "hf", "mlx".
        architecture: row id of arch.table, or the source's own word.
        tensor_count: tensors in the output.
        input_bytes, output_bytes: sizes of all files read and written.
        dtypes: output dtype -> {tensors, params, bytes}.
        lossless: whether the source can be had back byte for byte from the output.
        losses: what the output does not hold exactly, one sentence each.
        memory_bytes: estimate of the peak working memory.
        tensors: output tensors with dtype, shape and size; filled for plans.
        files: paths of an output in several files beside each other, of which `output` is the first.
    """

    source: str
    output: str
    format: str
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
    tensors: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits for each value of the output's tensors; None without any."""
        n_values = sum(row["params"] for row in self.dtypes.values())
        return 8 * sum(row["bytes"] for row in self.dtypes.values()) / n_values if n_values else None

    def to_json(self) -> dict[str, Any]:
        """The keys of the JSON contract; plans add plan, memory_bytes and tensors."""
        body: dict[str, Any] = {
            "source": self.source,
            "output": self.output,
            "format": self.format,
            "architecture": self.architecture,
            "tensor_count": self.tensor_count,
            "input_bytes": self.input_bytes,
            "output_bytes": self.output_bytes,
            "dtypes": self.dtypes,
            "bits_per_weight": round(bits, 3) if (bits := self.bits_per_weight) is not None else None,
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
