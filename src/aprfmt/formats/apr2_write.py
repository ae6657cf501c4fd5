"""Writes APR v2: the layout of a file, `save_file` and `load_file`.

Index entries are sorted by their full UTF-8 names; the blobs too, or in the given order (streaming form). Names are cut
to 256 bytes and shapes to 8 dims, as in the reference writer. Every section and blob is padded to 64 bytes with zeros.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aprfmt.codecs.dtypes import DTYPES, Dtype, find_dtype
from aprfmt.errors import AprError, LimitError, RefusedError, UsageError
from aprfmt.formats import apr_metadata, path_text
from aprfmt.formats.apr2 import ALIGNMENT, FLAGS, HEADER, HEADER_BYTES, MAGIC, Apr2Native
from aprfmt.formats.hf_files import WEIGHT_SUFFIXES
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.crc import crc32_of
from aprfmt.io.pipe import FileLayout, Literal, Segment, Stream, WriteOptions, Zeros, source_jobs, write_file
from aprfmt.io.sink import check_target
from aprfmt.io.source import Buffer, padding
from aprfmt.limits import MAX_METADATA_BYTES, MAX_NDIM
from aprfmt.types import Array, PathLike, Shape

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from aprfmt.model import Model, Tensor

MAX_WRITTEN_NAME_BYTES = 256

_ROW_MAJOR = FLAGS["layout_row_major"]
_COMPRESSED = FLAGS["lz4_compressed"] | FLAGS["zstd_compressed"]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor with already encoded bytes.

    Attributes:
        dtype: any name in codecs.dtypes, in any spelling (`Q4_K`, `q4k`).
        shape: row-major, outermost dimension first.
        data: the stored bytes.
    """

    dtype: str
    shape: Sequence[int]
    data: Buffer


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes
    dtype_id: int
    shape: tuple[int, ...]
    blob: Stream


