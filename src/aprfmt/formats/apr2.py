"""APR v2: 64-byte header, JSON metadata, binary tensor index, blobs on 64-byte boundaries, CRC-32 footer.

    0    4  magic `APR\\0`            24   8  tensor index offset
    4    2  version major, minor     32   8  data offset
    6    2  flags                    40   4  CRC-32 of the other 60 bytes
    8    4  tensor count             44  20  reserved
    12   8  metadata offset          all little-endian
    20   4  metadata size

An entry of the index, sorted by name: u16 name length, name, u8 dtype id, u8 ndim, ndim x u64 dims (outermost
first), u64 offset from the data section, u64 size in bytes.

The reader trusts nothing: every offset, size and count is checked before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from aprfmt.codecs.dtypes import DTYPES, DTYPES_BY_APR_ID, Dtype
from aprfmt.errors import (
    AprError,
    ChecksumError,
    CorruptError,
    LimitError,
    TruncatedError,
    UnknownFormatError,
    UnsupportedError,
)
from aprfmt.formats import apr_metadata
from aprfmt.io import jsonx
from aprfmt.io.crc import combine, crc32_of, crc32_of_range
from aprfmt.io.source import Source
from aprfmt.light_dataclass import light_dataclass
from aprfmt.limits import MAX_HEADER_BYTES, MAX_METADATA_BYTES, MAX_NDIM, MAX_TENSORS
from aprfmt.model import Model, Tensor
from aprfmt.text import plural

if TYPE_CHECKING:
    from aprfmt.arch.hyperparams import Hyperparams
    from aprfmt.formats.out_tensor import OutTensor
    from aprfmt.tokenizer.model import Tokenizer

MAGIC = b"APR\0"
LEGACY_MAGICS = (b"APR2", b"APRN")
HEADER_BYTES = 64

FLAGS: dict[str, int] = {
    "lz4_compressed": 0x0001, "zstd_compressed": 0x0002, "encrypted": 0x0004, "signed": 0x0008, "sharded": 0x0010,
    "quantized": 0x0020, "has_filterbank": 0x0040, "has_model_card": 0x0080, "streaming": 0x0100, "has_vocab": 0x0200,
    "layout_row_major": 0x0400, "layout_column_major": 0x0800,
}  # fmt: skip
"""Header flags by name; higher bits have no meaning and are kept."""

# Metadata up to this size is parsed on opening, so that damage is reported at once.
_EAGER_METADATA_BYTES = 64 << 10
HEADER = struct.Struct("<4sBBHIQIQQI20s")
# Enough for the true dtypes of a thousand tensors.
_TAIL_BYTES = 128 << 10
_U8 = DTYPES["U8"].apr_id


ALIGNMENT = 64
MIN_ENTRY_BYTES = 20
_MAX_ENTRY_BYTES = 2 + 0xFFFF + 2 + 8 * MAX_NDIM + 16

# dims, offset and size of an entry, by ndim.
_TAILS = tuple(struct.Struct(f"<{ndim + 2}Q") for ndim in range(MAX_NDIM + 1))
# Dtype id -> name, and bytes per value, or -1 if the size is not a multiple of the number of values.
_KINDS: dict[int, tuple[str, int]] = {
    key: (row.name, row.block_bytes if row.kind == "plain" else -1)
    for key in range(256)
    if (row := DTYPES_BY_APR_ID.get(key)) is not None
}
# The first edition of the container used another id for BF16.
_FIRST_EDITION_KINDS = {**_KINDS, 2: ("BF16", 2)}


def is_file_blob(tensor: Tensor | OutTensor) -> bool:
    """Whether an index entry is a carried file of the `.apr`."""
    return tensor.dtype == "U8" and len(tensor.shape) == 1 and tensor.name.startswith(apr_metadata.FILES_PREFIX)


@light_dataclass
class Index:
    """A validated index.

    Attributes:
        tensors: in index order, duplicates included, offsets from the start of the file.
        dtype_ids: as stored, one per entry.
        end: where the last entry ends in the file.
        blobs_end: end of the last blob; data_end: the same with its padding, at least the data offset.
        is_aligned: whether every blob starts at a multiple of 64.
        stored_shapes: position -> shape in the index, if a true dtype replaced it.
        joined_order: for an index joined from shards, the positions in the order of their blobs, shard after shard.
    """

    tensors: list[Tensor]
    dtype_ids: list[int]
    end: int
    blobs_end: int
    data_end: int
    is_aligned: bool
    stored_shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    joined_order: list[int] | None = None

    def model_tensors(self) -> list[Tensor]:
        """The entries that are tensors of the model, not files."""
        return [tensor for tensor in self.tensors if not is_file_blob(tensor)]

    def files(self) -> list[Tensor]:
        """The entries that are files (see FILES_PREFIX)."""
        return [tensor for tensor in self.tensors if is_file_blob(tensor)]

    def blob_order(self) -> list[int]:
        """Index positions in the order of their blobs; a zero-size tensor precedes the blob at the same offset."""
        tensors = self.tensors
        if self.joined_order is not None:
            return self.joined_order
        return sorted(range(len(tensors)), key=lambda i: (tensors[i].offset, tensors[i].n_bytes > 0, i))


@light_dataclass(frozen=True, slots=True)
class Header:
    """The 64-byte header as stored, offsets from the start of the file; `crc_ok`: whether its checksum matches."""

    magic: bytes
    version: tuple[int, int]
    flags: int
    tensor_count: int
    metadata_offset: int
    metadata_size: int
    tensor_index_offset: int
    data_offset: int
    checksum: int
    reserved: bytes
    crc_ok: bool


@light_dataclass
class Apr2Native:
    """What only an APR v2 file has, for writers of the same format.

    Attributes:
        source: the file, or the image unpacked from a legacy wrapper.
        header: as stored.
        index: the validated index: dtype ids and shapes as stored, order of the blobs, end of the data.
    """

    source: Source
    header: Header
    index: Index

    def metadata_bytes(self) -> bytes:
        """The metadata section as stored, without padding."""
        return self.source.read(self.header.metadata_offset, self.header.metadata_size)

    @cached_property
    def metadata(self) -> apr_metadata.AprMetadata:
        """The metadata, parsed on first use. Raises CorruptError."""
        try:
            return apr_metadata.parse(self.metadata_bytes())
        except AprError as error:
            if error.offset is not None:
                error.offset += self.header.metadata_offset
            error.path = error.path or self.source.path
            raise

    def checksum(self) -> dict[str, str]:
        """State of the header and footer checksums; the first call reads the whole file.

        The header was checked on opening. The footer is "ok" if the CRC-32 follows the last padded blob or is the last
        four bytes of the file; "absent" if the file ends with the last padded blob and nothing in it says that a footer
        was written; else "bad".
        """
        return {"header": "ok", "footer": self._footer}

    @cached_property
    def _footer(self) -> str:
        last, data_end = self.source.size - 4, self.index.data_end
        if last < data_end:
            return "absent" if self.cut is None else "bad"
        crc = done = 0
        for position in sorted({data_end, last}):
            crc = combine(crc, crc32_of_range(self.source, done, position), position - done)
            done = position
            if crc == int.from_bytes(self.source.read(position, 4), "little"):
                return "ok"
        return "bad"

    @cached_property
    def cut(self) -> str | None:
        """What is missing at the end of the file, as a sentence; None if a writer may have produced this length."""
        extra = self.source.size - self.index.data_end
        if extra < 0:
            return f"the file is truncated: its padding lacks {plural(-extra, 'byte')}"
        if 0 < extra < 4:
            return f"the file is truncated: its checksum has {plural(extra, 'byte')} instead of 4"
        if extra == 0 and apr_metadata.has_footer(self.metadata):
            return "the file is truncated: the checksum that its metadata declares is missing"
        return None


def native_of(model: Model) -> Apr2Native | None:
    """The native view of a current `.apr` v2, in one file or in shards; None for other formats, also legacy images."""
    return model.native_as(Apr2Native) if model.format == "apr-v2" else None


def open_model(path: Path) -> Model:
    """Opens an APR v2 file. Raises NotFoundError, CorruptError, UnsupportedError."""
    source = Source.open(path)
    try:
        return open_source(source, path)
    except BaseException:
        source.close()
        raise


def open_source(source: Source, path: Path, *, format: str = "apr-v2", label: str = "APR v2") -> Model:
    """Opens a v2 image; legacy magics are accepted only with another `format`. On error the caller closes `source`."""
    try:
        header = read_header(source, legacy=format != "apr-v2")
        index = read_index(
            source,
            header.tensor_count,
            header.tensor_index_offset,
            header.data_offset,
            first_edition=header.magic != MAGIC,
        )
        _check_sections(header, index)
        native = Apr2Native(source, header, index)
        warnings = _geometry_warnings(native)
        if header.metadata_size <= _EAGER_METADATA_BYTES:
            _ = native.metadata
        if _U8 in index.dtype_ids:
            warnings += apply_true_dtypes(index, _true_dtypes(native))
    except AprError as error:
        error.path = error.path or str(path)
        raise
    return Model(
        path=path, format=format, convention="apr", label=label, version=f"{header.version[0]}.{header.version[1]}",
        sources=[source], tensors=index.model_tensors(), files=index.files(), load_metadata=lambda: native.metadata,
        load_tokenizer=load_tokenizer, load_hparams=load_hparams, checksum=native.checksum,
        flags={name: bool(header.flags & bit) for name, bit in FLAGS.items()}, warnings=warnings, cut=native.cut,
        native=native,
    )  # fmt: skip


def parse_header(source: Source) -> Header | None:
    """Parses the first 64 bytes without checks; None if there are fewer."""
    if source.size < HEADER_BYTES:
        return None
    raw = source.read(0, HEADER_BYTES)
    magic, major, minor, *fields = HEADER.unpack(raw)
    return Header(magic, (major, minor), *(*fields, crc32_of(raw[:40], raw[44:]) == fields[-2]))


def read_header(source: Source, *, legacy: bool = False) -> Header:
    """Reads the header and checks it against itself and the file size.

    Raises TruncatedError, UnknownFormatError (magic), ChecksumError, UnsupportedError (column-major, encrypted),
    CorruptError (sections outside the file), LimitError (metadata size).
    """
    header = parse_header(source)
    if header is None:
        raise TruncatedError(f"the file has {source.size} bytes, fewer than the header's {HEADER_BYTES}", offset=0)
    if header.magic != MAGIC and not (legacy and header.magic in LEGACY_MAGICS):
        raise UnknownFormatError(f"not an APR v2 file: magic is {header.magic.hex()}", offset=0)
    if not header.crc_ok:
        raise ChecksumError("header checksum mismatch", offset=40)
    if header.flags & FLAGS["layout_column_major"]:
        raise UnsupportedError("column-major tensors are not supported", offset=6, hint="import it again")
    if header.flags & FLAGS["encrypted"]:
        raise UnsupportedError("the file is encrypted", offset=6)
    n_bytes = header.metadata_size
    source.check(header.metadata_offset, n_bytes, "the metadata")
    if n_bytes > MAX_METADATA_BYTES:
        raise LimitError(f"the metadata has {n_bytes} bytes; the limit is {MAX_METADATA_BYTES}", offset=20)
    source.check(header.data_offset, 0, "the data section")
    in_order = HEADER_BYTES <= header.tensor_index_offset <= header.data_offset
    if not in_order or header.metadata_offset < HEADER_BYTES:
        raise CorruptError("the sections of the file overlap", offset=12)
    count, room = header.tensor_count, header.data_offset - header.tensor_index_offset
    if count > MAX_TENSORS or room > MAX_HEADER_BYTES:
        limits = f"the limits are {MAX_TENSORS} and {MAX_HEADER_BYTES}"
        raise LimitError(f"an index of {count} tensors in {room} bytes; {limits}", offset=8)
    return header


def _check_sections(header: Header, index: Index) -> None:
    """The metadata must not overlap the index entries or the blobs."""
    start, end = header.metadata_offset, header.metadata_offset + header.metadata_size
    for low, high in ((header.tensor_index_offset, index.end), (header.data_offset, index.blobs_end)):
        if low < high and start < high and low < end:
            raise CorruptError("the metadata overlaps another section", offset=start)


def _geometry_warnings(native: Apr2Native) -> list[str]:
    index = native.index
    warnings = [] if index.is_aligned else ["tensor data is not aligned to 64 bytes"]
    extra = native.source.size - index.data_end
    if native.cut is not None:
        warnings.append(native.cut)
    elif extra == 0:
        warnings.append("the file has no checksum: damage to it cannot be detected")
    elif extra != 4:
        warnings.append(f"expected a 4-byte checksum after the data, found {extra} bytes")
    return warnings


def _true_dtypes(native: Apr2Native) -> dict[str, object]:
    """The value of the true-dtypes key, without parsing a large section: our writer stores it last."""
    key = apr_metadata.TRUE_DTYPES_KEY
    value: object = None
    if native.header.metadata_size <= _EAGER_METADATA_BYTES:
        value = native.metadata.get(key)
    else:
        start, raw = -1, b""
        for n_bytes in (min(_TAIL_BYTES, native.header.metadata_size), native.header.metadata_size):
            end = native.header.metadata_offset + native.header.metadata_size
            raw = native.source.read(end - n_bytes, n_bytes)
            # A quote inside a JSON string is escaped, so this is a key, though perhaps of a nested object:
            # then the tail does not end where the section ends and is not valid JSON.
            start = raw.rfind(f',"{key}":'.encode())
            if start >= 0:
                break
        if start >= 0:
            try:
                tail = jsonx.loads(b"{" + raw[start + 1 :])
                value = tail[key] if isinstance(tail, dict) else None
            except CorruptError:
                value = native.metadata.get(key)
        elif key.encode() in raw:
            value = native.metadata.get(key)
    if value is not None and not isinstance(value, dict):
        raise CorruptError(f"metadata field {key!r} must be an object")
    return value or {}


def load_tokenizer(model: Model) -> Tokenizer | None:
    """The tokenizer in the metadata of `model`, for the Model of any v2 image."""
    from aprfmt.tokenizer.apr import from_metadata

    return from_metadata(model.metadata)


def load_hparams(model: Model) -> Hyperparams:
    """The hyper-parameters in the metadata of `model`, for the Model of any v2 image."""
    from aprfmt.arch.hparams import from_apr

    return from_apr(model.metadata)


# --- the index ---


def read_index(source: Source, count: int, index_offset: int, data_offset: int, *, first_edition: bool) -> Index:
    """Reads and checks `count` entries between the two offsets of the file.

    Raises CorruptError (unsorted, unknown dtype, size and shape contradict each other, overlapping blobs),
    TruncatedError (entry or blob out of bounds), LimitError (too many entries or dims).
    """
    room = data_offset - index_offset
    if count * MIN_ENTRY_BYTES > room:
        raise LimitError(
            f"the header declares {count} tensors, but the index has space for {room // MIN_ENTRY_BYTES}", offset=8
        )
    data = source.read(index_offset, min(room, count * _MAX_ENTRY_BYTES))
    kinds = _FIRST_EDITION_KINDS if first_edition else _KINDS
    file_size = source.size
    tensors: list[Tensor] = []
    dtype_ids: list[int] = []
    pos = blobs_end = starts = 0
    previous = b""
    in_order = True
    # The hot loop of opening a file: plain arithmetic inline, rare cases in functions.
    for _ in range(count):
        start = pos
        try:
            pos = start + 2 + (data[start] | data[start + 1] << 8)
            raw_name = data[start + 2 : pos]
            dtype_id = data[pos]
            ndim = data[pos + 1]
            if ndim > MAX_NDIM:
                name, at = raw_name.decode("utf-8", "surrogateescape"), index_offset + pos + 1
                raise LimitError(f"{ndim} dimensions; the limit is {MAX_NDIM}", tensor=name, offset=at)
            fields = _TAILS[ndim].unpack_from(data, pos + 2)
        except (IndexError, struct.error):
            raise CorruptError(
                f"an index entry extends past the remaining {len(data) - start} bytes of the index",
                offset=index_offset + start,
                hint="the file is damaged: copy or download it again",
            ) from None
        pos += 18 + 8 * ndim
        name = raw_name.decode("utf-8", "surrogateescape")
        if dtype_id not in kinds:
            raise CorruptError(f"unknown dtype id {dtype_id}", tensor=name, offset=index_offset + start)
        dtype, value_bytes = kinds[dtype_id]
        if raw_name < previous and _lossy(raw_name) < _lossy(previous):
            raise CorruptError("the tensor index is not sorted by name", tensor=name, offset=index_offset + start)
        previous = raw_name
        dims, size = fields[:ndim], fields[-1]
        if value_bytes * prod(dims) != size and not _size_fits(DTYPES[dtype], dims, size):
            raise CorruptError(
                f"{size} bytes do not match {dtype} values of shape {list(dims)}",
                tensor=name,
                offset=index_offset + start,
            )
        offset = fields[ndim] + data_offset
        starts |= offset
        end = offset + size
        if end > file_size:
            raise TruncatedError(
                f"the data spans bytes {offset} to {end}, but the file has {file_size} bytes", tensor=name
            )
        if offset < blobs_end:
            in_order = False
        blobs_end = end if end > blobs_end else blobs_end
        dtype_ids.append(dtype_id)
        tensors.append(Tensor(name, dtype, dims, offset, size, source))
    if not in_order:
        check_overlaps(tensors)
    data_end = data_offset + max(0, -(-(blobs_end - data_offset) // ALIGNMENT) * ALIGNMENT)
    is_aligned = starts % ALIGNMENT == 0
    return Index(tensors, dtype_ids, index_offset + pos, blobs_end, data_end, is_aligned)


def _lossy(raw_name: bytes) -> str:
    """A name as the reference compares it; a name cut inside a character can sort differently."""
    return raw_name.decode("utf-8", "replace")


def _size_fits(row: Dtype, dims: tuple[int, ...], size: int) -> bool:
    """Whether `size` bytes can hold the shape.

    With 8 dims the writer may have dropped further ones, so any multiple is accepted, zero too. K-quants may pad each
    row to whole blocks.
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


