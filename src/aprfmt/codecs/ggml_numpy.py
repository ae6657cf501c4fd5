"""GGML blocks without libggml: numpy code if faster or the only implementation, gguf-py for the rest.

`stored` is uint8 [n, block_bytes], `values` float32 [n, block]; the target is filled in place. Encoders take finite
values and yield the bytes of llama.cpp's ggml-quants.c: they compute in float32 like it, with the inverse of the scale
rounded before the multiplication; if a scale is so small that its inverse is infinite, every code is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

from aprfmt.codecs.dtypes import Dtype
from aprfmt.errors import MissingDependencyError
from aprfmt.types import Array

if TYPE_CHECKING:
    import gguf

Run = Callable[[Array, Array], None]
"""(source, target): one of them stored blocks, the other values."""

_BELOW_HALF = 0x3EFFFFFF
"""Bits of the largest float32 below 0.5: adding it before truncation rounds only halves away from zero."""


def encoder(row: Dtype) -> Run:
    """The encoder of a type, one of ENCODABLE."""
    return _OWN_ENCODERS.get(row.name) or partial(_encode_gguf, row.name, _gguf_type(row))


def decoder(row: Dtype) -> Run:
    """The decoder of a type."""
    return _OWN_DECODERS.get(row.name) or partial(_decode_gguf, _gguf_type(row))


# --- by gguf-py ---


def _gguf_type(row: Dtype) -> gguf.GGMLQuantizationType:
    try:
        import gguf
    except ImportError as error:
        raise MissingDependencyError(f"{row.name} needs the package gguf", hint="pip install gguf") from error
    return gguf.GGMLQuantizationType(row.ggml_id)


def _decode_gguf(kind: gguf.GGMLQuantizationType, stored: Array, values: Array) -> None:
    import gguf.quants

    # As one row of many blocks: gguf.quants loops over groups of rows in Python.
    values[:] = gguf.quants.dequantize(stored.reshape(1, -1), kind).reshape(values.shape)


def _encode_gguf(name: str, kind: gguf.GGMLQuantizationType, values: Array, stored: Array) -> None:
    import gguf.quants
    import numpy as np

    # Adding 0 turns -0 into 0: gguf-py would keep the sign of a zero where llama.cpp does not.
    stored[:] = gguf.quants.quantize((values + np.float32(0)).reshape(1, -1), kind).reshape(stored.shape)
    if name in ("Q4_1", "Q5_1"):
        # If the minimum is 0, llama.cpp stores the first of the zeros, with its sign.
        rows = np.flatnonzero(values.min(axis=1) == 0)
        first = values[rows, (values[rows] == 0).argmax(axis=1)]
        stored[rows, 3] |= np.signbit(first).view("u1") << 7


# --- own code ---


def _inverse(scale: Array) -> Array:
    """1 / scale as float32, 0 if that is infinite."""
    import numpy as np

    out = np.divide(np.float32(1), scale)
    out[np.isinf(out)] = 0
    return out


def _round_away(values: Array, out: Array) -> None:
    """Rounds `values` to the nearest integer, halves away from zero, into the integer array `out`. Changes `values`."""
    import numpy as np

    half = np.bitwise_and(values.view("u4"), np.uint32(0x80000000))
    half |= np.uint32(_BELOW_HALF)
    values += half.view("f4")
    np.copyto(out, values, casting="unsafe")


def _largest(values: Array) -> Array:
    """Largest absolute value of each row."""
    import numpy as np

    out: Array
    if values.shape[1] < 128:  # numpy is slow at reducing short rows
        columns = values.T.copy("C")
        out = np.abs(columns, out=columns).max(axis=0)
    else:
        out = np.abs(values).max(axis=1)
    return out


def _put_scale(stored: Array, scale: Array) -> None:
    """Stores `scale` as the f16 at the start of each block."""
    stored[:, :2] = scale.astype("<f2").view("u1").reshape(-1, 2)


def _scale_codes(codes: Array, stored: Array, values: Array) -> None:
    """values = codes times the f16 at the start of each block."""
    values[:] = codes
    values *= stored[:, :2].copy().view("<f2").astype("f4")


def _encode_q8_0(values: Array, stored: Array) -> None:
    """8 bits per value: -127 .. 127 times d."""
    import numpy as np

    scale = _largest(values) / np.float32(127)
    _put_scale(stored, scale)
    _round_away(values * _inverse(scale)[:, None], stored[:, 2:].view("i1"))


def _encode_q1_0(values: Array, stored: Array) -> None:
    """One bit per value, its sign. The scale is the mean magnitude."""
    import numpy as np

    # Sums in order, as in C; numpy's own sum is pairwise.
    sums = np.add.accumulate(np.abs(values), axis=1, dtype="f4")[:, -1]
    _put_scale(stored, sums / np.float32(128))
    stored[:, 2:] = np.packbits(values >= 0, axis=1, bitorder="little")


def _decode_q1_0(stored: Array, values: Array) -> None:
    """0 is -d, 1 is d."""
    import numpy as np

    signs = np.unpackbits(np.ascontiguousarray(stored[:, 2:]), axis=1, bitorder="little").view("i1")
    signs <<= 1
    signs -= 1
    _scale_codes(signs, stored, values)


def _encode_q2_0(values: Array, stored: Array) -> None:
    """2 bits per value: -1, 0, 1 times the largest (2 is never written)."""
    import numpy as np

    scale = _largest(values)
    factor = _inverse(scale)
    codes = np.empty(values.shape, dtype="i1")
    _round_away(values * factor[:, None], codes)
    codes += 1
    codes[(factor == 0) & (scale != 0)] = 0
    _put_scale(stored, scale)
    quads = codes.view("<u4")
    stored[:, 2:] = (quads | quads >> 6 | quads >> 12 | quads >> 18) & 255


def _decode_q2_0(stored: Array, values: Array) -> None:
    """Codes 0 .. 3 are -1 .. 2 times d."""
    _scale_codes(_two_bits().take(stored[:, 2:]).view("i1"), stored, values)


@cache
def _two_bits() -> Array:
    """The four 2-bit fields of each byte as int8, in one 32-bit number."""
    import numpy as np

    byte = np.arange(256)[:, None] >> np.array([0, 2, 4, 6])
    out: Array = ((byte & 3) - 1).astype("i1").view("<u4")[:, 0]
    return out


_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
"""E2M1 values doubled, so that they are integers."""


@cache
def _halved_ue4m3() -> Array:
    """Half of each unsigned 8-bit float 0 .. 0x7E."""
    import numpy as np

    code = np.arange(0x7F)
    exponent, mantissa = code >> 3, code & 7
    value = np.where(exponent, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa, -9))
    out: Array = (value / 2).astype("f4")
    return out


def _to_ue4m3(scale: Array) -> Array:
    """Unsigned 8-bit floats (bias 7, 3 mantissa bits) of `scale` >= 0; halves round up, 448 from 248 on."""
    import numpy as np

    bits = np.minimum(scale, np.float32(448)).view("i4")
    exponent = (bits >> 23) - 120
    # Round the mantissa to 3 bits; a carry increments the exponent.
    normal = (exponent << 3) + (bits >> 20 & 7) + (bits >> 19 & 1)
    normal[normal >= 0x78] = 0x7E  # llama.cpp skips the values in between
    small = np.minimum((scale * np.float32(512) + np.float32(0.5)), np.float32(7)).astype("i4")
    out: Array = np.where(exponent <= 0, small, normal).astype("u1")
    return out


def _encode_nvfp4(values: Array, stored: Array) -> None:
    """4-bit floats; each 16 values have an 8-bit float scale that maps the largest to 6.

    Ties go to the smaller value.
    """
    import numpy as np

    parts = values.reshape(-1, 16)
    code = _to_ue4m3(_largest(parts) / np.float32(6))
    scale = _halved_ue4m3()[code]
    size = np.abs(parts)
    index = np.zeros(parts.shape, dtype="u1")
    for middle in (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0):
        index += size > (scale * np.float32(middle))[:, None]
    index[scale == 0] = 0
    index |= (np.signbit(parts) & (index != 0)).view("u1") << 3
    # With the largest scale, differences of huge values round to equal ones: the first of the nearest wins.
    rows = np.flatnonzero(code == 0x7E)
    if rows.size:
        known = np.array(_E2M1 + tuple(-value for value in _E2M1), dtype="f4")
        index[rows] = np.abs(known * scale[rows, None, None] - parts[rows, :, None]).argmin(axis=2)
    stored[:, :4] = code.reshape(-1, 4)
    quarters = index.reshape(-1, 4, 16)
    stored[:, 4:] = (quarters[:, :, :8] | quarters[:, :, 8:] << 4).reshape(-1, 32)


_OWN_ENCODERS: dict[str, Run] = {
    "Q8_0": _encode_q8_0, "Q1_0": _encode_q1_0, "Q2_0": _encode_q2_0, "NVFP4": _encode_nvfp4
}  # fmt: skip
_OWN_DECODERS: dict[str, Run] = {"Q1_0": _decode_q1_0, "Q2_0": _decode_q2_0}

ENCODABLE = (*_OWN_ENCODERS, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4")
"""Types that can be encoded without libggml: these, and those of gguf-py."""

WEIGHTED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Dtypes of ENCODABLE whose bytes depend on column importances, which only libggml supports."""

FASTER = {("Q1_0", "encode"), ("Q2_0", "encode"), ("Q8_0", "encode"), ("NVFP4", "encode"), ("Q1_0", "decode"),
          ("Q2_0", "decode")}  # fmt: skip
"""Types for which numpy is faster than libggml, which is built for generic processors."""
