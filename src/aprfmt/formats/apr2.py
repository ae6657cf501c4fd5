"""APR v2: 64-byte header, JSON metadata, binary tensor index, blobs on 64-byte boundaries, CRC-32 footer.

    0    4  magic `APR\\0`            24   8  tensor index offset
    4    2  version major, minor     32   8  data offset
    6    2  flags                    40   4  CRC-32 of the other 60 bytes
    8    4  tensor count             44  20  reserved
    12   8  metadata offset          all little-endian
    20   4  metadata size

The reader trusts nothing: every offset, size and count is checked before it is used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.codecs.dtypes import DTYPES
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
from aprfmt.formats.apr_index import Index, apply_true_dtypes, read_index
from aprfmt.io import jsonx
from aprfmt.io.crc import combine, crc32_of, crc32_of_range
from aprfmt.io.source import Source
from aprfmt.limits import MAX_METADATA_BYTES
from aprfmt.model import Model

if TYPE_CHECKING:
    from aprfmt.arch.hyperparams import Hyperparams
    from aprfmt.tokenizer.model import Tokenizer

MAGIC = b"APR\0"
LEGACY_MAGICS = (b"APR2", b"APRN")
HEADER_BYTES = 64

FLAGS: dict[str, int] = {
    "lz4_compressed": 0x0001,
    "zstd_compressed": 0x0002,
    "encrypted": 0x0004,
    "signed": 0x0008,
    "sharded": 0x0010,
    "quantized": 0x0020,
    "has_filterbank": 0x0040,
    "has_model_card": 0x0080,
    "streaming": 0x0100,
    "has_vocab": 0x0200,
    "layout_row_major": 0x0400,
    "layout_column_major": 0x0800,
}
"""Header flags by name; the bits above have no meaning and are kept."""

# Up to this size a metadata section is parsed on opening, so that a broken one is refused at once.
_EAGER_METADATA_BYTES = 64 << 10
HEADER = struct.Struct("<4sBBHIQIQQI20s")
# Where the true dtypes of a thousand tensors fit.
_TAIL_BYTES = 128 << 10
_U8 = DTYPES["U8"].apr_id


@dataclass(frozen=True, slots=True)
class Header:
    """The 64-byte header as stored; offsets from the start of the file."""

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


@dataclass
class Apr2Native:
    """What only an APR v2 file has, for writers of the same format.

    Attributes:
        source: the file, or the image unpacked from a legacy wrapper.
        header: as stored.
        index: the checked index: dtype ids and shapes as stored, order of the blobs, end of the data.
    """

    source: Source
    header: Header
    index: Index
    _footer: str | None = field(default=None, repr=False)

    @property
    def flags(self) -> int:
        """The header's flags."""
        return self.header.flags

    def metadata_bytes(self) -> bytes:
        """The metadata section as stored, without padding."""
        return self.source.read(self.header.metadata_offset, self.header.metadata_size)

    def metadata_tail(self, n_bytes: int) -> bytes:
        """Its last bytes."""
        return self.source.read(self.header.metadata_offset + self.header.metadata_size - n_bytes, n_bytes)

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
        """Header and footer state; the first call reads the whole file.

        The footer is "ok" where the CRC-32 stands right after the last padded blob or in the last four bytes
        of the file, "absent" where less than four bytes follow the blobs, else "bad".
        """
        if self._footer is None:
            self._footer = self._check_footer()
        return {"header": "ok", "footer": self._footer}

    def _check_footer(self) -> str:
        last = self.source.size - 4
        if last < self.index.data_end:
            return "absent"
        crc = done = 0
        for position in sorted({self.index.data_end, last}):
            crc = combine(crc, crc32_of_range(self.source, done, position), position - done)
            done = position
            if crc == int.from_bytes(self.source.read(position, 4), "little"):
                return "ok"
        return "bad"


def native_of(model: Model) -> Apr2Native | None:
    """The native view of a current `.apr` v2, in one file or in shards; None for all else, legacy images too."""
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
    """Opens a v2 image; legacy magics are accepted only under another `format`. The caller closes `source`
    on error.
    """
    try:
        return _open(source, path, format, label)
    except AprError as error:
        error.path = error.path or str(path)
        raise


