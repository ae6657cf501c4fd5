"""CRC-32 (IEEE 802.3, as in zlib): isal if installed, else zlib; same values.

A file that is read anyway is not read again for its checksum: a `ReadChecksum` computes the CRC of each range while it
is in the cache, and `crc32_of_range` reads only the gaps.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from aprfmt.io.source import Buffer, Source
from aprfmt.io.system import n_processors

crc32: Callable[..., int] = zlib.crc32
"""crc32(data, value=0): the checksum of `data`, continued from `value`."""
try:
    from isal import isal_zlib

    crc32 = isal_zlib.crc32
except ImportError:
    pass

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # the polynomial 1: the lowest power is the highest bit

_PART_BYTES = 8 << 20
_BUFFER_BYTES = 512 << 10  # fits the cache
_LEAST_BYTES = 16 << 10  # rereading fewer bytes is as fast as recording them
_MOST_PIECES = 4096
_JOINED_BYTES = 16 << 20  # a range that extends beyond the requested one is read again
_MOST_THREADS = 4  # two or three saturate the memory bandwidth


def crc32_of(*parts: Buffer) -> int:
    """CRC-32 of the concatenated parts."""
    value = 0
    for part in parts:
        value = crc32(part, value)
    return value


_last = threading.local()


def crc32_after(value: int, data: Buffer) -> int:
    """crc32(data, value), reusing the CRC if this thread has just computed it for the same bytes."""
    if type(data) is not bytes or len(data) < _LEAST_BYTES:
        return crc32(data, value)
    if getattr(_last, "data", None) is not data:  # keeps the object alive, so that its id cannot be reused
        _last.data, _last.crc = data, crc32(data)
    return combine(value, _last.crc, len(data))


class CrcRange(NamedTuple):
    """The CRC-32 of the bytes [start, end) of a file."""

    start: int
    end: int
    crc: int


class ReadChecksum:
    """CRC-32 of the ranges of a file that were read. Thread-safe.

    Reads under _LEAST_BYTES are not recorded; of overlapping reads only the first counts.
    """

    def __init__(self) -> None:
        self._pieces: list[CrcRange] = []
        self._most = _MOST_PIECES
        self._lock = threading.Lock()

    def add(self, start: int, data: Buffer) -> None:
        """Records that `data` was read at `start`."""
        if len(data) < _LEAST_BYTES:
            return
        piece = CrcRange(start, start + len(data), crc32_after(0, data))
        with self._lock:
            self._pieces.append(piece)
            if len(self._pieces) >= self._most:
                self._pieces = _joined(self._pieces, _JOINED_BYTES)
                self._most = max(_MOST_PIECES, 2 * len(self._pieces))

    def close(self) -> None:
        """Stops recording."""

    def inside(self, start: int, end: int) -> list[CrcRange]:
        """The recorded ranges inside [start, end), in order, without overlaps."""
        with self._lock:
            return [p for p in _joined(self._pieces, 0) if start <= p.start and p.end <= end]


def _joined(pieces: list[CrcRange], most_bytes: float = math.inf) -> list[CrcRange]:
    """Sorts the ranges and joins neighbours up to `most_bytes`; drops ranges that overlap an earlier one."""
    out: list[CrcRange] = []
    for piece in sorted(pieces):
        last = out[-1] if out else None
        if last is not None and piece.start < last.end:
            continue
        if last is not None and piece.start == last.end and piece.end - last.start <= most_bytes:
            piece = CrcRange(last.start, piece.end, combine(last.crc, piece.crc, piece.end - piece.start))
            out.pop()
        out.append(piece)
    return out


def crc32_of_range(source: Source, start: int, end: int) -> int:
    """CRC-32 of the bytes [start, end) of a file, computed by several threads. Raises TruncatedError, StorageError.

    Ranges that the source has recorded are not read again. The rest is read through small buffers instead of a mapping:
    resident memory stays small, and a truncated file raises an error instead of a signal.
    """
    known = source.record.inside(start, end) if isinstance(source.record, ReadChecksum) else []
    bounds = [CrcRange(start, start, 0), *known, CrcRange(end, end, 0)]
    parts = [
        range(at, min(at + _PART_BYTES, after.start))
        for before, after in pairwise(bounds)
        for at in range(before.end, after.start, _PART_BYTES)
    ]
    n_threads = max(1, min(_MOST_THREADS, n_processors(), len(parts)))
    values, errors = [0] * len(parts), list[BaseException]()

    def work(first: int) -> None:
        """Processes every n-th part through one buffer that stays in the cache; an error stops all threads."""
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, end - start)))
        try:
            for number in range(first, len(parts), n_threads):
                part = parts[number]
                for at in range(part.start, part.stop, _BUFFER_BYTES):
                    if errors:
                        return
                    view = buffer[: part.stop - at]
                    source.read_into(at, view)
                    values[number] = crc32(view, values[number])
        except BaseException as error:  # Ctrl-C too: stop the other threads
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,), name="apr-crc") for n in range(1, n_threads)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    read = [CrcRange(part.start, part.stop, crc) for part, crc in zip(parts, values, strict=True)]
    whole = _joined([*known, *read])
    return whole[0].crc if whole else 0


def combine(first: int, second: int, n_bytes: int) -> int:
    """CRC-32 of two concatenated parts from their CRCs; the second part has `n_bytes` bytes.

    A CRC is a remainder modulo a polynomial over GF(2); appending n bytes multiplies it by x^(8 n).
    """
    return _product(_shift(n_bytes), first) ^ second


def _product(a: int, b: int) -> int:
    """a·b modulo the CRC's polynomial, bits reflected."""
    out = 0
    while a:
        if a & _ONE:
            out ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return out


@lru_cache(maxsize=4096)
def _shift(n_bytes: int) -> int:
    """x^(8 n) modulo the CRC polynomial, by repeated squaring."""
    out, square = _ONE, _ONE >> 8
    while n_bytes:
        if n_bytes & 1:
            out = _product(square, out)
        square = _product(square, square)
        n_bytes >>= 1
    return out
