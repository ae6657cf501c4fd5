"""The tensor index of an APR v2 file, and the true dtypes that ours keep beside it.

One entry, little-endian: u16 name length, name, u8 dtype id, u8 ndim, ndim x u64 dims (outermost first), u64
offset from the data section, u64 size in bytes. Entries are sorted by name.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NoReturn, TypeGuard

from aprfmt.codecs.dtypes import DTYPES, Dtype, dtype_by_apr_id
from aprfmt.errors import AprError, CorruptError, LimitError, TruncatedError, UnsupportedError
from aprfmt.io.source import Source
from aprfmt.limits import MAX_NDIM
from aprfmt.model import Tensor

ALIGNMENT = 64
MIN_ENTRY_BYTES = 20
_MAX_ENTRY_BYTES = 2 + 0xFFFF + 2 + 8 * MAX_NDIM + 16

# dims, offset and size of an entry, by ndim.
_TAILS = tuple(struct.Struct(f"<{ndim + 2}Q") for ndim in range(MAX_NDIM + 1))
# Dtype id -> name, and bytes of a value, or -1 for dtypes whose size is not a multiple of the number of values.
_KINDS: dict[int, tuple[str, int]] = {
    key: (row.name, row.block_bytes if row.kind == "plain" else -1)
    for key in range(256)
    if (row := dtype_by_apr_id(key)) is not None
}
# The first edition of the container gave BF16 another id.
_FIRST_EDITION_KINDS = {**_KINDS, 2: ("BF16", 2)}


@dataclass
class Index:
    """A checked index.

    Attributes:
        tensors: in index order, duplicates included, offsets from the start of the file.
        dtype_ids: as stored, one an entry.
        end: where the last entry ends in the file.
        blobs_end: end of the last blob; data_end: the same with its padding, at least the data offset.
        is_aligned: whether every blob starts at a multiple of 64.
        stored_shapes: position -> shape in the index, where a true dtype replaced it.
    """

    tensors: list[Tensor]
    dtype_ids: list[int]
    end: int
    blobs_end: int
    data_end: int
    is_aligned: bool
    stored_shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def blob_order(self) -> list[int]:
        """Index positions in the order of their blobs; a zero-size tensor stands before the blob it shares a
        start with.
        """
        tensors = self.tensors
        return sorted(range(len(tensors)), key=lambda i: (tensors[i].offset, tensors[i].n_bytes > 0, i))


def read_index(
    source: Source, count: int, index_offset: int, data_offset: int, *, first_edition: bool
) -> Index:
    """Reads and checks `count` entries between the two offsets of the file.

    Raises CorruptError (unsorted, unknown dtype, size that does not fit the shape, overlapping blobs),
    TruncatedError (entry or blob beyond its bounds), LimitError (too many entries or dims).
    """
    room = data_offset - index_offset
    if count * MIN_ENTRY_BYTES > room:
        raise LimitError(
            f"the header declares {count} tensors, but the index has room for {room // MIN_ENTRY_BYTES}",
            offset=8,
        )
    data = source.read(index_offset, min(room, count * _MAX_ENTRY_BYTES))
    kinds = _FIRST_EDITION_KINDS if first_edition else _KINDS
    file_size = source.size
    tensors: list[Tensor] = []
    dtype_ids: list[int] = []
    pos = blobs_end = starts = 0
    previous = b""
    in_order = True
    # The hot loop of opening a file: plain arithmetic here, whatever needs a closer look in functions.
    for _ in range(count):
        start = pos
        try:
            pos = start + 2 + (data[start] | data[start + 1] << 8)
            raw_name = data[start + 2 : pos]
            dtype_id = data[pos]
            ndim = data[pos + 1]
            if ndim > MAX_NDIM:
                _fail_ndim(raw_name, ndim, index_offset + pos + 1)
            fields = _TAILS[ndim].unpack_from(data, pos + 2)
        except (IndexError, struct.error):
            _fail_bounds(data, start, index_offset)
        pos += 18 + 8 * ndim
        name = raw_name.decode("utf-8", "surrogateescape")
        if dtype_id not in kinds:
            raise CorruptError(f"unknown dtype id {dtype_id}", tensor=name, offset=index_offset + start)
        dtype, value_bytes = kinds[dtype_id]
        if raw_name < previous and _lossy(raw_name) < _lossy(previous):
            raise CorruptError(
                "the tensor index is not sorted by name", tensor=name, offset=index_offset + start
            )
        previous = raw_name
        dims, size = fields[:ndim], fields[-1]
        if value_bytes * prod(dims) != size:
            _check_size(DTYPES[dtype], dims, size, name, index_offset + start)
        offset = fields[ndim] + data_offset
        starts |= offset
        end = offset + size
        if end > file_size:
            _fail_extent(name, offset, end, file_size)
        if offset < blobs_end:
            in_order = False
        blobs_end = end if end > blobs_end else blobs_end
        dtype_ids.append(dtype_id)
        tensors.append(Tensor(name, dtype, dims, offset, size, source))
    if not in_order:
        _check_overlaps(tensors)
    data_end = data_offset + max(0, -(-(blobs_end - data_offset) // ALIGNMENT) * ALIGNMENT)
    is_aligned = starts % ALIGNMENT == 0
    return Index(tensors, dtype_ids, index_offset + pos, blobs_end, data_end, is_aligned)


def _lossy(raw_name: bytes) -> str:
    """A name as the reference compares it; a name cut inside a character can move by it."""
    return raw_name.decode("utf-8", "replace")


def _fail_ndim(raw_name: bytes, ndim: int, offset: int) -> NoReturn:
    name = raw_name.decode("utf-8", "surrogateescape")
    raise LimitError(f"{ndim} dimensions, more than {MAX_NDIM}", tensor=name, offset=offset)


def _fail_bounds(data: bytes, start: int, index_offset: int) -> NoReturn:
    left = len(data) - start
    raise CorruptError(
        f"an index entry runs past the {left} bytes that are left of the index",
        offset=index_offset + start,
        hint="the file is damaged: fetch it again",
    )


def _fail_extent(name: str, offset: int, end: int, file_size: int) -> NoReturn:
    raise TruncatedError(
        f"the data needs bytes {offset} to {end}, but the file has {file_size}",
        tensor=name,
        hint="the file is cut short or damaged: fetch it again",
    )


def _check_size(row: Dtype, dims: tuple[int, ...], size: int, name: str, offset: int) -> None:
    if not _size_fits(row, dims, size):
        raise CorruptError(
            f"{size} bytes do not hold {row.name} values of shape {list(dims)}", tensor=name, offset=offset
        )


def _size_fits(row: Dtype, dims: tuple[int, ...], size: int) -> bool:
    """Whether `size` bytes can hold the shape.

    With 8 dims the writer may have dropped further ones: then any multiple will do, nothing too. K-quants
    may pad each row to whole blocks.
    """
    n = prod(dims)
    dropped = len(dims) == MAX_NDIM
    if n == 0 or size == 0:
        return size == 0 and (n == 0 or dropped)
    if row.name == "AprQ8":
        return size == 4 + n or (dropped and size > 4 and (size - 4) % n == 0)
    flat = -(-n // row.block) * row.block_bytes
    if size == flat:
        return True
    if row.block > 1 and row.kind == "ggml" and dims:
        padded = prod(dims[:-1]) * -(-dims[-1] // row.block) * row.block_bytes
        if size == padded:
            return True
    return dropped and size > flat and size % row.block_bytes == 0 and (row.block > 1 or size % flat == 0)


def _check_overlaps(tensors: list[Tensor]) -> None:
    """Tensors may share all their bytes or none; zero-size ones lie anywhere."""
    spans = sorted((t.offset, t.offset + t.n_bytes, i) for i, t in enumerate(tensors) if t.n_bytes)
    last_start = last_end = -1
    for start, end, i in spans:
        if start < last_end and (start, end) != (last_start, last_end):
            raise CorruptError(
                "the data overlaps that of another tensor", tensor=tensors[i].name, offset=start
            )
        last_start, last_end = start, max(end, last_end)


def apply_true_dtypes(index: Index, overrides: Mapping[str, object]) -> list[str]:
    """Gives tensors stored as U8 rows the dtype and shape that the metadata names; returns warnings.

    `overrides` is {name: {"dtype": "Q4_1", "shape": [...]}}. Entries for tensors that are gone or no longer
    U8 are stale and only warned about. Raises CorruptError where the stored size contradicts an entry,
    UnsupportedError for an unknown dtype.
    """
    applied: set[str] = set()
    for position, tensor in enumerate(index.tensors):
        if tensor.dtype != "U8" or tensor.name not in overrides:
            continue
        row, shape = _parse_override(tensor.name, overrides[tensor.name])
        try:
            fits = row.n_bytes(shape) == tensor.n_bytes
        except AprError:
            fits = False
        if not fits:
            raise CorruptError(
                f"{tensor.n_bytes} bytes do not hold {row.name} {list(shape)}", tensor=tensor.name
            )
        index.stored_shapes[position] = tensor.shape
        tensor.dtype, tensor.shape = row.name, shape
        applied.add(tensor.name)
    stale = sorted(overrides.keys() - applied)[:8]
    return [f"the true dtype of {name!r} is stale: no U8 tensor of that name" for name in stale]


def _parse_override(name: str, entry: object) -> tuple[Dtype, tuple[int, ...]]:
    known: dict[str, object] = entry if isinstance(entry, dict) else {}
    shape, dtype = known.get("shape", ()), known.get("dtype")
    if not isinstance(dtype, str) or not _is_shape(shape):
        raise CorruptError('a true dtype is not of the form {"dtype": NAME, "shape": [...]}', tensor=name)
    row = DTYPES.get(dtype)
    if row is None:
        raise UnsupportedError(
            f"unknown true dtype {dtype!r}", tensor=name, hint="a newer version may read this file"
        )
    return row, tuple(shape)


def _is_shape(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > MAX_NDIM:
        return False
    for dim in value:  # noqa: SIM110  (every tensor comes by here: a generator takes three times as long)
        if type(dim) is not int or dim < 0:
            return False
    return True