def _open(source: Source, path: Path, format: str, label: str) -> Model:
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
    warnings = _geometry_warnings(source.size, index)
    if header.metadata_size <= _EAGER_METADATA_BYTES:
        _ = native.metadata
    if _U8 in index.dtype_ids:
        warnings += apply_true_dtypes(index, _true_dtypes(native))
    return Model(
        path=path,
        format=format,
        convention="apr",
        label=label,
        version=f"{header.version[0]}.{header.version[1]}",
        sources=[source],
        tensors=index.tensors,
        load_metadata=lambda: native.metadata,
        load_tokenizer=load_tokenizer,
        load_hparams=load_hparams,
        checksum=native.checksum,
        flags={name: bool(header.flags & bit) for name, bit in FLAGS.items()},
        warnings=warnings,
        native=native,
    )


def read_header(source: Source, *, legacy: bool = False) -> Header:
    """The header, checked in itself and against the file's size.

    Raises TruncatedError, UnknownFormatError (magic), ChecksumError, UnsupportedError (column-major,
    encrypted), CorruptError (sections outside the file), LimitError (metadata size).
    """
    if source.size < HEADER_BYTES:
        raise TruncatedError(
            f"the file has {source.size} bytes, the header alone takes {HEADER_BYTES}", offset=0
        )
    raw = source.read(0, HEADER_BYTES)
    magic, major, minor, flags, count, meta_offset, meta_size, index_offset, data_offset, crc, rest = (
        HEADER.unpack(raw)
    )
    if magic != MAGIC and not (legacy and magic in LEGACY_MAGICS):
        raise UnknownFormatError(f"not an APR v2 file: it begins with {magic.hex()}", offset=0)
    if crc32_of(raw[:40], raw[44:]) != crc:
        raise ChecksumError(
            "the header's checksum is wrong", offset=40, hint="the file is damaged: fetch it again"
        )
    if flags & FLAGS["layout_column_major"]:
        raise UnsupportedError(
            "the tensors are column-major, which no reader supports", offset=6, hint="import it again"
        )
    if flags & FLAGS["encrypted"]:
        raise UnsupportedError("the file is encrypted", offset=6)
    source.check(meta_offset, meta_size, "the metadata")
    if meta_size > MAX_METADATA_BYTES:
        raise LimitError(f"the metadata takes {meta_size} bytes, more than {MAX_METADATA_BYTES}", offset=20)
    source.check(data_offset, 0, "the data section")
    if not HEADER_BYTES <= index_offset <= data_offset or meta_offset < HEADER_BYTES:
        raise CorruptError("the sections of the file overlap", offset=12)
    return Header(
        magic, (major, minor), flags, count, meta_offset, meta_size, index_offset, data_offset, crc, rest
    )


def _check_sections(header: Header, index: Index) -> None:
    """The metadata must lie apart from the index entries and from the blobs."""
    start, end = header.metadata_offset, header.metadata_offset + header.metadata_size
    for low, high in ((header.tensor_index_offset, index.end), (header.data_offset, index.blobs_end)):
        if low < high and start < high and low < end:
            raise CorruptError("the metadata overlaps another section", offset=start)


def _geometry_warnings(size: int, index: Index) -> list[str]:
    warnings = [] if index.is_aligned else ["tensor data does not start at multiples of 64 bytes"]
    extra = size - index.data_end
    if extra < 0:
        warnings.append(f"the last {-extra} bytes of padding are missing")
    elif extra == 0:
        warnings.append("the file has no checksum footer")
    elif extra != 4:
        warnings.append(f"{extra} bytes follow the data where a checksum of 4 is due")
    return warnings


def _true_dtypes(native: Apr2Native) -> dict[str, object]:
    """The value of the true-dtypes key, without parsing a large section: our writer puts it last."""
    key = apr_metadata.TRUE_DTYPES_KEY
    value: object = None
    if native.header.metadata_size <= _EAGER_METADATA_BYTES:
        value = native.metadata.get(key)
    else:
        start, raw = -1, b""
        for n_bytes in (min(_TAIL_BYTES, native.header.metadata_size), native.header.metadata_size):
            raw = native.metadata_tail(n_bytes)
            # A quote inside a JSON string is escaped, so this is a key, though perhaps one of a nested object:
            # then the tail does not end where the section ends and is not JSON text.
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
