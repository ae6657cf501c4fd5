"""Which dtype each output tensor gets: what `--dtype` means, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.dtypes import DTYPES, find_dtype
from aprfmt.errors import UsageError
from aprfmt.text import plural

_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(slots=True)
class Losses:
    """What the report says of an output: what it does not hold exactly, and warnings of the target's planning."""

    changed: Counter[tuple[str, str]] = field(default_factory=Counter)
    overflows: int = 0
    others: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, sentence: str) -> None:
        """Notes what the output does not hold at all."""
        self.others.append(sentence)

    def note(self, source: str, target: str) -> None:
        """Counts one tensor converted from dtype `source` to `target`."""
        if not is_exact(source, target):
            self.changed[source, target] += 1

    def overflow(self, n: int) -> None:
        """Counts values that became infinite."""
        self.overflows += n

    def sentences(self) -> list[str]:
        """One sentence a kind of loss."""
        out = [f"{plural(n, 'tensor')} rounded from {a} to {b}" for (a, b), n in sorted(self.changed.items())]
        if self.overflows:
            out.append(
                f"{self.overflows} values were out of the target's range and became infinite or its largest value"
            )
        return out + self.others


# Source dtype -> targets that hold each of its values exactly.
_EXACT = {"F16": {"F32", "F64"}, "BF16": {"F32", "F64"}, "F32": {"F64"}}


def is_exact(source: str, target: str) -> bool:
    """Whether every value of `source` survives in `target`; decoded blocks are exact in F32."""
    if source == target or target in _EXACT.get(source, ()):
        return True
    return DTYPES[source].kind != "plain" and target == "F32"


def plain_dtype(dtype: str, also: Sequence[str] = ()) -> str | None:
    """The dtype row that `--dtype` names where it names no mix, None for "keep".

    Floats, AprQ4, AprQ8 and `also`, what the container has beside them. Raises UsageError for any other.
    """
    if dtype == "keep":
        return None
    name = find_dtype(dtype).name
    writable = ["F32", "F16", "BF16", "AprQ4", "AprQ8", *also]
    if name not in writable:
        raise UsageError(
            f"weights cannot be written as {name}",
            hint="one of: keep, " + ", ".join(writable).lower() + "; or a mix: apr quantize --list",
        )
    return name


# GGUF tensors of two dims and more that llama.cpp's kernels want in F32 whatever the file's dtype.
_ALWAYS_F32 = (
    "norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight",
    "token_types.weight", "ssm_conv1d.weight", "shortconv.conv.weight",
)  # fmt: skip


def is_matrix(gguf_name: str, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp keeps the GGUF tensor in the model's dtype: weights of two dims and more, few excepted."""
    return len(shape) >= 2 and gguf_name.endswith(".weight") and not gguf_name.endswith(_ALWAYS_F32)


def matrix_dtype(tensor: CanonicalTensor, dtype: str, gguf_name: str) -> str:
    """The dtype of `tensor` in an `.apr` when `dtype`, no mix, is asked for: AprQ4 and AprQ8 apply to matrices only.

    Vectors stay F32 (or become it), integers stay as they are.
    """
    target = plain_dtype(dtype)
    if target is None or not is_float(tensor.dtype):
        return tensor.dtype
    if target in _FLOATS:
        return target
    return target if is_matrix(gguf_name, tensor.shape) else "F32"


def is_float(dtype: str) -> bool:
    """Whether tensors of the dtype are floats, or blocks that decode to floats; 8-bit floats do not count."""
    return dtype in _FLOATS or DTYPES[dtype].kind != "plain"
