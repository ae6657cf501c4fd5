"""Importance matrices in both file forms, and GGUF files of given tensors."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aprfmt.formats import gguf_write
from aprfmt.formats.gguf_fields import GgufType
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import Literal, Stream, run_jobs
from aprfmt.io.source import Buffer


def write_gguf(path: Path, keys: Sequence[Any], tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """A GGUF of keys and tensors {name: (dtype, row-major shape, bytes)}."""
    out = [OutTensor(n, d, s, len(b), lambda b=b: [b]) for n, (d, s, b) in tensors.items()]  # type: ignore[misc]
    parts: list[Buffer] = []
    for segment in gguf_write.layout(keys, out):
        if isinstance(segment, Stream):
            parts += run_jobs(segment.chunks())
        else:
            parts.append(segment.data if isinstance(segment, Literal) else bytes(segment.n_bytes))
    path.write_bytes(b"".join(parts))


def old_imatrix(
    entries: Mapping[str, Sequence[float]], *, calls: int = 4, chunks: int | None = 7, dataset: str = "text.txt"
) -> bytes:
    """A .dat file whose entries come out as `entries`."""
    out = [struct.pack("<i", len(entries))]
    for name, values in entries.items():
        raw = name.encode()
        out += [struct.pack("<i", len(raw)), raw, struct.pack("<ii", calls, len(values))]
        out.append(struct.pack(f"<{len(values)}f", *(v * calls for v in values)))
    if chunks is not None:
        raw = dataset.encode()
        out += [struct.pack("<ii", chunks, len(raw)), raw]
    return b"".join(out)


def new_imatrix(
    path: Path, entries: Mapping[str, Sequence[float]], counts: Mapping[str, Sequence[float]], *, chunks: int = 7
) -> None:
    """A GGUF file with sums of squares, one count a matrix."""
    keys = [
        ("general.type", GgufType.STRING, "imatrix"),
        ("imatrix.datasets", (GgufType.ARRAY, GgufType.STRING), ["text.txt"]),
        ("imatrix.chunk_count", GgufType.UINT32, chunks),
        ("imatrix.chunk_size", GgufType.UINT32, 512),
    ]
    tensors = {}
    for name, values in entries.items():
        n = len(counts[name])
        tensors[f"{name}.in_sum2"] = (
            "F32", (n, len(values) // n), struct.pack(f"<{len(values)}f", *values)
        )  # fmt: skip
        tensors[f"{name}.counts"] = ("F32", (n, 1), struct.pack(f"<{n}f", *counts[name]))
    write_gguf(path, keys, tensors)
