"""What tests of packed weights are built from: tensors in memory, a case, bit fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aprfmt.io.source import Source
from aprfmt.model import Tensor

Array = np.ndarray[Any, Any]
BASE = "model.layers.0.mlp.up_proj"

_NUMPY = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "I8": "i1", "U8": "u1", "F8_E4M3": "u1",
          "F8_E8M0": "u1", "BF16": "<u2"}  # fmt: skip


def tensor(name: str, dtype: str, values: Any, shape: Sequence[int] | None = None, pad: int = 16) -> Tensor:
    """A tensor over bytes in memory, `pad` bytes into its file; `values` are stored elements (bits for floats)."""
    array = np.array(values).astype(_NUMPY[dtype])
    data = array.tobytes()
    source = Source.from_bytes(b"\xee" * pad + data + b"\xee" * pad, "memory")
    return Tensor(name, dtype, tuple(array.shape if shape is None else shape), pad, len(data), source)


@dataclass(frozen=True)
class Packed:
    """A packed weight: its tensors, the config, and what must come out."""

    tensors: dict[str, Tensor]
    quantization: dict[str, Any]
    values: Array
    name: str = f"{BASE}.weight"
    dtype: str = "bfloat16"

    @property
    def config(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "quantization_config": self.quantization}

    def changed(self, ending: str, new: Tensor | None) -> dict[str, Tensor]:
        """The tensors with the one that ends so replaced, or left out."""
        out = dict(self.tensors)
        (name,) = [n for n in out if n.endswith(ending)]
        if new is None:
            del out[name]
        else:
            out[name] = new
        return out


def named(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {t.name: t for t in tensors}


def pack_fields(fields: Sequence[int], bits: int) -> list[int]:
    """Fields one behind the other, lowest bits first, as signed 32-bit words."""
    total = 0
    for i, field in enumerate(fields):
        total |= int(field) << bits * i
    n_words = -(-len(fields) * bits // 32)
    words = [total >> 32 * i & 0xFFFFFFFF for i in range(n_words)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def pack_rows(codes: Array, bits: int) -> Array:
    """[rows, columns] -> [rows, words], each row packed by itself."""
    return np.array([pack_fields(row, bits) for row in codes.tolist()])


def halves(rng: np.random.Generator, *shape: int) -> Array:
    return (rng.integers(1, 60, shape) / 64).astype("<f2")