def check_overlaps(tensors: list[Tensor], path: Path | None = None) -> None:
    """Checks that tensors share all their bytes or none; zero-size ones may be anywhere. Raises CorruptError."""
    spans = sorted((t.offset, t.offset + t.n_bytes, i) for i, t in enumerate(tensors) if t.n_bytes)
    last_start = last_end = -1
    for start, end, i in spans:
        if start < last_end and (start, end) != (last_start, last_end):
            raise CorruptError("the data overlaps another tensor", tensor=tensors[i].name, offset=start)
        last_start, last_end = start, max(end, last_end)


def apply_true_dtypes(index: Index, overrides: Mapping[str, object]) -> list[str]:
    """Gives tensors stored as U8 rows the dtype and shape from the metadata; returns warnings.

    `overrides` is {name: {"dtype": "Q4_1", "shape": [...]}}. Entries for tensors that are missing or no longer U8 are
    stale: they only cause warnings. Raises CorruptError if the stored size contradicts an entry, UnsupportedError for
    an unknown dtype.
    """
    applied: set[str] = set()
    for position, tensor in enumerate(index.tensors):
        if tensor.dtype != "U8" or tensor.name not in overrides:
            continue
        row, shape = _true_dtype_of(tensor.name, overrides[tensor.name])
        try:
            fits = row.n_bytes(shape) == tensor.n_bytes
        except AprError:
            fits = False
        if not fits:
            raise CorruptError(f"{tensor.n_bytes} bytes do not match {row.name} {list(shape)}", tensor=tensor.name)
        index.stored_shapes[position] = tensor.shape
        tensor.dtype, tensor.shape = row.name, shape
        applied.add(tensor.name)
    stale = sorted(overrides.keys() - applied)[:8]
    return [f"the true dtype of {name!r} is stale: no U8 tensor has this name" for name in stale]


def _true_dtype_of(name: str, entry: object) -> tuple[Dtype, tuple[int, ...]]:
    """The dtype and shape that the metadata states for a tensor stored as U8. Raises CorruptError, UnsupportedError."""
    known: dict[str, object] = entry if isinstance(entry, dict) else {}
    shape, dtype = known.get("shape", ()), known.get("dtype")
    if not isinstance(dtype, str) or not _is_shape(shape):
        raise CorruptError('a true dtype is not of the form {"dtype": NAME, "shape": [...]}', tensor=name)
    row = DTYPES.get(dtype)
    if row is None:
        raise UnsupportedError(
            f"unknown true dtype {dtype!r}", tensor=name, hint="a newer version of apr may read this file"
        )
    return row, tuple(shape)


def _is_shape(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > MAX_NDIM:
        return False
    for dim in value:  # noqa: SIM110  (every tensor comes by here: a generator takes three times as long)
        if type(dim) is not int or dim < 0:
            return False
    return True
