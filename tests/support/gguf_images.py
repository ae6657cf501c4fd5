"""Helpers of the GGUF tests: files written by the reference package, and images built byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Field = tuple[str, gguf.GGUFValueType, Any]

QUANTS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
"""What the gguf package can encode."""


def peer_tensors() -> dict[str, tuple[np.ndarray[Any, Any], str]]:
    """Name -> (stored array, dtype): every encodable quant, plain integers, 1 to 4 dims, an empty one."""
    values = np.random.default_rng(7).normal(size=(3, 512)).astype(np.float32)
    tensors: dict[str, tuple[np.ndarray[Any, Any], str]] = {}
    for name in QUANTS:
        kind = gguf.GGMLQuantizationType[name]
        tensors[f"quant.{name}"] = (gguf.quants.quantize(values, kind), name)
    for dtype, name in ((np.int8, "I8"), (np.int16, "I16"), (np.int32, "I32"), (np.int64, "I64")):
        tensors[f"int.{name}"] = (np.arange(7, dtype=dtype), name)
    tensors["f64"] = (np.arange(6, dtype=np.float64).reshape(2, 3), "F64")
    tensors["four"] = (np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5), "F32")
    tensors["empty"] = (np.zeros((0, 4), dtype=np.float32), "F32")
    return tensors


def write_peer(
    path: Path,
    fields: Sequence[Field],
    tensors: dict[str, tuple[np.ndarray[Any, Any], str]],
    alignment: int = 32,
    arch: str = "llama",
) -> None:
    """Writes `path` with gguf.GGUFWriter."""
    writer = gguf.GGUFWriter(path, arch)
    for key, kind, value in fields:
        writer.add_key_value(key, value, kind)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for name, (array, dtype) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def string(text: bytes) -> bytes:
    """A GGUF string."""
    return struct.pack("<Q", len(text)) + text


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    """A key-value entry."""
    return string(key) + struct.pack("<I", kind) + value


def info(name: bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """A tensor info; dims as stored."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def image(
    pairs: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A whole file; `counts` overrides the tensor and key counts."""
    n_tensors, n_kv = counts if counts is not None else (len(infos), len(pairs))
    head = struct.pack("<4sIQQ", b"GGUF", version, n_tensors, n_kv) + b"".join(pairs) + b"".join(infos)
    return head + (b"\0" * (-len(head) % 32) + data if data else b"")
