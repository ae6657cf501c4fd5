"""CRC-32 (IEEE 802.3, the one of zlib): isal when it is installed, else zlib; equal values."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache

from aprfmt.io.source import Buffer

crc32: Callable[..., int] = zlib.crc32
"""crc32(data, value=0): the checksum of `data`, continued from `value`."""
try:
    from isal import isal_zlib

    crc32 = isal_zlib.crc32
except ImportError:
    pass

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # the polynomial 1: the lowest power stands in the highest bit


def crc32_of(*parts: Buffer) -> int:
    """CRC-32 of the parts laid end to end."""
    value = 0
    for part in parts:
        value = crc32(part, value)
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
