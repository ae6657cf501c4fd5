"""F16 and BF16 bit by bit, APR's own quants against a scalar model of their rule, overflow counts."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from gguf.quants import BF16
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import examples

from aprfmt.codecs.recode import decode, encode, recode

patterns = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=80)
f32s = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=80)


def half_bits(bits: int) -> int:
    """F16 of a float32 pattern: `struct` rounds to nearest even, NaNs keep sign and top mantissa bits."""
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    if math.isnan(value):
        return bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x3FF
    try:
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    except OverflowError:
        return bits >> 16 & 0x8000 | 0x7C00


@given(patterns)
def test_f16_of_any_pattern(bits: list[int]) -> None:
    got = encode("F16", np.array(bits, dtype="<u4").view("<f4"))
    assert list(struct.unpack(f"<{len(bits)}H", got)) == [half_bits(b) for b in bits]


def test_f16_of_a_grid_of_patterns() -> None:
    """Every exponent and sign with mantissas around the rounding points, past one block of the encoder."""
    mantissas = [m for i in range(23) for m in ((1 << i) - 1, 1 << i, (1 << i) + 1)] + [0x7FFFFF, 0x001000, 0x003000]
    grid = np.array([s << 31 | e << 23 | m & 0x7FFFFF for s in (0, 1) for e in range(256) for m in mantissas], "<u4")
    got = np.frombuffer(encode("F16", grid.view("<f4")), dtype="<u2")
    assert got.tolist() == [half_bits(int(b)) for b in grid]


def test_f16_is_its_own_inverse() -> None:
    every = np.arange(65536, dtype="<u2")
    quiet = every | np.where((every & 0x7FFF) > 0x7C00, 0x0200, 0).astype("<u2")
    wide = decode("F16", every.tobytes(), (65536,)).astype(np.float32)
    assert encode("F16", wide) == quiet.tobytes()


@given(patterns)
def test_bf16_of_any_pattern(bits: list[int]) -> None:
    values = np.array(bits, dtype="<u4").view("<f4")
    assert encode("BF16", values) == BF16.quantize_blocks(values.reshape(1, -1)).tobytes()


def test_bf16_is_its_own_inverse() -> None:
    every = np.arange(65536, dtype="<u2")
    quiet = every | np.where((every & 0x7FFF) > 0x7F80, 0x0040, 0).astype("<u2")
    assert encode("BF16", decode("BF16", every.tobytes(), (65536,))) == quiet.tobytes()


def test_f64_is_rounded_once() -> None:
    value = 1 + 2**-11 + 2**-40  # through float32 it would become a tie and go down
    assert encode("F16", np.array([value])) == struct.pack("<e", value) != struct.pack("<e", np.float32(value))


@pytest.mark.parametrize(
    ("source", "target", "values", "n"),
    [
        ("F32", "F16", [65519.9, 65520.0, -1e30, math.inf, math.nan, 1.0], 2),
        ("F32", "BF16", [3.39e38, 3.4e38, -3.4e38, math.inf, 0.0], 2),
        ("F64", "F32", [1e39, -1e39, math.inf, 1.0], 2),
        ("F64", "F16", [1e5, 1.0], 1),
        ("F64", "AprQ8", [1.0, 2.0], 0),
        ("F32", "F64", [1e38, math.inf], 0),
    ],
)
def test_overflow_is_counted(source: str, target: str, values: list[float], n: int) -> None:
    counts: list[int] = []
    data = encode(source, np.array(values, dtype="<f8" if source == "F64" else "<f4"))
    list(recode(source, target, (len(values),), lambda: [data], counts.append))
    assert sum(counts) == n


def round_away(quotient: np.float32) -> int:
    whole = math.trunc(float(quotient))
    return whole + int(math.copysign(abs(float(quotient) - whole) >= 0.5, quotient))


def q8_model(values: list[np.float32]) -> bytes:
    top = max(abs(v) for v in values)
    scale = np.float32(top / np.float32(127)) if top else np.float32(1)
    with np.errstate(all="ignore"):
        codes = [v / scale for v in values]
    return struct.pack("<f", scale) + bytes(_code(c, -127, 127) & 0xFF for c in codes)


def q4_model(values: list[np.float32]) -> bytes:
    out = b""
    for start in range(0, len(values), 32):
        block = values[start : start + 32]
        top = max(abs(v) for v in block)
        scale = np.float32(top / np.float32(7)) if top else np.float32(1)
        with np.errstate(all="ignore"):
            nibbles = [_code(v / scale, -8, 7) + 8 for v in block]
            stored = struct.pack("<H", half_bits(struct.unpack("<I", struct.pack("<f", scale))[0]))
        nibbles += [0] * (32 - len(nibbles))
        out += stored + bytes(a | b << 4 for a, b in zip(nibbles[0::2], nibbles[1::2], strict=True))
    return out


def _code(quotient: np.float32, low: int, high: int) -> int:
    if math.isnan(quotient):
        return 0
    if math.isinf(quotient):
        return high if quotient > 0 else low
    return max(low, min(high, round_away(quotient)))


@given(f32s)
@settings(max_examples=examples(200))
def test_apr_quants_by_their_rule(values: list[float]) -> None:
    array = np.array(values, dtype="<f4")
    assert encode("AprQ8", array) == q8_model(list(array))
    assert encode("AprQ4", array) == q4_model(list(array))


def test_apr_q8_example() -> None:
    values = [0, 1, -1, 127, -127, 0.5, -0.5, 1.5, 2.5, -2.5, 63.49999, 63.5, 0.4999999, -0.5000001]
    got = encode("AprQ8", np.array(values, dtype="<f4"))
    assert got == bytes.fromhex("0000803f 00 01 ff 7f 81 01 ff 02 03 fd 3f 40 00 ff")


def test_half_is_not_rounded_up_by_addition() -> None:
    """0.49999997 + 0.5 is 1 in float32; the code must still be 0."""
    values = np.array([127.0, 0.49999997, -0.49999997], dtype="<f4")
    assert encode("AprQ8", values)[4:] == bytes([127, 0, 0])


def test_apr_q4_example() -> None:
    got = encode("AprQ4", np.array([1, -1, 0.25, -0.75, 0.5], dtype="<f4"))
    assert got == bytes.fromhex("9230 1f 3a 0b") + bytes(13)


@pytest.mark.parametrize("scale", ["007e", "007c", "00fc", "ff03", "0100", "0000", "0080"])
def test_apr_q4_unusable_scales_decode_as_zero(scale: str) -> None:
    assert not decode("AprQ4", bytes.fromhex(scale) + bytes(range(16)), (32,)).any()


def test_apr_q4_smallest_usable_scale() -> None:
    values = decode("AprQ4", bytes.fromhex("0004") + b"\x9f" + bytes(15), (2,))
    assert values.tolist() == [7 * 2.0**-14, 2.0**-14]


def test_apr_quants_of_non_finite_values() -> None:
    values = np.array([math.nan, 1.0, -2.0], dtype="<f4")
    assert decode("AprQ8", encode("AprQ8", values), (3,))[0] == 0
    assert decode("AprQ4", encode("AprQ4", values), (3,))[0] == 0
    assert encode("AprQ8", np.array([math.inf, 1.0], dtype="<f4")) == struct.pack("<f2b", math.inf, 0, 0)
    assert encode("AprQ4", np.array([math.inf, 1.0], dtype="<f4")) == bytes.fromhex("007c 88") + bytes(15)


@given(st.integers(0, 100), st.integers(1, 50))
def test_apr_q4_partial_blocks(n: int, size: int) -> None:
    """Odd lengths, streamed in any pieces, equal the model; unused nibbles are 0."""
    values = np.random.default_rng(n).standard_normal(n).astype("<f4")
    data = values.tobytes()
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    got = b"".join(recode("F32", "AprQ4", (n,), lambda: chunks))
    assert got == q4_model(list(values))
    back = b"".join(recode("AprQ4", "F32", (n,), lambda: [got[i : i + size] for i in range(0, len(got), size)]))
    assert back == decode("AprQ4", got, (n,)).tobytes()
