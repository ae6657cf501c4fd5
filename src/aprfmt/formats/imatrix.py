"""Importance matrices in both formats of llama-imatrix: how much each column of a matrix is used.

Old form (`.dat`), little-endian:
  i32 entries, then for each: i32 length | name | i32 calls | i32 n | n float32 (mean square times calls)
  and, in newer files: i32 chunks | i32 length | name of the data set
New form: a GGUF with the keys imatrix.datasets, imatrix.chunk_count, imatrix.chunk_size and, for every entry, the
tensors NAME.in_sum2 (float32 [matrices, columns], sums of squares) and NAME.counts (float32 [matrices, 1]).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.codecs.ggml import MOST_WEIGHT
from aprfmt.errors import CorruptError, LimitError, RefusedError, TruncatedError
from aprfmt.formats import gguf
from aprfmt.formats.gguf_fields import GgufType
from aprfmt.formats.gguf_write import KV, layout
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.downloads import explained
from aprfmt.io.pipe import FileLayout, Literal
from aprfmt.io.source import Source
from aprfmt.limits import MAX_NAME_BYTES
from aprfmt.types import Array

if TYPE_CHECKING:
    from aprfmt.model import Model, Tensor

SUMS, COUNTS = ".in_sum2", ".counts"
OLD_SUFFIX = ".dat"
DEFAULT_CHUNK = 512
"""Default tokens per chunk of text."""

KEYS = ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size")

_LEAST_ENTRY_BYTES = 17  # three numbers, a name of one letter, one value
_INT = struct.Struct("<i")


@dataclass(frozen=True, slots=True)
class ImatrixEntry:
    """What was recorded of one weight.

    Attributes:
        sums: [matrices, columns], sums of the squared inputs over all rows.
        counts: number of rows per matrix, or one number for all.
    """

    sums: Array
    counts: Array


@dataclass(frozen=True, slots=True)
class ImatrixSums:
    """An importance matrix that can be added to another.

    Attributes:
        entries: by the weight's name in a GGUF.
        datasets: what it was computed on.
        chunks: number of text chunks, 0 if the file does not say.
        chunk_size: tokens per chunk.
    """

    entries: Mapping[str, ImatrixEntry]
    datasets: tuple[str, ...]
    chunks: int
    chunk_size: int


@dataclass(frozen=True, slots=True)
class Imatrix:
    """An importance matrix.

    Attributes:
        path: of the file, as given.
        entries: GGUF tensor name -> float32 [matrices * columns], the mean square of each column's input; finite.
        datasets: what it was computed on.
        chunks: number of text chunks, 0 if the file does not say.
        counts: for expert stacks, GGUF tensor name -> tokens routed to each [matrices].
    """

    path: str
    entries: Mapping[str, Array]
    datasets: tuple[str, ...] = ()
    chunks: int = 0
    counts: Mapping[str, Array] = field(default_factory=dict)


COMPUTE = "apr imatrix MODEL --data TEXT -o OUT.gguf computes that of a model"
"""The hint for a matrix of another model."""


def read_imatrix(path: str | os.PathLike[str]) -> Imatrix:
    """Reads an importance matrix.

    Raises NotFoundError, StorageError, CorruptError and its kinds (truncated; values that are negative, beyond
    MOST_WEIGHT or not finite; sums without counts; another kind of file).
    """
    raw = _read(os.fspath(path))
    if isinstance(raw, ImatrixSums):
        means = {name: _means(entry) for name, entry in raw.entries.items()}
        counts = {name: entry.counts for name, entry in raw.entries.items() if entry.counts.size > 1}
        found = Imatrix(os.fspath(path), means, raw.datasets, raw.chunks, counts)
    else:
        found = raw
    for name, values in found.entries.items():
        if values.size and not (values.min() >= 0 and values.max() <= MOST_WEIGHT):
            raise CorruptError(
                "a value of the importance matrix is negative, above 2^60 or NaN",
                path=found.path,
                tensor=name,
                hint="compute it again with other data",
            )
    return found


def read_sums(path: str | os.PathLike[str]) -> ImatrixSums:
    """Reads an importance matrix with its counts. Raises what read_imatrix does.

    The old format has means and the number of chunks: each chunk counts as DEFAULT_CHUNK tokens.
    """
    read_imatrix(path)
    found = _read(os.fspath(path))
    if isinstance(found, ImatrixSums):
        return found
    import numpy as np

    tokens = max(1, found.chunks) * DEFAULT_CHUNK
    entries = {
        name: ImatrixEntry(values.astype("<f8")[None] * tokens, np.full(1, tokens, "<i8"))
        for name, values in found.entries.items()
    }
    return ImatrixSums(entries, found.datasets, found.chunks, DEFAULT_CHUNK)


def add_sums(parts: Sequence[tuple[str, ImatrixSums]]) -> ImatrixSums:
    """Adds importance matrices, each with the name that errors call it by.

    Raises RefusedError if two have the same weight with different numbers of columns.
    """
    import numpy as np

    entries: dict[str, ImatrixEntry] = {}
    for path, part in parts:
        for name, entry in part.entries.items():
            known = entries.get(name)
            if known is None:
                entries[name] = ImatrixEntry(entry.sums.astype("<f8"), entry.counts.astype("<i8"))
                continue
            if known.sums.size != entry.sums.size:
                raise RefusedError(
                    f"the importance matrices are from different models: {entry.sums.size} values against "
                    f"{known.sums.size}",
                    path=path,
                    tensor=name,
                )
            n = max(len(known.counts), len(entry.counts))
            sums = known.sums.reshape(n, -1) + entry.sums.reshape(n, -1)
            entries[name] = ImatrixEntry(sums, np.broadcast_to(known.counts, n) + np.broadcast_to(entry.counts, n))
    datasets = tuple(dict.fromkeys(name for _, part in parts for name in part.datasets))
    return ImatrixSums(
        entries, datasets, sum(part.chunks for _, part in parts), max(part.chunk_size for _, part in parts)
    )


def _read(name: str) -> Imatrix | ImatrixSums:
    with explained(name), Source.open(name) as source:
        if not (source.size >= 4 and source.read(0, 4) == b"GGUF"):
            return _read_dat(source)
    with gguf.open_model(Path(name)) as model:
        return _read_gguf(model, name)


# --- .dat ---


class _Reader:
    """Reads consecutive numbers, texts and values."""

    def __init__(self, source: Source) -> None:
        self.path, self.source, self.pos = source.path, source, 0

    @property
    def left(self) -> int:
        return self.source.size - self.pos

    def take(self, n_bytes: int, what: str) -> bytes:
        if n_bytes > self.left:
            raise TruncatedError(
                f"{what} needs {n_bytes} bytes, {self.left} are left",
                path=self.path,
                offset=self.pos,
                hint="the file is truncated, damaged or not an importance matrix",
            )
        self.pos += n_bytes
        return self.source.read(self.pos - n_bytes, n_bytes)

    def number(self, what: str, least: int) -> int:
        value: int = _INT.unpack(self.take(4, what))[0]
        if value < least:
            raise CorruptError(
                f"{what} is {value}",
                path=self.path,
                offset=self.pos - 4,
                hint="the file is damaged, or not an importance matrix",
            )
        return value

    def text(self, what: str) -> str:
        length = self.number(f"the length of {what}", 0)
        if length > MAX_NAME_BYTES:
            raise LimitError(
                f"{what} has {length} bytes; the limit is {MAX_NAME_BYTES}", path=self.path, offset=self.pos - 4
            )
        raw = self.take(length, what).partition(b"\0")[0]
        return raw.decode("utf-8", "surrogateescape")


def _read_dat(source: Source) -> Imatrix:
    import numpy as np

    reader = _Reader(source)
    n_entries = reader.number("the number of entries", 1)
    if n_entries * _LEAST_ENTRY_BYTES > reader.left:
        raise TruncatedError(
            f"{n_entries} entries do not fit in {source.size} bytes",
            path=source.path,
            offset=0,
            hint="the file is truncated, damaged or not an importance matrix",
        )
    entries: dict[str, Array] = {}
    for _ in range(n_entries):
        name = reader.text("a tensor name")
        calls = reader.number(f"the calls of {name!r}", -(1 << 31))
        n_values = reader.number(f"the number of values of {name!r}", 1)
        values = np.frombuffer(reader.take(4 * n_values, f"the values of {name!r}"), dtype="<f4")
        with np.errstate(all="ignore"):
            entries[name] = values / np.float32(calls) if calls > 0 else values.copy()
    chunks = reader.number("the number of chunks", -(1 << 31)) if reader.left >= 4 else 0
    dataset = reader.text("the name of the data set") if reader.left >= 4 else ""
    return Imatrix(source.path, entries, (dataset,) if dataset else (), max(0, chunks))


# --- GGUF ---


def _read_gguf(model: Model, path: str) -> ImatrixSums:
    kv = model.metadata
    missing = [key for key in KEYS if key not in kv]
    if missing:
        raise CorruptError(
            f"{missing[0]} is missing: not an importance matrix", path=path, hint="compute one with apr imatrix"
        )
    datasets, *numbers = (kv[key] for key in KEYS)
    if not isinstance(datasets, list) or not all(isinstance(name, str) for name in datasets):
        raise CorruptError(f"{KEYS[0]} is not a list of strings", path=path)
    for key, number in zip(KEYS[1:], numbers, strict=True):
        if type(number) is not int:
            raise CorruptError(f"{key} is {number!r}, not a number", path=path)
    parts: dict[str, dict[str, Tensor]] = {}
    for tensor in model.tensors.entries:
        for ending in (SUMS, COUNTS):
            if tensor.name.endswith(ending):
                parts.setdefault(tensor.name.removesuffix(ending), {})[ending] = tensor
    if not parts:
        raise CorruptError("the importance matrix has no entries", path=path)
    entries = {name: _new_entry(name, parts[name], path) for name in sorted(parts)}
    return ImatrixSums(entries, tuple(datasets), *numbers)


def _new_entry(name: str, found: Mapping[str, Tensor], path: str) -> ImatrixEntry:
    import numpy as np

    if len(found) < 2 or any(tensor.dtype != "F32" for tensor in found.values()):
        raise CorruptError("sums and counts must both be present in F32", path=path, tensor=name)
    sums, counts = (found[ending].numpy().reshape(-1) for ending in (SUMS, COUNTS))
    if not counts.size or not sums.size or sums.size % counts.size:
        raise CorruptError(f"{sums.size} sums do not match {counts.size} counts", path=path, tensor=name)
    if not np.isfinite(counts).all():
        raise CorruptError("a count is NaN or infinite", path=path, tensor=name)
    return ImatrixEntry(sums.reshape(len(counts), -1), counts)


def _means(entry: ImatrixEntry) -> Array:
    """The sums divided by the counts; matrices that were never used weigh all columns alike."""
    import numpy as np

    # As llama.cpp does: integers, halves rounded away from zero, then a division in float32.
    counts = entry.counts
    whole = (np.sign(counts) * np.floor(np.abs(counts.astype("<f8")) + 0.5)).astype("<f4")[:, None]
    with np.errstate(all="ignore"):
        used = entry.sums.astype("<f4").reshape(len(counts), -1) / np.where(whole > 0, whole, np.float32(1))
    return np.where(whole > 0, used, np.float32(1)).astype("<f4").reshape(-1)


# --- writing ---


def file_of(sums: ImatrixSums, name: str) -> FileLayout:
    """Serializes an importance matrix: in the old format if `name` ends with .dat, else as a GGUF."""
    if name.lower().endswith(OLD_SUFFIX):
        return FileLayout(name, [Literal(_old_bytes(sums))])
    keys: list[KV] = [
        ("general.type", GgufType.STRING, "imatrix"),
        (KEYS[0], (GgufType.ARRAY, GgufType.STRING), list(sums.datasets)),
        (KEYS[1], GgufType.UINT32, sums.chunks),
        (KEYS[2], GgufType.UINT32, sums.chunk_size),
    ]
    tensors = []
    for weight, entry in sorted(sums.entries.items()):
        n = len(entry.counts)
        for ending, values in ((SUMS, entry.sums.reshape(n, -1)), (COUNTS, entry.counts.reshape(n, 1))):
            raw = values.astype("<f4").tobytes()
            tensors.append(OutTensor(weight + ending, "F32", values.shape, len(raw), partial(list, [raw])))
    return FileLayout(name, layout(keys, tensors))


def _old_bytes(sums: ImatrixSums) -> bytes:
    import numpy as np

    out = [_INT.pack(len(sums.entries))]
    for weight, entry in sorted(sums.entries.items()):
        calls = max(1, -(-int(entry.counts.max()) // max(1, sums.chunk_size)))
        values = _means(entry) * np.float32(calls)
        raw = weight.encode()
        out += [_INT.pack(len(raw)), raw, _INT.pack(calls), _INT.pack(values.size), values.astype("<f4").tobytes()]
    dataset = sums.datasets[-1].encode("utf-8", "surrogateescape") if sums.datasets else b""
    return b"".join([*out, _INT.pack(sums.chunks), _INT.pack(len(dataset)), dataset])
