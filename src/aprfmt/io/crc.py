"""CRC-32 (IEEE 802.3, the one of zlib): isal when it is installed, else zlib; equal values."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from functools import lru_cache

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
_MOST_THREADS = 4  # two or three take all of the memory's speed


def crc32_of(*parts: Buffer) -> int:
    """CRC-32 of the parts laid end to end."""
    value = 0
    for part in parts:
        value = crc32(part, value)
    return value


def crc32_of_range(source: Source, start: int, end: int) -> int:
    """CRC-32 of the bytes [start, end) of a file, several parts at a time. Raises TruncatedError, StorageError.

    It reads through small buffers instead of mapping the file: resident memory stays small, and a file that is cut
    short meanwhile is an error and no signal.
    """
    stretch = range(start, end)
    parts = [stretch[at : at + _PART_BYTES] for at in range(0, len(stretch), _PART_BYTES)]
    n_threads = max(1, min(_MOST_THREADS, n_processors(), len(parts)))
    values, errors = [0] * len(parts), list[BaseException]()

    def work(first: int) -> None:
        """Every n-th part, through one buffer that stays in the cache; an error ends all threads."""
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, len(stretch))))
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
    value = 0
    for part, crc in zip(parts, values, strict=True):
        value = combine(value, crc, len(part))
    return value


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
