"""The GGML types with one scale a block, in numpy: the reference that other backends must equal bit by bit.

`blocks` is a structured array [n] of LAYOUTS, `values` float32 [n, block]; the target is filled in place.
An encoder takes finite values and computes in float32 as ggml-quants.c does: the inverse of the scale is rounded
before it is multiplied, and where the scale is so small that its inverse is infinite every code is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from aprfmt.types import Array

if TYPE_CHECKING:
    pass

Run = Callable[["Array", "Array"], None]
"""(source, target), one of them blocks, the other values."""

LAYOUTS = {
    "Q1_0": (("d", "<f2"), ("qs", "u1", 16)),
    "Q2_0": (("d", "<f2"), ("qs", "u1", 16)),
    "Q4_0": (("d", "<f2"), ("qs", "u1", 16)),
    "Q4_1": (("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)),
    "Q5_0": (("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)),
    "Q5_1": (("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)),
    "Q8_0": (("d", "<f2"), ("qs", "i1", 32)),
}

_BELOW_HALF = 0x3EFFFFFF
"""Bits of the largest float32 below 0.5: added before truncation it rounds halves away from zero, and only them."""


def inverse(scale: Array) -> Array:
    """1 / scale as float32, 0 where that is infinite."""
    import numpy as np

    out = np.divide(np.float32(1), scale)
    out[np.isinf(out)] = 0
    return out


def round_away(values: Array, out: Array) -> None:
    """`values` to the nearest integer, halves away from zero, into the integer array `out`. Changes `values`."""
    import numpy as np

    half = np.bitwise_and(values.view("u4"), np.uint32(0x80000000))
    half |= np.uint32(_BELOW_HALF)
    values += half.view("f4")
    np.copyto(out, values, casting="unsafe")


def largest(values: Array) -> Array:
    """Largest absolute value of each row."""
    import numpy as np

    out: Array
    if values.shape[1] < 128:  # numpy is slow at reducing short rows
        columns = values.T.copy("C")
        out = np.abs(columns, out=columns).max(axis=0)
    else:
        out = np.abs(values).max(axis=1)
    return out


def _extremes(values: Array) -> tuple[Array, Array]:
    """Least and greatest value of each row. Of equal zeros of two signs the first one counts."""
    import numpy as np

    columns = values.T.copy("C")
    low, high = columns.min(axis=0), columns.max(axis=0)
    for ends in (low, high):
        zero = np.flatnonzero(ends == 0)
        ends[zero] = values[zero, (values[zero] == 0).argmax(axis=1)]
    return low, high


def _encode_symmetric(values: Array, levels: int) -> tuple[Array, Array]:
    """Scale and codes 0 .. 2 * levels - 1 [n, 32]: the value farthest from zero gets the code 0."""
    import numpy as np

    low, high = _extremes(values)
    far = np.where(-low > high, low, high)
    even = np.flatnonzero((-low == high) & (high != 0))
    far[even] = values[even, np.abs(values[even]).argmax(axis=1)]
    far[far == 0] = 0.0  # never -0.0
    scale = far / np.float32(-levels)
    factor = inverse(scale)
    codes = values * factor[:, None]
    codes += np.float32(levels + 0.5)
    codes[(factor == 0) & (scale != 0)] = 0
    out = codes.astype("u1")
    return scale, np.minimum(out, 2 * levels - 1, out=out)


def _encode_range(values: Array, levels: int) -> tuple[Array, Array, Array]:
    """Scale, minimum and codes 0 .. levels [n, 32] that span each row's range."""
    import numpy as np

    low, high = _extremes(values)
    scale = (high - low) / np.float32(levels)
    codes = values - low[:, None]
    codes *= inverse(scale)[:, None]
    codes += np.float32(0.5)
    out = codes.astype("u1")
    return scale, low, np.minimum(out, levels, out=out)


def _put_nibbles(blocks: Array, codes: Array) -> None:
    """Low halves hold values 0 .. 15, high halves 16 .. 31."""
    blocks["qs"] = codes[:, :16] & 15 | codes[:, 16:] << 4


def _put_fifth_bits(blocks: Array, codes: Array) -> None:
    import numpy as np

    blocks["qh"] = np.packbits(codes >> 4, bitorder="little").reshape(-1, 4)


def _nibbles(blocks: Array) -> Array:
    import numpy as np

    qs = blocks["qs"]
    out = np.empty((len(qs), 2, qs.shape[1]), dtype="u1")
    np.bitwise_and(qs, 15, out=out[:, 0])
    np.right_shift(qs, 4, out=out[:, 1])
    return out.reshape(len(qs), -1)


def _five_bits(blocks: Array) -> Array:
    import numpy as np

    high = np.unpackbits(np.ascontiguousarray(blocks["qh"]), bitorder="little")
    codes = _nibbles(blocks)
    high <<= 4
    codes |= high.reshape(codes.shape)
    return codes


def scaled(codes: Array, scale: Array, values: Array) -> None:
    """values = codes * scale, a scale for each row."""
    values[:] = codes
    values *= scale.astype("f4")[:, None]


