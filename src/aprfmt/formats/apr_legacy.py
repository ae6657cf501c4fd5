"""Detects which of the forms that begin with `APR` a file has, and reads the obsolete ones.

APR1                     magic, u32 length, JSON metadata, u32 count, u32 length, JSON index, blobs, CRC-32
APR2 or APR\\0 wrapper    magic, u8 algorithm, u32 length, a whole APR1 file as it is, LZ4 or zstd
APR2 or APRN, v2 layout  the v2 container of its first weeks, under another magic
compressed v2            v2 header, then the rest of the file as one LZ4 block or zstd frame
converter output         v2-style header, JSON metadata, JSON index with one entry, JSON payload, no footer

Every rule uses bytes, none the suffix:

APR\\0  v2, when the header's CRC fits; else a compression wrapper, realizar converter output, a damaged v2
APRN   v1; with major version 2 the v2 layout of an early writer
APR2   v2 layout of the first edition, a compression wrapper, or the compute crate's tuner samples
APR1   JSON-index container, or the compute crate's tuner model
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from aprfmt.codecs.dtypes import find_dtype
from aprfmt.errors import (
    AprError,
    CorruptError,
    LimitError,
    TruncatedError,
    UnknownFormatError,
    UnsupportedError,
    UsageError,
)
from aprfmt.formats import apr2
from aprfmt.io import jsonx
from aprfmt.io.compress import Packed, unlz4, unzstd
from aprfmt.io.crc import combine, crc32_of, crc32_of_range
from aprfmt.io.source import Source
from aprfmt.limits import (
    MAX_COMPRESSED_BYTES,
    MAX_HEADER_BYTES,
    MAX_METADATA_BYTES,
    MAX_NAME_BYTES,
    MAX_NDIM,
    MAX_UNCOMPRESSED_BYTES,
)
from aprfmt.model import Model, Tensor

T = TypeVar("T")

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_WRAPPER_HEAD = 9
_MIN_APR1 = 24
_ROW_MAJOR, LZ4, ZSTD = 0x0400, 0x0001, 0x0002
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
        if has_json_index(source, header):
            return _open_json_index(source, path, header)
        if (method := compressed_body(source, header)) is not None:
            return _open_compressed(source, path, method)
        if header.magic != b"APR\0":
            return _open_v2(source, path, f"{header.magic.decode()} (v2 layout)")
    elif header is not None and has_json_index(source, header):
        return _open_json_index(source, path, header)
    algorithm = wrapper_algorithm(source)
    if algorithm is None:
        raise CorruptError("not a legacy form of APR", path=path, offset=0)
    return _open_wrapper(source, path, algorithm)


def _open_v2(source: Source, path: Path, label: str) -> Model:
    return apr2.open_source(source, path, format="apr-legacy", label=label)


def _open_compressed(source: Source, path: Path, method: str) -> Model:
    head = source.read(0, apr2.HEADER_BYTES)
    image = {"lz4": unlz4, "zstd": unzstd}[method](_compressed(source, apr2.HEADER_BYTES), head=head)
    source.unpacked.append(image)
    model = _open_v2(image, path, f"APR v2 ({method} body)")
    of_image = model.checksum
    model.sources = (source,)
    model.checksum = lambda: {**of_image(), "footer": "ok"} if _plain_footer_fits(image) else of_image()
    return model


def _compressed(source: Source, start: int) -> Packed:
    """Decompresses the file from `start` on. Raises LimitError."""
    n_bytes = source.size - start
    if n_bytes > MAX_COMPRESSED_BYTES:
        raise LimitError(
            f"{n_bytes} bytes of compressed data; the limit is {MAX_COMPRESSED_BYTES}", path=source.path, offset=start
        )
    return Packed(source, start, n_bytes)


def _plain_footer_fits(image: Source) -> bool:
    """Whether the footer is that of the uncompressed file whose header lacked the flag."""
    head = bytearray(image.read(0, apr2.HEADER_BYTES))
    flags = int.from_bytes(head[6:8], "little") & ~(LZ4 | ZSTD)
    head[6:8] = flags.to_bytes(2, "little")
    head[40:44] = crc32_of(head[:40], head[44:]).to_bytes(4, "little")
    last = image.size - _FOOTER
    if last < apr2.HEADER_BYTES:
        return False
    body = crc32_of_range(image, apr2.HEADER_BYTES, last)
    computed = combine(crc32_of(head), body, last - apr2.HEADER_BYTES)
    return computed == int.from_bytes(image.read(last, _FOOTER), "little")


def _open_wrapper(source: Source, path: Path, algorithm: int) -> Model:
    length = int.from_bytes(source.read(5, 4), "little")
    label = f"APR1 in a wrapper ({_ALGORITHMS[algorithm]})"
    if algorithm == 0:
        return _open_apr1(source, path, source, 9, label)
    cap = min(length, MAX_UNCOMPRESSED_BYTES)
    image = (unlz4 if algorithm == 1 else unzstd)(_compressed(source, _WRAPPER_HEAD), cap)
    source.unpacked.append(image)
    if image.size != length:
        raise CorruptError(
            f"the wrapper declares {length} bytes, but its data decompresses to {image.size}", path=path, offset=5
        )
    return _open_apr1(image, path, source, 0, label)


def _open_apr1(image: Source, path: Path, file: Source, base: int, label: str) -> Model:
    """Opens an APR1 container that begins at `base` of `image`; `file` is the file on disk."""
    if image.read(base, min(4, image.size - base)) != b"APR1":
        raise CorruptError("the wrapper contains no APR1 file", path=path, offset=base)
    end = image.size - _FOOTER
    metadata_raw, at = _section(image, base + 4, end, MAX_METADATA_BYTES, "metadata")
    count = int.from_bytes(image.read(at, 4), "little")
    index_raw, data = _section(image, at + 4, end, MAX_HEADER_BYTES, "index")
    metadata = _json(metadata_raw, dict, "metadata", path, base + 8)
    entries = _json(index_raw, list, "index", path, at + 8)
    if len(entries) != count:
        raise CorruptError(f"{count} tensors declared, but {len(entries)} in the index", path=path, offset=at)
    tensors = [_entry(entry, image, data, end, path) for entry in entries]
    apr2.check_overlaps(tensors, path)
    return _model(
        path, file, label, tensors=tensors, metadata=metadata, checksum=lambda: _check_footer(image, base), version="1"
    )


def _section(image: Source, at: int, end: int, limit: int, what: str) -> tuple[bytes, int]:
    """The bytes of a section after its u32 length, and the position of its end."""
    length = int.from_bytes(image.read(at, 4), "little")
    if length > limit:
        raise LimitError(f"the {what} has {length} bytes; the limit is {limit}", path=image.path, offset=at)
    if at + 4 + length > end:
        raise TruncatedError(
            f"the {what} of {length} bytes extends past the end of the file", path=image.path, offset=at
        )
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
    """One tensor of an APR1 index; its offset is relative to `data`, its bytes end before `end`."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise CorruptError("an index entry has no name", path=path)
    name, shape = entry["name"], entry.get("shape")
    offset, n_bytes = _count(entry.get("offset")), _count(entry.get("size"))
    if offset < 0 or n_bytes < 0 or not isinstance(shape, list) or any(_count(dim) < 0 for dim in shape):
        raise CorruptError("an index entry lacks a shape, an offset or a size", path=path, tensor=name)
    if len(shape) > MAX_NDIM or len(name.encode()) > MAX_NAME_BYTES:
        raise LimitError("too many dimensions, or the name is too long", path=path, tensor=name)
    try:
        row, dims = find_dtype(str(entry.get("dtype"))), tuple(shape)
    except UsageError as error:
        raise UnsupportedError(f"unknown dtype {entry.get('dtype')!r}", path=path, tensor=name) from error
    if data + offset + n_bytes > end:
        raise TruncatedError("the data extends past the end of the file", path=path, tensor=name, offset=data + offset)
    try:
        expected = row.n_bytes(dims)
    except AprError as error:  # a row that blocks do not divide, or dims whose product exceeds 2^63
        raise CorruptError(error.message, path=path, tensor=name) from error
    if expected != n_bytes:
        raise CorruptError(f"{row.name} {shape} needs {expected} bytes, not {n_bytes}", path=path, tensor=name)
    return Tensor(name, row.name, dims, data + offset, n_bytes, image)


