"""CRC-32 (IEEE 802.3, the one of zlib): isal when it is installed, else zlib; equal values.

A file that is read anyway is not read once more for its checksum: a `ReadChecksum` takes the CRC of each piece while it
is in the cache, and `crc32_of_range` reads only what is missing between the pieces.
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
_ONE = 1 << 31  # the polynomial 1: the lowest power stands in the highest bit

_PART_BYTES = 8 << 20
_BUFFER_BYTES = 512 << 10  # stays in the cache
_LEAST_BYTES = 16 << 10  # to read fewer bytes again takes no longer than to note them
_MOST_PIECES = 4096
_JOINED_BYTES = 16 << 20  # a piece that reaches beyond a range is read again
_MOST_THREADS = 4  # two or three take all of the memory's speed


def crc32_of(*parts: Buffer) -> int:
    """CRC-32 of the parts laid end to end."""
    value = 0
    for part in parts:
        value = crc32(part, value)
    return value


_last = threading.local()


def crc32_after(value: int, data: Buffer) -> int:
    """crc32(data, value), without a second look at bytes that this thread has just taken it of."""
    if type(data) is not bytes or len(data) < _LEAST_BYTES:
        return crc32(data, value)
    if getattr(_last, "data", None) is not data:  # held, so that nothing else can stand in its place
        _last.data, _last.crc = data, crc32(data)
    return combine(value, _last.crc, len(data))


class CrcRange(NamedTuple):
    """The CRC-32 of the bytes [start, end) of a file."""

    start: int
    end: int
    crc: int


class ReadChecksum:
    """The CRC-32 of what was read of a file, by place. Several threads may add to it.

    Reads under _LEAST_BYTES are not worth their place, and of overlapping ones only the first counts.
    """

    def __init__(self) -> None:
        self._pieces: list[CrcRange] = []
        self._most = _MOST_PIECES
        self._lock = threading.Lock()

    def add(self, start: int, data: Buffer) -> None:
        """Notes that `data` stands at `start`."""
        if len(data) < _LEAST_BYTES:
            return
        piece = CrcRange(start, start + len(data), crc32_after(0, data))
        with self._lock:
            self._pieces.append(piece)
            if len(self._pieces) >= self._most:
                self._pieces = _joined(self._pieces, _JOINED_BYTES)
                self._most = max(_MOST_PIECES, 2 * len(self._pieces))

    def close(self) -> None:
        """Keeps what it has."""

    def inside(self, start: int, end: int) -> list[CrcRange]:
        """The pieces inside [start, end), in order and apart from each other."""
        with self._lock:
            return [p for p in _joined(self._pieces, 0) if start <= p.start and p.end <= end]


def _joined(pieces: list[CrcRange], most_bytes: float = math.inf) -> list[CrcRange]:
    """The same in order, neighbours as one of up to `most_bytes`; what overlaps an earlier piece is left out."""
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
    """CRC-32 of the bytes [start, end) of a file, several parts at a time. Raises TruncatedError, StorageError.

    What the source has a record of is not read again. The rest is read through small buffers instead of mapping the
    file: resident memory stays small, and a file that is cut short meanwhile is an error and no signal.
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
        """Every n-th part, through one buffer that stays in the cache; an error ends all threads."""
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
        except BaseException as error:  # Ctrl-C too: the other threads must not go on
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
    """CRC-32 of two parts laid end to end, from their own; the second part has `n_bytes` bytes.

    A CRC is the rest of a polynomial over GF(2) modulo the CRC's; bytes that follow multiply it by x^(8 n).
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
    """x^(8 n) modulo the CRC's polynomial, by repeated squaring."""
    out, square = _ONE, _ONE >> 8
    while n_bytes:
        if n_bytes & 1:
            out = _product(square, out)
        square = _product(square, square)
        n_bytes >>= 1
    return out