def encode_q1_0(values: Array, blocks: Array) -> None:
    """A bit a value: its sign. The scale is the mean size."""
    import numpy as np

    # The sum runs in order, as in C; numpy's own sum would pair up.
    sums = np.add.accumulate(np.abs(values), axis=1, dtype="f4")[:, -1]
    blocks["d"] = sums / np.float32(128)
    blocks["qs"] = np.packbits(values >= 0, axis=1, bitorder="little")


def decode_q1_0(blocks: Array, values: Array) -> None:
    """Bits 0 are -d, bits 1 are d."""
    import numpy as np

    signs = np.unpackbits(np.ascontiguousarray(blocks["qs"]), axis=1, bitorder="little").view("i1")
    signs <<= 1
    signs -= 1
    scaled(signs, blocks["d"], values)


def encode_q2_0(values: Array, blocks: Array) -> None:
    """2 bits a value: -1, 0, 1 times the largest (2 is never written)."""
    import numpy as np

    scale = largest(values)
    factor = inverse(scale)
    codes = np.empty(values.shape, dtype="i1")
    round_away(values * factor[:, None], codes)
    codes += 1
    codes[(factor == 0) & (scale != 0)] = 0
    blocks["d"] = scale
    quads = codes.view("<u4")
    blocks["qs"] = (quads | quads >> 6 | quads >> 12 | quads >> 18) & 255


def decode_q2_0(blocks: Array, values: Array) -> None:
    """Codes 0 .. 3 are -1 .. 2 times d."""
    quads = _two_bits().take(blocks["qs"])
    scaled(quads.view("i1"), blocks["d"], values)


@cache
def _two_bits() -> Array:
    """Of each byte its four values, int8, as one number."""
    import numpy as np

    byte = np.arange(256)[:, None] >> np.array([0, 2, 4, 6])
    out: Array = ((byte & 3) - 1).astype("i1").view("<u4")[:, 0]
    return out


def encode_q4_0(values: Array, blocks: Array) -> None:
    """4 bits a value: -8 .. 7 times d."""
    blocks["d"], codes = _encode_symmetric(values, 8)
    _put_nibbles(blocks, codes)


def decode_q4_0(blocks: Array, values: Array) -> None:
    """(code - 8) * d."""
    import numpy as np

    scaled(_nibbles(blocks).view("i1") - np.int8(8), blocks["d"], values)


def encode_q5_0(values: Array, blocks: Array) -> None:
    """5 bits a value: -16 .. 15 times d."""
    blocks["d"], codes = _encode_symmetric(values, 16)
    _put_nibbles(blocks, codes)
    _put_fifth_bits(blocks, codes)


def decode_q5_0(blocks: Array, values: Array) -> None:
    """(code - 16) * d."""
    import numpy as np

    scaled(_five_bits(blocks).view("i1") - np.int8(16), blocks["d"], values)


def encode_q4_1(values: Array, blocks: Array) -> None:
    """4 bits a value: 0 .. 15 times d, above m."""
    blocks["d"], blocks["m"], codes = _encode_range(values, 15)
    _put_nibbles(blocks, codes)


def decode_q4_1(blocks: Array, values: Array) -> None:
    """code * d + m."""
    scaled(_nibbles(blocks), blocks["d"], values)
    values += blocks["m"].astype("f4")[:, None]


def encode_q5_1(values: Array, blocks: Array) -> None:
    """5 bits a value: 0 .. 31 times d, above m."""
    blocks["d"], blocks["m"], codes = _encode_range(values, 31)
    _put_nibbles(blocks, codes)
    _put_fifth_bits(blocks, codes)


def decode_q5_1(blocks: Array, values: Array) -> None:
    """code * d + m."""
    scaled(_five_bits(blocks), blocks["d"], values)
    values += blocks["m"].astype("f4")[:, None]


def encode_q8_0(values: Array, blocks: Array) -> None:
    """8 bits a value: -127 .. 127 times d."""
    import numpy as np

    scale = largest(values) / np.float32(127)
    blocks["d"] = scale
    round_away(values * inverse(scale)[:, None], blocks["qs"])


def decode_q8_0(blocks: Array, values: Array) -> None:
    """code * d."""
    scaled(blocks["qs"], blocks["d"], values)


ENCODERS: dict[str, Run] = {
    "Q1_0": encode_q1_0, "Q2_0": encode_q2_0, "Q4_0": encode_q4_0, "Q4_1": encode_q4_1, "Q5_0": encode_q5_0,
    "Q5_1": encode_q5_1, "Q8_0": encode_q8_0,
}  # fmt: skip
DECODERS: dict[str, Run] = {
    "Q1_0": decode_q1_0, "Q2_0": decode_q2_0, "Q4_0": decode_q4_0, "Q4_1": decode_q4_1, "Q5_0": decode_q5_0,
    "Q5_1": decode_q5_1, "Q8_0": decode_q8_0,
}  # fmt: skip