def _count(value: object) -> int:
    """`value` if it is a non-negative integer, else -1."""
    return value if type(value) is int and value >= 0 else -1


def _check_footer(image: Source, base: int) -> dict[str, str]:
    """The reference never checked this checksum, so a file with a wrong one opens with a warning."""
    crc = crc32_of_range(image, base, image.size - _FOOTER)
    stored = int.from_bytes(image.read(image.size - _FOOTER, _FOOTER), "little")
    return {"header": "none", "footer": "ok" if stored == crc else "bad"}


def _open_json_index(source: Source, path: Path, header: apr2.Header) -> Model:
    """The payload is one JSON text, exposed as a U8 tensor."""
    limits = ((header.metadata_size, "metadata"), (header.data_offset - header.tensor_index_offset, "index"))
    for n_bytes, what in limits:
        if n_bytes > MAX_METADATA_BYTES:
            raise LimitError(f"the {what} has {n_bytes} bytes; the limit is {MAX_METADATA_BYTES}", path=path)
    metadata = _json(source.read(header.metadata_offset, header.metadata_size), dict, "metadata", path, 64)
    raw = source.read(header.tensor_index_offset, header.data_offset - header.tensor_index_offset).rstrip(b"\0")
    entries = _json(raw, list, "index", path, header.tensor_index_offset)
    tensors = []
    for entry in entries:
        entry = entry if isinstance(entry, dict) else {}
        offset = _count(entry.get("offset", 0))
        n_bytes = _count(entry.get("size", source.size - header.data_offset))
        if offset < 0 or n_bytes < 0 or not isinstance(entry.get("name"), str):
            raise CorruptError(
                "an index entry lacks a name, an offset or a size", path=path, offset=header.tensor_index_offset
            )
        start = header.data_offset + offset
        source.check(start, n_bytes, "the data", entry["name"])
        tensors.append(Tensor(entry["name"], "U8", (n_bytes,), start, n_bytes, source))
    checksum = {"header": "ok" if header.crc_ok else "bad", "footer": "absent"}
    label = "APR of realizar's GGUF converter"
    version = "{}.{}".format(*header.version)
    model = _model(path, source, label, tensors=tensors, metadata=metadata, checksum=lambda: checksum, version=version)
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
        path=path, format="apr-legacy", convention="apr", label=label, version=version, sources=[file], tensors=tensors,
        load_metadata=lambda: metadata, load_tokenizer=apr2.load_tokenizer, load_hparams=apr2.load_hparams,
        checksum=checksum,
    )  # fmt: skip


