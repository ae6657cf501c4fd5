"""Plain dtypes: IEEE floats, bfloat16, 8-bit floats, integers, booleans. Arrays are 1-d and little-endian.

F16 is written as IEEE round-to-nearest-even; NaNs keep sign and top ten mantissa bits and become quiet.
BF16 is the upper half of a float32, rounded to nearest even, NaNs kept quiet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.stream import blocks

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

ENCODABLE = ("F32", "F16", "BF16", "F64")

# A dot product with itself below this bounds every value: none is NaN, infinite, or above F16's largest.
_F16_SAFE_SQUARE = 4.2e9


def decode(dtype: str, data: Any) -> Array:
    """Stored bytes as a 1-d array: BF16 and 8-bit floats as float32, BOOL as bool, the rest as a view."""
    import numpy as np

    raw = np.frombuffer(data, dtype=DTYPES[dtype].numpy)
    if dtype == "BF16":
        return _decode_bf16(raw)
    if dtype.startswith("F8_"):
        values: Array = _f8_values(dtype)[raw]
        return values
    return raw != 0 if dtype == "BOOL" else raw


def _decode_bf16(raw: Array) -> Array:
    import numpy as np

    out = np.zeros((raw.size, 2), dtype="<u2")
    out[:, 1] = raw
    return out.view("<f4").reshape(-1)


def encode(dtype: str, values: Array, overflow: Callable[[int], None] | None = None) -> Array:
    """1-d float `values` as the stored elements of `dtype`, one of ENCODABLE.

    `overflow` is told how many finite values became infinite.
    """
    import numpy as np

    row = np.dtype(DTYPES[dtype].numpy)
    if dtype in ("F32", "F64"):
        if values.dtype == row:
            return values
        return _narrow(values, row, overflow)
    out = np.empty(values.size, dtype="<u2")
    for part in blocks(values.size):
        if dtype == "F16":
            _encode_f16(values[part], out[part], overflow)
        else:
            _encode_bf16(values[part], out[part], overflow)
    return out


def _narrow(values: Array, target: np.dtype[Any], overflow: Callable[[int], None] | None) -> Array:
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        out = values.astype(target)
        if overflow is not None and values.dtype.itemsize > target.itemsize:
            _report(values, np.isinf(out), overflow)
    return out


def _encode_f16(values: Array, out: Array, overflow: Callable[[int], None] | None) -> None:
    import numpy as np

    half = out.view("<f2")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.copyto(half, values, casting="unsafe")
        if np.dot(values, values) < _F16_SAFE_SQUARE:
            return
        nans = np.isnan(values)
        if nans.any():
            bits = values[nans].astype("<f4").view("<u4")
            out[nans] = (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF)
        if overflow is not None:
            _report(values, np.isinf(half), overflow)


def _encode_bf16(values: Array, out: Array, overflow: Callable[[int], None] | None) -> None:
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        out[:] = rounded
        if np.isfinite(np.dot(values, values)):
            return
        nans = np.isnan(values)
        out[nans] = bits[nans] >> np.uint32(16) | np.uint32(0x40)
        if overflow is not None:
            _report(values, (out & 0x7FFF) == 0x7F80, overflow)


def _report(values: Array, infinite: Array, overflow: Callable[[int], None]) -> None:
    import numpy as np

    n = int(np.count_nonzero(infinite & np.isfinite(values)))
    if n:
        overflow(n)


@cache
def _f8_values(dtype: str) -> Array:
    """The 256 values of an 8-bit float (OCP 8-bit floating point and microscaling formats), as float32."""
    import numpy as np

    if dtype == "F8_E8M0":  # a bare power of two, 255 is NaN
        values = [2.0 ** (code - 127) for code in range(255)] + [float("nan")]
        return np.array(values, dtype="<f4")
    exponent_bits, mantissa_bits = (4, 3) if dtype == "F8_E4M3" else (5, 2)
    values = [_f8_value(code, exponent_bits, mantissa_bits) for code in range(256)]
    return np.array(values, dtype="<f4")


def _f8_value(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """Value of one code: E5M2 has infinities as IEEE floats do, E4M3 has none and one NaN a sign."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if exponent_bits == 5 and exponent == 31:
        return sign * float("inf") if mantissa == 0 else float("nan")
    if exponent_bits == 4 and code & 0x7F == 0x7F:
        return float("nan")
    bias = (1 << exponent_bits - 1) - 1
    fraction = mantissa / (1 << mantissa_bits)
    return sign * (
        fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
    )