def stored_form(dtype: str, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """(index dtype id, shape in the index) of a tensor.

    A dtype without an id of its own is stored as U8 rows: [product of the outer dims, bytes of a row], one row for a
    tensor of at most one dimension. Raises UsageError unless blocks divide the rows.
    """
    row = DTYPES[dtype]
    if row.apr_id is not None:
        return row.apr_id, shape
    n_bytes = row.n_bytes(shape)
    n_rows = math.prod(shape[:-1])
    u8 = DTYPES["U8"].apr_id
    assert u8 is not None
    return u8, (n_rows, n_bytes // n_rows if n_rows else 0)


def true_dtypes(tensors: Iterable[OutTensor]) -> dict[str, dict[str, object]]:
    """The metadata value with dtype and shape of every tensor that is stored as U8 rows; {} if none is.

    Raises RefusedError for such a tensor whose name the container cuts inside a character, since no JSON key can
    express it, UsageError for one of more than 8 dims.
    """
    found: dict[str, dict[str, object]] = {}
    for tensor in tensors:
        if DTYPES[tensor.dtype].apr_id is None:
            if len(tensor.shape) > MAX_NDIM:
                raise UsageError(
                    f"a {tensor.dtype} tensor has {len(tensor.shape)} dimensions; the limit is {MAX_NDIM}",
                    tensor=tensor.name,
                )
            try:
                name = _name_bytes(tensor.name)[:MAX_WRITTEN_NAME_BYTES].decode()
            except UnicodeDecodeError:
                raise RefusedError(
                    f"a {tensor.dtype} tensor needs a name of at most {MAX_WRITTEN_NAME_BYTES} bytes",
                    tensor=tensor.name,
                    hint="rename it, or store it as F32",
                ) from None
            found[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
    return found


def layout(metadata: bytes, tensors: Sequence[OutTensor], *, flags: int = 0, streaming: bool = False) -> list[Segment]:
    """The file without its CRC footer, which FileLayout(crc_footer=True) adds.

    Args:
        metadata: the JSON text, with TRUE_DTYPES_KEY where `true_dtypes(tensors)` has entries.
        tensors: duplicate names are allowed and keep this order.
        flags: header flags; LAYOUT_ROW_MAJOR is always added.
        streaming: blobs in the order given instead of the order of the index.
    """
    entries = [_entry(tensor) for tensor in tensors]
    order = sorted(range(len(entries)), key=lambda i: entries[i].name)
    return _assemble(metadata, entries, order, range(len(entries)) if streaming else order, flags=flags)


def layout_from_model(model: Model, metadata: bytes | None = None, flags: int | None = None) -> list[Segment]:
    """Lays out an opened v2 file again, without its footer: unchanged, it yields the same bytes, gaps included.

    With other metadata or flags the sections are laid out anew; the order of index and blobs, the stored dtype ids and
    the version are kept. Files with an older magic get the current one, decompressed images lose their compression
    flags.

    Args:
        model: of format "apr-v2", or a legacy form with a v2 image.
        metadata: the JSON text, None to keep it.
        flags: header flags, None to keep them; LAYOUT_ROW_MAJOR is added when anything is laid out anew.
    """
    native = model.native_as(Apr2Native)
    if native is None:
        raise UsageError(f"not an APR v2 image but {model.label}", path=model.path)
    header, source = native.header, native.source
    stored = native.metadata_bytes()
    is_same = metadata in (None, stored) and flags in (None, header.flags)
    if is_same and model.format == "apr-v2" and type(native) is Apr2Native:  # not joined shards
        end = min(native.index.data_end, source.size)
        tail: list[Segment] = [Zeros(native.index.data_end - end)] if end < native.index.data_end else []
        return [Stream(end, lambda: source_jobs(source, 0, end)), *tail]
    flags = header.flags if flags is None else flags
    if model.format != "apr-v2":
        flags &= ~_COMPRESSED
    entries = [_stored_entry(native, i, tensor) for i, tensor in enumerate(native.index.tensors)]
    return _assemble(
        stored if metadata is None else metadata, entries, range(len(entries)), native.index.blob_order(), flags=flags,
        version=header.version,
    )  # fmt: skip


def rewrite(
    model: Model,
    path: PathLike,
    *,
    metadata: bytes | None = None,
    flags: int | None = None,
    force: bool = False,
    accept_damage: bool = False,
) -> None:
    """Writes an opened v2 file to `path` with a correct footer; see layout_from_model. Refuses its own source.

    A file with a wrong footer raises ChecksumError, unless `accept_damage` is set.
    """
    check_target(path, [source.path for source in model.sources], force)
    model.record_reads()

    def confirm(output: str) -> None:
        model.check_unchanged()
        if not accept_damage:
            model.check_intact()

    _write(layout_from_model(model, metadata, flags), path, WriteOptions(force, confirm=confirm))


def _stored_entry(native: Apr2Native, position: int, tensor: Tensor) -> _Entry:
    source, offset, n_bytes = tensor.source, tensor.offset, tensor.n_bytes
    shape = native.index.stored_shapes.get(position, tensor.shape)
    dtype_id = native.index.dtype_ids[position]
    if native.header.magic != MAGIC and DTYPES[tensor.dtype].apr_id is not None:
        dtype_id = DTYPES[tensor.dtype].apr_id or 0
    stream = Stream(n_bytes, lambda: source_jobs(source, offset, n_bytes), tensor.name)
    return _Entry(_name_bytes(tensor.name), dtype_id, shape, stream)


def _entry(tensor: OutTensor) -> _Entry:
    dtype_id, shape = stored_form(tensor.dtype, tensor.shape)
    if any(not 0 <= dim < 1 << 64 for dim in shape):
        raise UsageError(f"the shape {list(shape)} exceeds the container's limits", tensor=tensor.name)
    return _Entry(_name_bytes(tensor.name), dtype_id, shape, tensor.stream())


def _name_bytes(name: str) -> bytes:
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise UsageError("a tensor name must be valid Unicode", tensor=ascii(name)) from None


def _assemble(
    metadata: bytes,
    entries: Sequence[_Entry],
    index_order: Sequence[int],
    blob_order: Sequence[int],
    *,
    flags: int,
    version: tuple[int, int] = (2, 0),
) -> list[Segment]:
    if len(metadata) > MAX_METADATA_BYTES:
        raise LimitError(f"the metadata has {len(metadata)} bytes; the limit is {MAX_METADATA_BYTES}")
    if len(entries) >= 1 << 32:
        raise LimitError(f"{len(entries)} tensors exceed the header's counter")
    offsets = [0] * len(entries)
    blobs: list[Segment] = []
    position = 0
    for i in blob_order:
        blob = entries[i].blob
        offsets[i] = position
        gap = padding(blob.n_bytes, ALIGNMENT)
        blobs += [blob, Zeros(gap)] if gap else [blob] if blob.n_bytes else []
        position += blob.n_bytes + gap
    index = b"".join(_index_entry(entries[i], offsets[i]) for i in index_order)
    index_offset = HEADER_BYTES + len(metadata) + padding(len(metadata), ALIGNMENT)
    data_offset = index_offset + len(index) + padding(len(index), ALIGNMENT)
    if not 0 <= flags <= 0xFFFF or flags & FLAGS["layout_column_major"]:
        raise UsageError(f"unsupported flags {flags:#x}")
    sections = (HEADER_BYTES, len(metadata), index_offset, data_offset)
    fields = (MAGIC, *version, flags | _ROW_MAJOR, len(entries), *sections)
    blank = HEADER.pack(*fields, 0, bytes(20))
    header = HEADER.pack(*fields, crc32_of(blank[:40], blank[44:]), bytes(20))
    head = b"".join((header, metadata.ljust(index_offset - HEADER_BYTES, b"\0"), index))
    return [Literal(head.ljust(data_offset, b"\0")), *blobs]


def _index_entry(entry: _Entry, offset: int) -> bytes:
    name = entry.name[:MAX_WRITTEN_NAME_BYTES]
    dims = entry.shape[:MAX_NDIM]
    return struct.pack(
        f"<H{len(name)}sBB{len(dims) + 2}Q", len(name), name, entry.dtype_id, len(dims), *dims, offset,
        entry.blob.n_bytes,
    )  # fmt: skip


def save_file(
    tensors: Mapping[str, ArrayLike | RawTensor] | Iterable[tuple[str, ArrayLike | RawTensor]],
    path: PathLike,
    metadata: Mapping[str, object] | None = None,
    flags: int | None = None,
    streaming: bool = False,
    *,
    generation: str = "Current",
    force: bool = False,
) -> None:
    """Writes an APR v2 file atomically.

    Args:
        tensors: by name, or (name, tensor) pairs, which may repeat a name. Arrays keep their dtype; dtypes without an
            id in the container are stored as U8 rows with their true dtype in the metadata.
        path: the output, usually `*.apr`.
        metadata: typed fields and further keys; an AprMetadata is written with its original bytes.
        flags: header flags; LAYOUT_ROW_MAJOR is always added.
        streaming: blobs in the given order instead of sorted by name.
        generation: form of the metadata, a key of apr_metadata.GENERATIONS.
        force: replace an existing file.

    Raises:
        UsageError: a suffix of another format, a value or dtype that the container cannot store, or bytes that do not
            match dtype and shape.
        ExistsError: the output exists, without `force`.
        StorageError: the operating system refused.
    """
    check_suffix(path, "save_file", "aprfmt.convert_model writes other formats")
    try:
        pairs = [(name, value) for name, value in (tensors.items() if isinstance(tensors, Mapping) else tensors)]
    except (TypeError, ValueError):
        raise UsageError("tensors must be a mapping or pairs of a name and a tensor") from None
    if not isinstance(metadata, Mapping | None) or not isinstance(flags, int | None):
        raise UsageError("metadata must be a mapping and flags an integer")
    outs = [_out_tensor(name, tensor) for name, tensor in pairs]
    values = metadata or {}
    if found := true_dtypes(outs):
        values = {**values, apr_metadata.TRUE_DTYPES_KEY: found}
    raw = apr_metadata.dump(values, generation)
    segments = layout(raw, outs, flags=flags or 0, streaming=streaming)
    check_target(path, [], force)
    _write(segments, path, WriteOptions(force))


def check_suffix(path: PathLike, command: str, hint: str) -> None:
    """Refuses the suffix of another format for the `.apr` that `command` writes. Raises UsageError."""
    suffix = os.path.splitext(path_text(path, "path"))[1].lower()
    if suffix in WEIGHT_SUFFIXES and suffix != ".apr":
        raise UsageError(f"{command} writes .apr files, but the output is named {suffix}", path=path, hint=hint)


def _write(segments: Sequence[Segment], path: PathLike, options: WriteOptions) -> None:
    name = os.fspath(path)
    write_file(name, FileLayout(os.path.basename(name), segments, crc_footer=True), options)


def _out_tensor(name: str, tensor: ArrayLike | RawTensor) -> OutTensor:
    if not isinstance(name, str):
        raise UsageError(f"the name of a tensor must be a string, not {name!r:.80}")
    if isinstance(tensor, RawTensor):
        row = find_dtype(tensor.dtype)
        data = memoryview(tensor.data).cast("B")
        shape = tuple(tensor.shape)
        _check_data(name, row, shape, len(data))
    else:
        row, shape, data = _from_array(name, tensor)
    return OutTensor(name, row.name, shape, len(data), lambda: (data,))


def _check_data(name: str, row: Dtype, shape: tuple[int, ...], n_bytes: int) -> None:
    if not all(isinstance(dim, int) and dim >= 0 for dim in shape):
        raise UsageError(f"invalid shape {list(shape)}", tensor=name)
    try:
        expected = {row.n_bytes(shape)}
    except AprError:
        if row.apr_id is None or not shape:
            raise
        # A K-quant in the container may pad each row to whole blocks, or only the last block.
        n_rows = math.prod(shape[:-1])
        expected = {n_rows * -(-shape[-1] // row.block) * row.block_bytes}
        expected.add(-(-n_rows * shape[-1] // row.block) * row.block_bytes)
    if n_bytes not in expected:
        want = " or ".join(str(n) for n in sorted(expected))
        raise UsageError(f"{n_bytes} bytes given, {row.name} {list(shape)} needs {want}", tensor=name)


def _from_array(name: str, values: object) -> tuple[Dtype, Shape, memoryview]:
    import numpy as np

    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise UsageError(f"not an array: {error}", tensor=name) from error
    plain = {np.dtype(row.numpy): row for row in reversed(DTYPES.values()) if row.kind == "plain" and row.numpy}
    plain[np.dtype(bool)] = DTYPES["BOOL"]
    plain[np.dtype("u1")], plain[np.dtype("<u2")] = DTYPES["U8"], DTYPES["U16"]
    row = plain.get(array.dtype.newbyteorder("<"))
    if row is None:
        raise UsageError(f"the container cannot store arrays of dtype {array.dtype}", tensor=name)
    contiguous = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return row, tuple(array.shape), contiguous.reshape(-1).view(np.uint8).data.toreadonly()


def load_file(path: PathLike) -> dict[str, Array]:
    """The decoded tensors of a model file by name; the first of a repeated name. Raises AprError."""
    from aprfmt.formats import open as open_file

    with open_file(path) as model:
        return {name: tensor.numpy() for name, tensor in model.tensors.items()}
