"""Which of the many forms that begin with `APR` a file is. Every rule looks at bytes, none at the suffix.

APR\\0  v2, when the header's CRC fits; else a compression wrapper, realizar converter output, a damaged v2
APRN   v1; with major version 2 the v2 layout of an early writer
APR2   v2 layout of the first edition, a compression wrapper, or the compute crate's tuner samples
APR1   JSON-index container, or the compute crate's tuner model
"""

from __future__ import annotations

import struct
from pathlib import Path

from aprfmt.errors import AprError, CorruptError, TruncatedError, UnknownFormatError, UnsupportedError
from aprfmt.formats.apr2 import HEADER_BYTES, Header, parse_header
from aprfmt.io.source import Source

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_WRAPPER_HEAD = 9
_MIN_APR1 = 24
_ROW_MAJOR, LZ4, ZSTD = 0x0400, 0x0001, 0x0002


def wrapper_algorithm(source: Source) -> int | None:
    """0 none, 1 LZ4 or 2 zstd where the file is a wrapper (magic, algorithm, u32 length, data), else None.

    The first bytes of the data decide, because the magic and the version bytes collide with those of v2.
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


def has_json_index(source: Source, header: Header) -> bool:
    """Whether JSON stands where a v2 file has its binary index: the output of realizar's GGUF converter."""
    start, end = header.tensor_index_offset, header.data_offset
    if header.flags or not HEADER_BYTES <= header.metadata_offset < start < end <= source.size:
        return False
    last = source.read(max(start, end - 64), min(64, end - start)).rstrip(b"\0 \r\n")[-1:]
    return source.read(header.metadata_offset, 1) == b"{" and source.read(start, 1) == b"[" and last == b"]"


def compressed_body(source: Source, header: Header) -> str | None:
    """How everything after the header is compressed: "lz4", "zstd", None where it is not."""
    if not header.flags & (LZ4 | ZSTD) or _is_plain(source, header):
        return None
    if header.flags & ZSTD and source.read(HEADER_BYTES, min(4, source.size - HEADER_BYTES)) == _ZSTD_MAGIC:
        return "zstd"
    return "lz4" if header.flags & LZ4 else None


def _is_plain(source: Source, header: Header) -> bool:
    """Whether the metadata section looks like a JSON object, which compressed bytes at its place do not."""
    start, n_bytes = header.metadata_offset, header.metadata_size
    if n_bytes < 2 or start + n_bytes > source.size:
        return False
    ends = min(n_bytes, 256)
    head, tail = source.read(start, ends).lstrip(), source.read(start + n_bytes - ends, ends).rstrip()
    return head[:1] == b"{" and head[1:].lstrip()[:1] in (b'"', b"}") and tail[-1:] == b"}"


def detect_apr(source: Source, path: Path) -> str:
    """ "apr-v2", "apr-v1" or "apr-legacy" for a file that begins with `APR`.

    A damaged v2 or v1 file is still called that: its reader says what is wrong. Raises CorruptError where no
    form fits, UnsupportedError for files that are named so but hold no model, UnknownFormatError for other
    magics.
    """
    rule = _RULES.get(source.read(0, min(4, source.size)))
    if rule is not None:
        return rule(source, path)
    if source.size < 4:
        raise TruncatedError(f"an APR file cut off after {source.size} bytes", path=path, offset=source.size)
    raise UnknownFormatError(
        "begins with APR, but is none of APR\\0, APRN, APR1, APR2", path=path, hint="the file may be damaged"
    )


def _detect_apr0(source: Source, path: Path) -> str:
    header = parse_header(source)
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
        f"APR v1 container of version {major}.{minor}; 1.0 is the last", path=path, offset=4
    )


def _detect_apr2(source: Source, path: Path) -> str:
    if wrapper_algorithm(source) is not None:
        return "apr-legacy"
    _refuse_tuner(source, path, b"[", "training samples")
    if _is_early_v2(source, path):
        return "apr-legacy"
    raise _no_form("APR2", path, "an early v2 header, a compression wrapper")


def _detect_apr1(source: Source, path: Path) -> str:
    _refuse_tuner(source, path, b"{", "a tuner model")
    if source.size >= 9:
        n_bytes = int.from_bytes(source.read(4, 4), "little")
        if source.read(8, 1) in b"{ \t\r\n" and n_bytes <= source.size - 8:
            return "apr-legacy"
    raise _no_form("APR1", path, "a JSON-index container")


def _is_early_v2(source: Source, path: Path) -> bool:
    """Whether a v2 header with a good CRC stands under an old magic.

    The row-major flag came after those magics were given up: a header with it is a current file with a wrong
    magic.
    """
    header = parse_header(source)
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


def _no_form(magic: str, path: Path, expected: str) -> AprError:
    return CorruptError(f"begins with {magic}, but what follows is not {expected}", path=path, offset=4)


_RULES = {b"APR\0": _detect_apr0, b"APRN": _detect_aprn, b"APR2": _detect_apr2, b"APR1": _detect_apr1}
