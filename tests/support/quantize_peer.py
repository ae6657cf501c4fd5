"""llama.cpp's own quantisation in this process, and importance matrices in both file forms."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aprfmt.codecs.dtypes import DTYPES, find_dtype
from aprfmt.formats import gguf_write
from aprfmt.formats.gguf_kv import GgufType
from aprfmt.formats.out import OutTensor
from aprfmt.io.segments import Literal, Stream, resolved
from aprfmt.io.source import Buffer

_LINE = re.compile(r"\[ *\d+/ *\d+\] +(\S+) +- \[.*?\], type = +(\w+), (.*)")
_NONE = 0x7FFFFFFF  # any type number beyond the last one


def quantize(
    source: Path,
    target: Path | None,
    file_type: int,
    *,
    imatrix: Mapping[str, Any] | None = None,
    pure: bool = False,
    output: str | None = None,
    embedding: str | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    leave_output: bool = False,
    allow_requantize: bool = False,
) -> dict[str, str]:
    """Writes `target` by llama_model_quantize; without one it is a dry run that gives {tensor: dtype}.

    Raises ValueError with what llama.cpp said when it refuses.
    """
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype = 1, file_type
    params.pure, params.allow_requantize = pure, allow_requantize
    params.quantize_output_tensor, params.dry_run = not leave_output, target is None
    if output:
        params.output_tensor_type = DTYPES[find_dtype(output).name].ggml_id
    if embedding:
        params.token_embedding_type = DTYPES[find_dtype(embedding).name].ggml_id
    kept = []  # what the C side points at
    if imatrix:
        entries = (llama_cpp.llama_model_imatrix_data * (len(imatrix) + 1))()
        for entry, (name, values) in zip(entries, imatrix.items(), strict=False):
            data = (ctypes.c_float * len(values))(*map(float, values))
            kept.append(data)
            entry.name, entry.size = name.encode(), len(values)
            entry.data = ctypes.cast(data, ctypes.POINTER(ctypes.c_float))
        params.imatrix = entries
    if overrides:
        patterns = (llama_cpp.llama_model_tensor_override * (len(overrides) + 1))()
        for item, (pattern, name) in zip(patterns, overrides, strict=False):
            item.pattern, item.type = pattern.encode(), DTYPES[find_dtype(name).name].ggml_id
        params.tt_overrides = patterns
    with _log(llama_cpp) as said:
        out = str(target or source.with_suffix(".none")).encode()
        code = llama_cpp.llama_model_quantize(str(source).encode(), out, params)
    text = "".join(said)
    if code:
        raise ValueError(text[-400:])
    return dict(_types(text))


def _types(text: str) -> Iterator[tuple[str, str]]:
    for name, old, rest in _LINE.findall(re.sub(r"\nwarning: .*|\n=+ .*", "", text)):
        found = re.search(r"\((\w+)\)|converting to (\w+)", rest)
        yield name, find_dtype(next(filter(None, found.groups())) if found else old).name


@contextmanager
def _log(llama_cpp: Any) -> Iterator[list[str]]:
    """What llama.cpp says meanwhile."""
    said: list[str] = []

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def heard(level: int, text: bytes, data: Any) -> None:
        said.append(text.decode("utf-8", "replace"))

    llama_cpp.llama_log_set(heard, ctypes.c_void_p(0))
    try:
        yield said
    finally:
        llama_cpp.llama_log_set(llama_cpp._logger.llama_log_callback, ctypes.c_void_p(0))


def write_gguf(
    path: Path, keys: Sequence[Any], tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]
) -> None:
    """A GGUF of keys and tensors {name: (dtype, row-major shape, bytes)}."""
    out = [OutTensor(n, d, s, len(b), lambda b=b: [b]) for n, (d, s, b) in tensors.items()]  # type: ignore[misc]
    parts: list[Buffer] = []
    for segment in gguf_write.layout(keys, out):
        if isinstance(segment, Stream):
            parts += resolved(segment.chunks())
        else:
            parts.append(segment.data if isinstance(segment, Literal) else bytes(segment.n_bytes))
    path.write_bytes(b"".join(parts))


def old_imatrix(
    entries: Mapping[str, Sequence[float]],
    *,
    calls: int = 4,
    chunks: int | None = 7,
    dataset: str = "text.txt",
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
    path: Path,
    entries: Mapping[str, Sequence[float]],
    counts: Mapping[str, Sequence[float]],
    *,
    chunks: int = 7,
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
