"""One row a dtype: stored bytes and what they mean. A new dtype gets the whole suite by its row here."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Case:
    """`data` decodes to `values`; with `encodes` the values give back the bytes.

    Attributes:
        error: largest |decoded - value| of a random tensor after encoding, as a fraction of its block's
            largest value; None where the dtype cannot be written.
        result: numpy dtype of what `decode` returns.
    """

    dtype: str
    data: bytes
    values: list[Any]
    error: float | None = None
    encodes: bool = True
    result: str = "float32"
    shape: tuple[int, ...] = ()

    @property
    def true_shape(self) -> tuple[int, ...]:
        return self.shape or (len(self.values),)


def _pack(code: str, *values: Any) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def _half(value: float) -> bytes:
    return struct.pack("<e", value)


def _ints(dtype: str, code: str, result: str, *values: int) -> Case:
    return Case(dtype, _pack(code, *values), list(values), None, False, result)


def _ramp(n: int, seed: int = 1) -> bytes:
    """n bytes without a pattern that a nibble or bit mix-up would survive."""
    return bytes((i * 37 + 11 * (i // 7) + seed * 101) % 256 for i in range(n))


def _nibbles_split(packed: bytes) -> list[int]:
    """GGML order: low nibbles are values 0 .. 15, high nibbles 16 .. 31."""
    return [b & 15 for b in packed] + [b >> 4 for b in packed]


def _fifth_bits(packed: bytes) -> list[int]:
    bits = int.from_bytes(packed, "little")
    return [bits >> i & 1 for i in range(32)]


_N16, _N32, _BITS = _ramp(16), _ramp(32, 2), _ramp(4, 3)
_Q5 = [q | h << 4 for q, h in zip(_nibbles_split(_N16), _fifth_bits(_BITS), strict=True)]
_S32 = struct.unpack("32b", _N32)


def _q4_k() -> Case:
    """144 bytes: f16 d, f16 dmin, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles."""
    s, qs = _ramp(12, 5), _ramp(128, 6)
    values = []
    for j in range(8):
        if j < 4:
            scale, low = s[j] & 63, s[j + 4] & 63
        else:
            scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4
            low = (s[j + 4] >> 4) | (s[j] >> 6) << 4
        part = qs[32 * (j // 2) : 32 * (j // 2) + 32]
        values += [0.5 * scale * (b >> 4 if j % 2 else b & 15) - 0.25 * low for b in part]
    return Case("Q4_K", _half(0.5) + _half(0.25) + s + qs, values, None, False)


def _q6_k() -> Case:
    """210 bytes: 128 low nibbles, 64 high pairs, 16 signed scales, f16 d."""
    ql, qh, raw = _ramp(128, 7), _ramp(64, 8), _ramp(16, 9)
    scales = struct.unpack("16b", raw)
    values = [0.0] * 256
    for half in range(2):
        for i in range(32):
            low = (ql[64 * half + i], ql[64 * half + i + 32])
            high = qh[32 * half + i]
            codes = (low[0] & 15, low[1] & 15, low[0] >> 4, low[1] >> 4)
            for k, code in enumerate(codes):
                q = (code | (high >> 2 * k & 3) << 4) - 32
                values[128 * half + 32 * k + i] = 0.5 * scales[8 * half + 2 * k + i // 16] * q
    return Case("Q6_K", ql + qh + raw + _half(0.5), values, None, False)


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _fp4(code: int) -> float:
    """No -0: the code 8 is 0."""
    return _FP4[code & 7] * (-1 if code > 8 else 1)


def _nvfp4() -> Case:
    """36 bytes: 4 unsigned 8-bit float scales, 4 times 8 bytes of codes, values 0 .. 7 in the low halves."""
    scales = {0x38: 1.0, 0x03: 3 * 2.0**-9, 0x7E: 448.0, 0x7F: 0.0}
    values = []
    for i, scale in enumerate(scales.values()):
        codes = _nibbles_split(_N32[8 * i : 8 * i + 8])
        values += [scale * _fp4(code) + 0.0 for code in codes]
    # The scale 0x7F gives zeros of both signs.
    values[48:] = [math.copysign(0.0, _fp4(code)) for code in _nibbles_split(_N32[24:])]
    return Case("NVFP4", bytes(scales) + _N32, values, None, False)


CASES: tuple[Case, ...] = (
    Case("F32", _pack("f", 1.5, -0.0, INF, -1e-40), [1.5, -0.0, INF, float(np.float32(-1e-40))], 0.0),
    Case("F64", _pack("d", 1.5, -0.0, -INF, 1e-320), [1.5, -0.0, -INF, 1e-320], 0.0, True, "float64"),
    Case("F16", bytes.fromhex("003c 0080 007c ff7b 0100 55b5"),
         [1.0, -0.0, INF, 65504.0, 2.0**-24, -0.333251953125], 2**-11, True, "float16"),
    Case("BF16", bytes.fromhex("803f 0080 807f 7f7f 0100 abbe"),
         [1.0, -0.0, INF, 3.3895313892515355e38, 9.183549615799121e-41, -0.333984375], 2**-8),
    _ints("I8", "b", "int8", -128, 127, 0),
    _ints("I16", "h", "int16", -32768, 32767, 1),
    _ints("I32", "i", "int32", -(2**31), 2**31 - 1, 1),
    _ints("I64", "q", "int64", -(2**63), 2**63 - 1, 1),
    _ints("U8", "B", "uint8", 255, 0, 7),
    _ints("U16", "H", "uint16", 65535, 0, 7),
    _ints("U32", "I", "uint32", 2**32 - 1, 0, 7),
    _ints("U64", "Q", "uint64", 2**64 - 1, 0, 7),
    Case("BOOL", bytes([0, 1, 2]), [False, True, True], None, False, "bool"),
    Case("F8_E4M3", bytes([0x38, 0x7E, 0xFE, 0x01, 0x88, 0x7F]),
         [1.0, 448.0, -448.0, 2.0**-9, -(2.0**-6), NAN], None, False),
    Case("F8_E5M2", bytes([0x3C, 0x7B, 0xFC, 0x01, 0x84, 0x7D]),
         [1.0, 57344.0, -INF, 2.0**-16, -(2.0**-14), NAN], None, False),
    Case("F8_E8M0", bytes([127, 0, 254, 255]), [1.0, 2.0**-127, 2.0**127, NAN], None, False),
    Case("C64", _pack("f", 1.0, -2.0, 0.5, 0.25), [1 - 2j, 0.5 + 0.25j], None, False, "complex64"),
    Case("AprQ4", bytes.fromhex("9230 1f 3a 0b") + bytes(13),
         [s * 0.142822265625 for s in (7, -7, 2, -5, 3)], 0.072, False),
    Case("AprQ8", bytes.fromhex("0000803f 00 01 ff 7f 81 02 fd"),
         [0.0, 1.0, -1.0, 127.0, -127.0, 2.0, -3.0], 0.004),
    Case("Q4_0", _half(0.5) + _N16, [0.5 * (q - 8) for q in _nibbles_split(_N16)], 0.13, False),
    Case("Q4_1", _half(0.5) + _half(-3.0) + _N16, [0.5 * q - 3.0 for q in _nibbles_split(_N16)], 0.07, False),
    Case("Q5_0", _half(0.5) + _BITS + _N16, [0.5 * (q - 16) for q in _Q5], 0.064, False),
    Case("Q5_1", _half(0.5) + _half(-3.0) + _BITS + _N16, [0.5 * q - 3.0 for q in _Q5], 0.034, False),
    Case("Q8_0", _half(0.5) + _N32, [0.5 * q for q in _S32], 0.0045, False),
    Case("Q1_0", _half(0.5) + _N16, [(0.5, -0.5)[b >> i & 1 == 0] for b in _N16 for i in range(8)], None, False),
    Case("Q2_0", _half(0.5) + _N16, [0.5 * ((b >> i & 3) - 1) for b in _N16 for i in (0, 2, 4, 6)], None, False),
    Case("MXFP4", bytes([129]) + _N16, [4 * _fp4(code) for code in _nibbles_split(_N16)], 0.25, False),
    _nvfp4(),
    _q4_k(),
    _q6_k(),
)  # fmt: skip

# Held against gguf.quants alone: their decoding is that package's.
GGML_ONLY = (
    "Q2_K", "Q3_K", "Q5_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL",
    "IQ4_XS", "TQ1_0", "TQ2_0",
)  # fmt: skip

NOT_DECODED = ("Q8_1", "Q8_K")

# gguf-py neither reads nor writes them.
NOT_IN_GGUF_PY = ("Q1_0", "Q2_0")