# --- detection ---


def wrapper_algorithm(source: Source) -> int | None:
    """0 none, 1 LZ4 or 2 zstd if the file is a wrapper (magic, algorithm, u32 length, data), else None.

    The first bytes of the data decide, because magic and version bytes collide with those of v2.
    """
    if source.size < _WRAPPER_HEAD + 4:
        return None
    algorithm, length = struct.unpack("<BI", source.read(4, 5))
    start = source.read(_WRAPPER_HEAD, 4)
    fits = {
        0: start == b"APR1" and length == source.size - _WRAPPER_HEAD,
        1: int.from_bytes(start, "little") == length,
        2: start == _ZSTD_MAGIC,
    }
    return algorithm if length >= _MIN_APR1 and fits.get(algorithm) else None


def has_json_index(source: Source, header: apr2.Header) -> bool:
    """Whether a JSON index replaces the binary index of v2: the output of realizar's GGUF converter."""
    start, end = header.tensor_index_offset, header.data_offset
    if header.flags or not apr2.HEADER_BYTES <= header.metadata_offset < start < end <= source.size:
        return False
    last = source.read(max(start, end - 64), min(64, end - start)).rstrip(b"\0 \r\n")[-1:]
    return source.read(header.metadata_offset, 1) == b"{" and source.read(start, 1) == b"[" and last == b"]"


def compressed_body(source: Source, header: apr2.Header) -> str | None:
    """How everything after the header is compressed: "lz4", "zstd", or None."""
    if not header.flags & (LZ4 | ZSTD) or _is_plain(source, header):
        return None
    if header.flags & ZSTD and source.read(apr2.HEADER_BYTES, min(4, source.size - apr2.HEADER_BYTES)) == _ZSTD_MAGIC:
        return "zstd"
    return "lz4" if header.flags & LZ4 else None


