"""Plain dtypes: IEEE floats, bfloat16, 8-bit floats, integers, booleans. Arrays are 1-d and little-endian.

How values are rounded and what becomes of NaN stands in casts.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from aprfmt.codecs import casts
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.types import Array

if TYPE_CHECKING:
    pass

ENCODABLE = ("F32", "F16", "BF16", "F64", *casts.EIGHT_BITS)


def decode(dtype: str, data: Any) -> Array:
    """Stored bytes as a 1-d array: BF16 and 8-bit floats as float32, BOOL as bool, the rest as a view."""
    import numpy as np

    raw = np.frombuffer(data, dtype=DTYPES[dtype].numpy)
    if dtype == "BF16":
        return casts.widen(dtype, raw)
    if dtype.startswith("F8_"):
        return np.take(_f8_values(dtype), raw)
    return raw != 0 if dtype == "BOOL" else raw


def encode(dtype: str, values: Array, overflow: casts.Overflow = None) -> Array:
    """1-d float `values` as the stored elements of `dtype`, one of ENCODABLE.

    F64 goes to BF16 and 8-bit floats through float32. `overflow` is told how many finite values
    became infinite, or the largest that E4M3 has.
    """
    row, source = DTYPES[dtype].numpy, values.dtype.str
    if source == row:
        return values
    if source == "<f2" and dtype != "F64":
        codes = values.view("<u2")
        return casts.widen("F16", codes) if dtype == "F32" else casts.recode("F16", dtype, codes, overflow)
    if dtype in ("F32", "F64"):
        return _resized(values, dtype, overflow)
    if source == "<f8" and dtype == "F16":
        return _f64_to_f16(values, overflow)
    return casts.narrow(dtype, values if source == "<f4" else _resized(values, "F32", overflow), overflow)


def cast(src: str, dst: str, data: Any, overflow: casts.Overflow = None) -> Array:
    """Stored bytes of one float dtype as the elements of another: `encode` of `decode`, by a shorter way."""
    import numpy as np

    if src == "BF16" and dst in ("F16", *casts.EIGHT_BITS):
        return casts.recode(src, dst, np.frombuffer(data, dtype="<u2"), overflow)
    values = decode(src, data)
    return encode(dst, values if values.dtype.kind == "f" else values.astype("<f4"), overflow)


def _resized(values: Array, dtype: str, overflow: casts.Overflow) -> Array:
    import numpy as np

    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        out = values.astype(DTYPES[dtype].numpy)
        if overflow is not None and values.dtype.itemsize > out.dtype.itemsize:
            n = int(np.count_nonzero(np.isinf(out) & np.isfinite(values)))
            if n:
                overflow(n)
    return out


def _f64_to_f16(values: Array, overflow: casts.Overflow) -> Array:
    """Rounded once, not by way of float32."""
    import numpy as np

    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        out = values.astype("<f2").view("<u2")
        casts.settle("F16", values, out, overflow)
    return out


@cache
def _f8_values(dtype: str) -> Array:
    """The 256 values of an 8-bit float (OCP 8-bit floating point and microscaling formats), as float32."""
    import numpy as np

    if dtype == "F8_E8M0":  # a bare power of two, 255 is NaN
        values = [2.0 ** (code - 127) for code in range(255)] + [float("nan")]
        return np.array(values, dtype="<f4")
    exponent_bits, mantissa_bits = casts.FIELDS[dtype]
    values = [casts.f8_value(code, exponent_bits, mantissa_bits) for code in range(128)]
    values[127] = float("nan")  # of E4M3 the only special code; E5M2 has infinities as IEEE floats do
    if dtype == "F8_E5M2":
        values[124:] = [float("inf")] + 3 * [float("nan")]
    return np.array(values + [-value for value in values], dtype="<f4")
