"""GGML super-blocks of 256 values, in numpy: decoding of the K-quants; decoding and encoding of the ternary types.

As in `ggml_legacy`. A K-quant holds scales (and minima) of 16 or 32 values as small integers under one f16 each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aprfmt.types import Array

if TYPE_CHECKING:
    from aprfmt.codecs.ggml_legacy import Run

LAYOUTS = {
    "Q2_K": (("scales", "u1", 16), ("qs", "u1", (2, 1, 32)), ("d", "<f2"), ("m", "<f2")),
    "Q3_K": (("hmask", "u1", (1, 32)), ("qs", "u1", (2, 1, 32)), ("scales", "u1", 12), ("d", "<f2")),
    "Q4_K": (("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12), ("qs", "u1", (4, 32))),
    "Q5_K": (("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12), ("qh", "u1", (1, 32)), ("qs", "u1", (4, 32))),
    "Q6_K": (("ql", "u1", (2, 64)), ("qh", "u1", (2, 1, 32)), ("scales", "i1", 16), ("d", "<f2")),
    "TQ1_0": (("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")),
    "TQ2_0": (("qs", "u1", (2, 1, 32)), ("d", "<f2")),
}

_TERNARY = ((0, 32, 5), (32, 16, 5), (48, 4, 4))
"""TQ1_0: (first byte, bytes, trits a byte); byte j of a run holds values j, j + bytes, ..."""


def _shifts(*bits: int) -> Array:
    import numpy as np

    return np.array(bits, dtype="u1")[:, None]


def _fill(values: Array, codes: Array, scale: Array, minimum: Array | None = None) -> None:
    """values = codes * scale - minimum, those of each part of a super-block [n, parts]."""
    values[:] = codes.reshape(values.shape)
    parts = values.reshape(*scale.shape, -1)
    parts *= scale[:, :, None]
    if minimum is not None:
        parts -= minimum[:, :, None]


def decode_q2_k(blocks: Array, values: Array) -> None:
    """2 bits a value; of each 16, 4 bits of scale and 4 of minimum."""
    codes = blocks["qs"] >> _shifts(0, 2, 4, 6)
    codes &= 3
    scale = blocks["d"].astype("f4")[:, None] * (blocks["scales"] & 15)
    minimum = blocks["m"].astype("f4")[:, None] * (blocks["scales"] >> 4)
    _fill(values, codes, scale.astype("f4", copy=False), minimum.astype("f4", copy=False))


def decode_q3_k(blocks: Array, values: Array) -> None:
    """3 bits a value, the third apart (unset means minus 4); of each 16, 6 bits of scale, minus 32."""
    import numpy as np

    packed = blocks["scales"]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = (packed[:, None, 8:] >> _shifts(0, 2, 4, 6) & 3).reshape(-1, 16)
    scale = blocks["d"].astype("f4")[:, None] * ((low | high << 4).view("i1") - np.int8(32))
    codes = blocks["qs"] >> _shifts(0, 2, 4, 6)
    codes &= 3
    third = (blocks["hmask"] >> _shifts(0, 1, 2, 3, 4, 5, 6, 7) & 1).reshape(codes.shape)
    third <<= 2
    codes |= third
    _fill(values, codes.view("i1") - np.int8(4), scale)


def _six_bits(packed: Array) -> tuple[Array, Array]:
    """Eight scales and eight minima of 6 bits each out of 12 bytes."""
    import numpy as np

    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minimum = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scale, minimum


def _q4_and_q5_k(blocks: Array, values: Array, codes: Array) -> None:
    scale, minimum = _six_bits(blocks["scales"])
    _fill(
        values, codes, blocks["d"].astype("f4")[:, None] * scale, blocks["m"].astype("f4")[:, None] * minimum
    )


def _nibble_rows(packed: Array) -> Array:
    """[n, rows, 2, bytes]: the low nibbles of each row, then its high ones."""
    import numpy as np

    out = np.empty((*packed.shape[:2], 2, packed.shape[2]), dtype="u1")
    np.bitwise_and(packed, 15, out=out[:, :, 0])
    np.right_shift(packed, 4, out=out[:, :, 1])
    return out


def decode_q4_k(blocks: Array, values: Array) -> None:
    """4 bits a value; of each 32, 6 bits of scale and 6 of minimum."""
    _q4_and_q5_k(blocks, values, _nibble_rows(blocks["qs"]))


def decode_q5_k(blocks: Array, values: Array) -> None:
    """5 bits a value, the fifth apart; of each 32, 6 bits of scale and 6 of minimum."""
    codes = _nibble_rows(blocks["qs"])
    fifth = blocks["qh"] >> _shifts(0, 1, 2, 3, 4, 5, 6, 7)
    fifth &= 1
    fifth <<= 4
    codes |= fifth.reshape(codes.shape)
    _q4_and_q5_k(blocks, values, codes)


def decode_q6_k(blocks: Array, values: Array) -> None:
    """6 bits a value, the upper two apart, minus 32; of each 16, 8 bits of scale."""
    import numpy as np

    low = blocks["ql"]
    codes = np.stack([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = blocks["qh"] >> _shifts(0, 2, 4, 6)
    high &= 3
    high <<= 4
    codes |= high
    scale = blocks["d"].astype("f4")[:, None] * blocks["scales"]
    _fill(values, codes.view("i1") - np.int8(32), scale)


def _trits(values: Array) -> tuple[Array, Array]:
    """The largest size of each row, and codes 0, 1, 2 for minus that, 0, that."""
    import numpy as np

    from aprfmt.codecs.ggml_legacy import inverse, largest, round_away

    scale = largest(values)
    codes = np.empty(values.shape, dtype="i1")
    round_away(values * inverse(scale)[:, None], codes)
    codes += 1
    return scale, codes.view("u1")


def encode_tq1_0(values: Array, blocks: Array) -> None:
    """Five values a byte: a number below 243 in base 3, spread over 0 .. 255 (the last 16 values four a byte)."""
    import numpy as np

    blocks["d"], codes = _trits(values)
    stored = np.empty((len(codes), 52), dtype="u1")
    at = 0
    for first, width, count in _TERNARY:
        run = codes[:, at : at + width * count].reshape(-1, count, width)
        number = np.zeros((len(codes), width), dtype="u2")
        for i in range(5):
            number *= 3
            if i < count:
                number += run[:, i]
        stored[:, first : first + width] = (number * 256 + 242) // 243
        at += width * count
    blocks["qs"], blocks["qh"] = stored[:, :48], stored[:, 48:]


def decode_tq1_0(blocks: Array, values: Array) -> None:
    """(trit - 1) * d; trit n is the topmost of the byte times 3 ** n."""
    import numpy as np

    stored = np.concatenate([blocks["qs"], blocks["qh"]], axis=1)
    at = 0
    for first, width, count in _TERNARY:
        powers = np.array([1, 3, 9, 27, 81], dtype="u1")[:count, None]
        codes = ((stored[:, None, first : first + width] * powers).astype("u2") * 3 >> 8).astype("i1")
        codes -= 1
        values[:, at : at + width * count] = codes.reshape(len(codes), -1)
        at += width * count
    values *= blocks["d"].astype("f4")[:, None]


def encode_tq2_0(values: Array, blocks: Array) -> None:
    """2 bits a value."""
    blocks["d"], codes = _trits(values)
    quads = codes.reshape(-1, 2, 4, 1, 32)
    blocks["qs"] = quads[:, :, 0] | quads[:, :, 1] << 2 | quads[:, :, 2] << 4 | quads[:, :, 3] << 6


def decode_tq2_0(blocks: Array, values: Array) -> None:
    """(code - 1) * d."""
    import numpy as np

    from aprfmt.codecs.ggml_legacy import scaled

    codes = blocks["qs"] >> _shifts(0, 2, 4, 6)
    codes &= 3
    scaled((codes.view("i1") - np.int8(1)).reshape(values.shape), blocks["d"], values)


ENCODERS: dict[str, Run] = {"TQ1_0": encode_tq1_0, "TQ2_0": encode_tq2_0}
DECODERS: dict[str, Run] = {
    "Q2_K": decode_q2_k, "Q3_K": decode_q3_k, "Q4_K": decode_q4_k, "Q5_K": decode_q5_k, "Q6_K": decode_q6_k,
    "TQ1_0": decode_tq1_0, "TQ2_0": decode_tq2_0,
}  # fmt: skip