def _is_plain(source: Source, header: apr2.Header) -> bool:
    """Whether the metadata section looks like a JSON object, which compressed bytes do not."""
    start, n_bytes = header.metadata_offset, header.metadata_size
    if n_bytes < 2 or start + n_bytes > source.size:
        return False
    ends = min(n_bytes, 256)
    head, tail = source.read(start, ends).lstrip(), source.read(start + n_bytes - ends, ends).rstrip()
    return head[:1] == b"{" and head[1:].lstrip()[:1] in (b'"', b"}") and tail[-1:] == b"}"


def detect_apr(source: Source, path: Path) -> str:
    """ "apr-v2", "apr-v1" or "apr-legacy" for a file that begins with `APR`.

    A damaged v2 or v1 file keeps its id: its reader reports the damage. Raises CorruptError if nothing matches,
    UnsupportedError for files with this magic that are not models, UnknownFormatError for other magics.
    """
    rule = _RULES.get(source.read(0, min(4, source.size)))
    if rule is not None:
        return rule(source, path)
    if source.size < 4:
        raise TruncatedError(f"an APR file truncated after {source.size} bytes", path=path, offset=source.size)
    raise UnknownFormatError(
        "starts with APR, but is not APR\\0, APRN, APR1 or APR2", path=path, hint="the file may be damaged"
    )


def _detect_apr0(source: Source, path: Path) -> str:
    header = apr2.parse_header(source)
    if header is not None and header.crc_ok:
        return "apr-legacy" if has_json_index(source, header) or compressed_body(source, header) else "apr-v2"
    if wrapper_algorithm(source) is not None or (header is not None and has_json_index(source, header)):
        return "apr-legacy"
    if header is not None and int.from_bytes(source.read(4, 4), "little") <= 1:
        raise UnsupportedError(
            "the private header of realizar's memory-mapped transformer, not an APR container",
            path=path,
            hint="make an .apr of the model's safetensors or GGUF with `apr import`",
        )
    return "apr-v2"


def _detect_aprn(source: Source, path: Path) -> str:
    if source.size < 5 or source.read(4, 1)[0] <= 1:
        return "apr-v1"
    if _is_early_v2(source, path):
        return "apr-legacy"
    major, minor = source.read(4, 2) if source.size > 5 else (source.read(4, 1)[0], 0)
    raise UnsupportedError(
        f"unsupported APR v1 container version {major}.{minor}; the latest is 1.0", path=path, offset=4
    )


def _detect_apr2(source: Source, path: Path) -> str:
    if wrapper_algorithm(source) is not None:
        return "apr-legacy"
    _refuse_tuner(source, path, b"[", "training samples")
    if _is_early_v2(source, path):
        return "apr-legacy"
    problem = "starts with APR2, but is neither an early v2 file nor a compression wrapper"
    raise CorruptError(problem, path=path, offset=4)


def _detect_apr1(source: Source, path: Path) -> str:
    _refuse_tuner(source, path, b"{", "a tuner model")
    if source.size >= 9:
        n_bytes = int.from_bytes(source.read(4, 4), "little")
        if source.read(8, 1) in b"{ \t\r\n" and n_bytes <= source.size - 8:
            return "apr-legacy"
    problem = "starts with APR1, but is not a JSON-index container"
    raise CorruptError(problem, path=path, offset=4)


def _is_early_v2(source: Source, path: Path) -> bool:
    """Whether a v2 header with a valid CRC follows an old magic.

    The row-major flag is newer than those magics: a header with it belongs to a current file with a wrong magic.
    """
    header = apr2.parse_header(source)
    if header is None or not header.crc_ok or header.version != (2, 0):
        return False
    if header.flags & _ROW_MAJOR:
        magic = header.magic.decode()
        raise CorruptError(f"a current v2 header under the old magic {magic}", path=path, offset=0)
    return True


def _refuse_tuner(source: Source, path: Path, opening: bytes, what: str) -> None:
    """The compute crate's caches share the magics: exactly magic, u32 length, JSON, u32 checksum."""
    if source.size < 13:
        return
    n_bytes = int.from_bytes(source.read(4, 4), "little")
    if 8 + n_bytes + 4 == source.size and source.read(8, 1) == opening:
        raise UnsupportedError(
            f"the compute crate's tuner cache ({what}), not a model", path=path, hint="nothing to convert"
        )


_RULES = {b"APR\0": _detect_apr0, b"APRN": _detect_aprn, b"APR2": _detect_apr2, b"APR1": _detect_apr1}
