"""CRC-32 (IEEE 802.3, the one of zlib): isal when it is installed, else zlib; equal values."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

crc32: Callable[..., int] = zlib.crc32
try:
    from isal import isal_zlib

    crc32 = isal_zlib.crc32
except ImportError:
    pass
"""crc32(data, value=0): the checksum of `data`, continued from `value`."""


def crc32_of(*parts: Any) -> int:
    """CRC-32 of the parts laid end to end."""
    value = 0
    for part in parts:
        value = crc32(part, value)
    return value
