"""4-bit floats in GGML blocks, in numpy: MXFP4 (32 values under a power of two) and NVFP4 (16 under an 8-bit float).

As in `ggml_legacy`; a code is a sign bit over an index into 0, 0.5, 1, 1.5, 2, 3, 4, 6. Of two values equally near,
the smaller is taken.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from aprfmt.types import Array

if TYPE_CHECKING:
    from aprfmt.codecs.ggml_legacy import Run

LAYOUTS = {
    "MXFP4": (("e", "u1"), ("qs", "u1", 16)),
    "NVFP4": (("d", "u1", 4), ("qs", "u1", (4, 8))),
}

_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)  # -0 decodes to 0
"""Twice the values, so that they are integers; scales are halved instead."""

_SAFE = 2.0**-100
"""From this scale on its inverse is an ordinary number."""


@cache
def _code_values() -> Array:
    import numpy as np

    return np.array(_DOUBLED + tuple(-v for v in _DOUBLED), dtype="f4")


@cache
def _pairs() -> Array:
    """Of each byte the values of its low and its high code, int8, as one number."""
    import numpy as np

    values, byte = _code_values().astype("i1"), np.arange(256)
    return np.stack([values[byte & 15], values[byte >> 4]], axis=1).view("<u2")[:, 0]


@cache
def _nearest() -> Array:
    """Index of the nearest of _DOUBLED for ceil(2 * x), x >= 0: it changes at halves only."""
    import numpy as np

    out = np.zeros(64, dtype="u1")
    for middle in (1, 3, 5, 7, 10, 14, 20):  # twice the points between neighbours
        out[middle + 1 :] += 1
    return out


@cache
def _halved_e8m0() -> Array:
    """2 ** (e - 128) for every byte e; 255, no valid scale, is no exception."""
    import numpy as np

    return np.array([2.0 ** (e - 128) for e in range(256)], dtype="f4")


@cache
def _halved_ue4m3() -> Array:
    """Half of the unsigned 8-bit float of every byte; the topmost bit does not count, 0x7F is 0."""
    import numpy as np

    out = np.empty(256, dtype="f4")
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        value = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-9 * mantissa
        out[byte] = 0 if byte == 0x7F else value / 2
    return out


def _codes(values: Array, scale: Array) -> Array:
    """Codes of `values` [n, k] under the halved scales [n], powers of two."""
    import numpy as np

    size = np.abs(values)
    tiny = np.flatnonzero(scale < _SAFE)
    if tiny.size:
        lift = np.float32(2.0**100)
        scale = scale.copy()
        scale[tiny] *= lift
        size[tiny] *= lift
    size *= (2 / scale)[:, None]
    np.ceil(size, out=size)
    codes: Array = _nearest().take(size.astype("u1"), mode="clip")
    codes |= (np.signbit(values) & (codes != 0)).view("u1") << 3
    return codes


def _exponent(top: Array) -> Array:
    """floor(log2(top)) where the logarithm is first rounded to float32, as log2f does; `top` > 0."""
    import numpy as np

    out: Array = np.floor(np.log2(top.astype("f8")).astype("f4")).astype("i4")
    return out


def encode_mxfp4(values: Array, blocks: Array) -> None:
    """The scale is the power of two that brings the largest value to 4 .. 8."""
    import numpy as np

    from aprfmt.codecs.ggml_legacy import largest

    top = largest(values)
    code = np.zeros(len(top), dtype="i4")
    some = top > 0
    code[some] = _exponent(top[some]) + 125
    blocks["e"] = code & 0xFF
    codes = _codes(values, _halved_e8m0()[blocks["e"]])
    blocks["qs"] = codes[:, :16] | codes[:, 16:] << 4


def decode_mxfp4(blocks: Array, values: Array) -> None:
    """value of the code * 2 ** (e - 127)."""
    pairs = _pairs().take(blocks["qs"]).view("i1").reshape(-1, 16, 2)
    values[:, :16] = pairs[:, :, 0]
    values[:, 16:] = pairs[:, :, 1]
    values *= _halved_e8m0()[blocks["e"]][:, None]


def _to_ue4m3(scale: Array) -> Array:
    """The unsigned 8-bit floats (bias 7, 3 bits of mantissa) of `scale` >= 0; halves go up, from 248 on it is 448."""
    import numpy as np

    bits = np.minimum(scale, np.float32(448)).view("i4")
    exponent = (bits >> 23) - 120
    # The mantissa rounded to 3 bits; a carry goes into the exponent by itself.
    normal = (exponent << 3) + (bits >> 20 & 7) + (bits >> 19 & 1)
    normal[normal >= 0x78] = 0x7E  # llama.cpp skips what lies between
    small = np.minimum((scale * np.float32(512) + np.float32(0.5)), np.float32(7)).astype("i4")
    out: Array = np.where(exponent <= 0, small, normal).astype("u1")
    return out


def encode_nvfp4(values: Array, blocks: Array) -> None:
    """Each 16 values have a scale that brings the largest to 6, within what an 8-bit float reaches."""
    import numpy as np

    from aprfmt.codecs.ggml_legacy import largest

    parts = values.reshape(-1, 16)
    code = _to_ue4m3(largest(parts) / np.float32(6))
    scale = _halved_ue4m3()[code]
    size = np.abs(parts)
    index = np.zeros(parts.shape, dtype="u1")
    for middle in (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0):
        index += size > (scale * np.float32(middle))[:, None]
    index[scale == 0] = 0
    index |= (np.signbit(parts) & (index != 0)).view("u1") << 3
    _saturated(parts, scale, code, index)
    blocks["d"] = code.reshape(-1, 4)
    quarters = index.reshape(-1, 4, 16)
    blocks["qs"] = quarters[:, :, :8] | quarters[:, :, 8:] << 4


def _saturated(parts: Array, scale: Array, code: Array, index: Array) -> None:
    """Under the largest scale, differences of huge values round to equal ones: the first of the nearest counts."""
    import numpy as np

    rows = np.flatnonzero(code == 0x7E)
    if rows.size:
        errors = np.abs(_code_values() * scale[rows, None, None] - parts[rows, :, None])
        index[rows] = errors.argmin(axis=2)


def decode_nvfp4(blocks: Array, values: Array) -> None:
    """value of the code * d."""
    pairs = _pairs().take(blocks["qs"]).view("i1").reshape(-1, 4, 8, 2)
    out = values.reshape(-1, 4, 16)
    out[:, :, :8] = pairs[:, :, :, 0]
    out[:, :, 8:] = pairs[:, :, :, 1]
    out *= _halved_ue4m3()[blocks["d"]][:, :, None]


ENCODERS: dict[str, Run] = {"MXFP4": encode_mxfp4, "NVFP4": encode_nvfp4}
DECODERS: dict[str, Run] = {"MXFP4": decode_mxfp4, "NVFP4": decode_nvfp4}
