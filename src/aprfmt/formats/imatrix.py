"""Importance matrices of llama.cpp's llama-imatrix: how much each column of a matrix is used. Both file forms.

Old form (`.dat`), little-endian:
  i32 entries, then for each: i32 length | name | i32 calls | i32 n | n float32 (mean square times calls)
  and, in newer files: i32 chunks | i32 length | name of the data set
New form: a GGUF with the keys imatrix.datasets, imatrix.chunk_count, imatrix.chunk_size and, for every entry, the
tensors NAME.in_sum2 (float32 [matrices, columns], sums of squares) and NAME.counts (float32 [matrices, 1]).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.codecs.ggml import MOST_WEIGHT
from aprfmt.errors import CorruptError, LimitError, TruncatedError
from aprfmt.formats import gguf
from aprfmt.io.source import Source
from aprfmt.limits import MAX_NAME_BYTES
from aprfmt.types import Array

if TYPE_CHECKING:
    from aprfmt.model import Model, Tensor

SUMS, COUNTS = ".in_sum2", ".counts"
KEYS = ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size")

_LEAST_ENTRY_BYTES = 17  # three numbers, a name of one letter, one value
_INT = struct.Struct("<i")


@dataclass(frozen=True, slots=True)
class Imatrix:
    """An importance matrix.

    Attributes:
        path: of the file, as given.
        entries: GGUF tensor name -> float32 [matrices * columns], the mean square of each column's input; finite.
        datasets: what it was computed on.
        chunks: how many pieces of text that were, 0 where the file does not say.
    """

    path: str
    entries: Mapping[str, Array]
    datasets: tuple[str, ...] = ()
    chunks: int = 0


def read_imatrix(path: str | os.PathLike[str]) -> Imatrix:
    """The importance matrix at `path`.

    Raises NotFoundError, StorageError, CorruptError and its kinds (cut short, values that are negative, beyond
    MOST_WEIGHT or no numbers, sums without counts, no importance matrix at all).
    """
    name = os.fspath(path)
    with Source.open(name) as source:
        is_gguf = source.size >= 4 and source.read(0, 4) == b"GGUF"
        found = None if is_gguf else _read_old(source)
    if found is None:
        with gguf.open_model(Path(name)) as model:
            found = _read_new(model, name)
    for name, values in found.entries.items():
        if values.size and not (values.min() >= 0 and values.max() <= MOST_WEIGHT):
            raise CorruptError(
                "a value of the importance matrix is negative, beyond 2^60 or no number",
                path=found.path,
                tensor=name,
                hint="compute it again, on other data",
            )
    return found


# --- the old form ---


class _Reader:
    """Numbers, text and values one behind the other."""

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
                hint="the file is cut short, damaged or no importance matrix",
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
                hint="the file is damaged or no importance matrix",
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


def _read_old(source: Source) -> Imatrix:
    import numpy as np

    reader = _Reader(source)
    n_entries = reader.number("the number of entries", 1)
    if n_entries * _LEAST_ENTRY_BYTES > reader.left:
        raise TruncatedError(
            f"{n_entries} entries do not fit in {source.size} bytes",
            path=source.path,
            offset=0,
            hint="the file is cut short, damaged or no importance matrix",
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


# --- the new form ---


def _read_new(model: Model, path: str) -> Imatrix:
    kv = model.metadata
    missing = [key for key in KEYS if key not in kv]
    if missing:
        raise CorruptError(
            f"{missing[0]} is missing: the GGUF is not an importance matrix", path=path, hint="llama-imatrix makes one"
        )
    datasets, chunks = kv[KEYS[0]], kv[KEYS[1]]
    if not isinstance(datasets, list) or not all(isinstance(name, str) for name in datasets):
        raise CorruptError(f"{KEYS[0]} is not a list of strings", path=path)
    if type(chunks) is not int:
        raise CorruptError(f"{KEYS[1]} is {chunks!r}, not a number", path=path)
    parts: dict[str, dict[str, Tensor]] = {}
    for tensor in model.tensors.entries:
        for ending in (SUMS, COUNTS):
            if tensor.name.endswith(ending):
                parts.setdefault(tensor.name.removesuffix(ending), {})[ending] = tensor
    if not parts:
        raise CorruptError("the importance matrix has no entries", path=path)
    entries = {name: _new_entry(name, parts[name], path) for name in sorted(parts)}
    return Imatrix(path, entries, tuple(datasets), chunks)


def _new_entry(name: str, found: Mapping[str, Tensor], path: str) -> Array:
    """The sums over the counts; matrices that were never used weigh all columns alike."""
    import numpy as np

    if len(found) < 2 or any(tensor.dtype != "F32" for tensor in found.values()):
        raise CorruptError("it does not have both sums and counts in F32", path=path, tensor=name)
    sums, counts = (found[ending].numpy().reshape(-1) for ending in (SUMS, COUNTS))
    if not counts.size or not sums.size or sums.size % counts.size:
        raise CorruptError(f"{sums.size} sums do not match {counts.size} counts", path=path, tensor=name)
    if not np.isfinite(counts).all():
        raise CorruptError("a count is NaN or infinite", path=path, tensor=name)
    # As llama.cpp does: whole numbers, halves away from zero, then a division in float32.
    whole = (np.sign(counts) * np.floor(np.abs(counts.astype("<f8")) + 0.5)).astype("<f4")[:, None]
    with np.errstate(all="ignore"):
        used = sums.reshape(len(counts), -1) / np.where(whole > 0, whole, np.float32(1))
    return np.where(whole > 0, used, np.float32(1)).astype("<f4").reshape(-1)
