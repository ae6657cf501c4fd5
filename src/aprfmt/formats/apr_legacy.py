"""Read-only: the forms of `.apr` that nobody writes any more, and realizar's own.

APR1                     magic, u32 length, JSON metadata, u32 count, u32 length, JSON index, blobs, CRC-32
APR2 or APR\\0 wrapper    magic, u8 algorithm, u32 length, a whole APR1 file as it is, LZ4 or zstd
APR2 or APRN, v2 layout  the v2 container of its first weeks, under another magic
compressed v2            v2 header, then the rest of the file as one LZ4 block or zstd frame
converter output         v2-style header, JSON metadata, JSON index with one entry, JSON payload, no footer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from aprfmt.codecs.dtypes import Dtype, find_dtype
from aprfmt.errors import AprError, CorruptError, LimitError, TruncatedError, UnsupportedError, UsageError
from aprfmt.formats import apr2, apr_magic
from aprfmt.io import jsonx
from aprfmt.io.compress import unlz4, unzstd
from aprfmt.io.crc import crc32, crc32_of
from aprfmt.io.pipe import source_chunks
from aprfmt.io.source import Source
from aprfmt.limits import (
    MAX_HEADER_BYTES,
    MAX_METADATA_BYTES,
    MAX_NAME_BYTES,
    MAX_NDIM,
    MAX_UNCOMPRESSED_BYTES,
)
from aprfmt.model import Model, Tensor

T = TypeVar("T")

_FOOTER = 4
_ALGORITHMS = {0: "stored", 1: "LZ4", 2: "zstd"}


def open_model(path: Path) -> Model:
    """Opens any legacy form. Raises CorruptError, UnsupportedError, NotFoundError."""
    source = Source.open(path)
    try:
        return _open(source, path)
    except BaseException:
        source.close()
        raise


def _open(source: Source, path: Path) -> Model:
    if source.read(0, min(4, source.size)) == b"APR1":
        return _open_apr1(source, path, source, 0, "APR1")
    header = apr2.parse_header(source)
    if header is not None and header.crc_ok:
        if apr_magic.has_json_index(source, header):
            return _open_json_index(source, path, header)
        if (method := apr_magic.compressed_body(source, header)) is not None:
            return _open_compressed(source, path, method)
        if header.magic != b"APR\0":
            return _open_v2(source, path, f"{header.magic.decode()} (v2 layout)")
    elif header is not None and apr_magic.has_json_index(source, header):
        return _open_json_index(source, path, header)
    algorithm = apr_magic.wrapper_algorithm(source)
    if algorithm is None:
        raise CorruptError("not a legacy form of APR", path=path, offset=0)
    return _open_wrapper(source, path, algorithm)


def _open_v2(source: Source, path: Path, label: str) -> Model:
    return apr2.open_source(source, path, format="apr-legacy", label=label)


def _open_compressed(source: Source, path: Path, method: str) -> Model:
    body = source.view(apr2.HEADER_BYTES)
    plain = {"lz4": unlz4, "zstd": unzstd}[method](body, source.path)
    image = Source.from_bytes(source.read(0, apr2.HEADER_BYTES) + plain, path)
    model = _open_v2(image, path, f"APR v2 ({method} body)")
    of_image = model.checksum
    model.sources = (source,)
    model.checksum = lambda: {**of_image(), "footer": "ok"} if _plain_footer_fits(image) else of_image()
    return model


def _plain_footer_fits(image: Source) -> bool:
    """Whether the footer is that of the file before it was compressed, when its header lacked the flag."""
    head = bytearray(image.read(0, apr2.HEADER_BYTES))
    flags = int.from_bytes(head[6:8], "little") & ~(apr_magic.LZ4 | apr_magic.ZSTD)
    head[6:8] = flags.to_bytes(2, "little")
    head[40:44] = crc32_of(head[:40], head[44:]).to_bytes(4, "little")
    body = image.view(apr2.HEADER_BYTES)
    return len(body) >= _FOOTER and crc32_of(head, body[:-_FOOTER]) == int.from_bytes(
        body[-_FOOTER:], "little"
    )


def _open_wrapper(source: Source, path: Path, algorithm: int) -> Model:
    length = int.from_bytes(source.read(5, 4), "little")
    label = f"APR1 in a wrapper ({_ALGORITHMS[algorithm]})"
    if algorithm == 0:
        return _open_apr1(source, path, source, 9, label)
    cap = min(length, MAX_UNCOMPRESSED_BYTES)
    plain = (unlz4 if algorithm == 1 else unzstd)(source.view(9), source.path, cap)
    if len(plain) != length:
        raise CorruptError(
            f"the wrapper declares {length} bytes, but its data unpacks to {len(plain)}", path=path, offset=5
        )
    return _open_apr1(Source.from_bytes(plain, path), path, source, 0, label)


def _open_apr1(image: Source, path: Path, file: Source, base: int, label: str) -> Model:
    """An APR1 container that begins at `base` of `image`; `file` is what lies on disk."""
    if image.read(base, min(4, image.size - base)) != b"APR1":
        raise CorruptError("the wrapper holds no APR1 file", path=path, offset=base)
    end = image.size - _FOOTER
    metadata_raw, at = _section(image, base + 4, end, MAX_METADATA_BYTES, "metadata")
    count = int.from_bytes(image.read(at, 4), "little")
    index_raw, data = _section(image, at + 4, end, MAX_HEADER_BYTES, "index")
    metadata = _json(metadata_raw, dict, "metadata", path, base + 8)
    entries = _json(index_raw, list, "index", path, at + 8)
    if len(entries) != count:
        raise CorruptError(f"{count} tensors declared, {len(entries)} in the index", path=path, offset=at)
    tensors = [_entry(entry, image, data, end, path) for entry in entries]
    apr2.check_overlaps(tensors, path)
    return _model(
        path,
        file,
        label,
        tensors=tensors,
        metadata=metadata,
        checksum=lambda: _check_footer(image, base),
        version="1",
    )


def _section(image: Source, at: int, end: int, limit: int, what: str) -> tuple[bytes, int]:
    """The bytes of a section that begins with its u32 length, and where it ends."""
    length = int.from_bytes(image.read(at, 4), "little")
    if length > limit:
        raise LimitError(f"the {what} has {length} bytes; the limit is {limit}", path=image.path, offset=at)
    if at + 4 + length > end:
        raise TruncatedError(f"the {what} of {length} bytes runs past the file", path=image.path, offset=at)
    return image.read(at + 4, length), at + 4 + length


def _json(raw: bytes, kind: type[T], what: str, path: Path, offset: int) -> T:
    try:
        value = jsonx.loads(raw)
    except CorruptError as error:
        error.path, error.offset = str(path), offset + (error.offset or 0)
        raise
    if not isinstance(value, kind):
        raise CorruptError(
            f"the {what} is not a JSON {'object' if kind is dict else 'array'}", path=path, offset=offset
        )
    return value


def _entry(entry: object, image: Source, data: int, end: int, path: Path) -> Tensor:
    """One tensor of an APR1 index; its offset counts from `data`, its bytes end before `end`."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise CorruptError("an index entry has no name", path=path)
    name, shape = entry["name"], entry.get("shape")
    offset, n_bytes = _count(entry.get("offset")), _count(entry.get("size"))
    if offset < 0 or n_bytes < 0 or not isinstance(shape, list) or any(_count(dim) < 0 for dim in shape):
        raise CorruptError("an index entry lacks a shape, an offset or a size", path=path, tensor=name)
    if len(shape) > MAX_NDIM or len(name.encode()) > MAX_NAME_BYTES:
        raise LimitError("too many dimensions or too long a name", path=path, tensor=name)
    row, dims = _dtype(entry.get("dtype"), name, path), tuple(shape)
    if data + offset + n_bytes > end:
        raise TruncatedError(
            "the data runs past the end of the file", path=path, tensor=name, offset=data + offset
        )
    try:
        expected = row.n_bytes(dims)
    except AprError as error:  # a row that blocks do not divide, a product of dims beyond 2^63
        raise CorruptError(error.message, path=path, tensor=name) from error
    if expected != n_bytes:
        raise CorruptError(
            f"{row.name} {shape} takes {expected} bytes, not {n_bytes}", path=path, tensor=name
        )
    return Tensor(name, row.name, dims, data + offset, n_bytes, image)


def _count(value: object) -> int:
    """`value` where it is a non-negative integer, else -1."""
    return value if type(value) is int and value >= 0 else -1


def _dtype(spelling: object, name: str, path: Path) -> Dtype:
    try:
        return find_dtype(str(spelling))
    except UsageError as error:
        raise UnsupportedError(f"unknown dtype {spelling!r}", path=path, tensor=name) from error


def _check_footer(image: Source, base: int) -> dict[str, str]:
    """The reference never compared this checksum, so a wrong one is told and not refused."""
    crc = 0
    for chunk in source_chunks(image, base, image.size - _FOOTER - base):
        crc = crc32(chunk, crc)
    stored = int.from_bytes(image.read(image.size - _FOOTER, _FOOTER), "little")
    return {"header": "none", "footer": "ok" if stored == crc else "bad"}


def _open_json_index(source: Source, path: Path, header: apr2.Header) -> Model:
    """The payload is one JSON text, given as the U8 tensor of its name."""
    limits = ((header.metadata_size, "metadata"), (header.data_offset - header.tensor_index_offset, "index"))
    for n_bytes, what in limits:
        if n_bytes > MAX_METADATA_BYTES:
            raise LimitError(f"the {what} has {n_bytes} bytes; the limit is {MAX_METADATA_BYTES}", path=path)
    metadata = _json(source.read(header.metadata_offset, header.metadata_size), dict, "metadata", path, 64)
    raw = source.read(header.tensor_index_offset, header.data_offset - header.tensor_index_offset).rstrip(
        b"\0"
    )
    entries = _json(raw, list, "index", path, header.tensor_index_offset)
    tensors = []
    for entry in entries:
        entry = entry if isinstance(entry, dict) else {}
        offset = _count(entry.get("offset", 0))
        n_bytes = _count(entry.get("size", source.size - header.data_offset))
        if offset < 0 or n_bytes < 0 or not isinstance(entry.get("name"), str):
            raise CorruptError(
                "an index entry lacks a name, an offset or a size",
                path=path,
                offset=header.tensor_index_offset,
            )
        start = header.data_offset + offset
        source.check(start, n_bytes, "the data", entry["name"])
        tensors.append(Tensor(entry["name"], "U8", (n_bytes,), start, n_bytes, source))
    checksum = {"header": "ok" if header.crc_ok else "bad", "footer": "absent"}
    label = "APR of realizar's GGUF converter"
    version = "{}.{}".format(*header.version)
    model = _model(
        path, source, label, tensors=tensors, metadata=metadata, checksum=lambda: checksum, version=version
    )
    model.warnings.append("the weights are one JSON text: import the original GGUF instead")
    return model


def _model(
    path: Path,
    file: Source,
    label: str,
    *,
    tensors: list[Tensor],
    metadata: Mapping[str, object],
    checksum: Callable[[], dict[str, str]],
    version: str,
) -> Model:
    return Model(
        path=path,
        format="apr-legacy",
        convention="apr",
        label=label,
        version=version,
        sources=[file],
        tensors=tensors,
        load_metadata=lambda: metadata,
        load_tokenizer=apr2.load_tokenizer,
        load_hparams=apr2.load_hparams,
        checksum=checksum,
    )
