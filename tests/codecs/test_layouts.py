"""The fields of a block are what its values are made of: each value again by the formula, bit for bit."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.layouts import IQ4_VALUES, LAYOUTS, parts_of
from aprfmt.codecs.recode import decode

Values = dict[str, Sequence[float]]
f4 = np.float32

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the codes of MXFP4 and NVFP4 mean: floats of 2 bits of exponent and 1 of mantissa."""


def each(n: int, scales: Sequence[float]) -> Sequence[float]:
    """Every scale `n` times."""
    return np.repeat(np.array(scales, f4), n).tolist()


def minus(d: float, low: float, scale: Sequence[float], least: Sequence[float], codes: Sequence[int]) -> list[f4]:
    return [f4(f4(d) * f4(s)) * f4(q) - f4(f4(low) * f4(m)) for s, m, q in zip(scale, least, codes, strict=True)]


FORMULAS: dict[str, Callable[[Values, list[int]], Sequence[f4]]] = {
    "Q4_0": lambda v, q: [f4(v["d"][0]) * f4(c - 8) for c in q],
    "Q4_1": lambda v, q: [f4(v["d"][0]) * f4(c) + f4(v["m"][0]) for c in q],
    "Q5_0": lambda v, q: [f4(v["d"][0]) * f4(c - 16) for c in q],
    "Q5_1": lambda v, q: [f4(v["d"][0]) * f4(c) + f4(v["m"][0]) for c in q],
    "Q8_0": lambda v, q: [f4(v["d"][0]) * f4(c) for c in q],
    "Q2_K": lambda v, q: minus(v["d"][0], v["dmin"][0], each(16, v["scales"]), each(16, v["mins"]), q),
    "Q4_K": lambda v, q: minus(v["d"][0], v["dmin"][0], each(32, v["scales"]), each(32, v["mins"]), q),
    "Q5_K": lambda v, q: minus(v["d"][0], v["dmin"][0], each(32, v["scales"]), each(32, v["mins"]), q),
    "Q3_K": lambda v, q: [f4(f4(v["d"][0]) * f4(s)) * f4(c) for s, c in zip(each(16, v["scales"]), q, strict=True)],
    "Q6_K": lambda v, q: [
        f4(f4(v["d"][0]) * f4(s)) * f4(c - 32) for s, c in zip(each(16, v["scales"]), q, strict=True)
    ],
    "IQ4_NL": lambda v, q: [f4(v["d"][0]) * f4(IQ4_VALUES[c]) for c in q],
    "IQ4_XS": lambda v, q: [
        f4(f4(v["d"][0]) * f4(low + 16 * high - 32)) * f4(IQ4_VALUES[c])
        for low, high, c in zip(each(32, v["scales_l"]), each(32, v["scales_h"]), q, strict=True)
    ],
    "MXFP4": lambda v, q: [f4(v["e"][0]) * f4(E2M1_VALUES[c]) for c in q],
    "NVFP4": lambda v, q: [f4(d) * f4(E2M1_VALUES[c]) for d, c in zip(each(16, v["d"]), q, strict=True)],
    "Q1_0": lambda v, q: [f4(v["d"][0]) * f4(1 if c else -1) for c in q],
    "Q2_0": lambda v, q: [f4(v["d"][0]) * f4(c - 1) for c in q],
    "TQ2_0": lambda v, q: [f4(v["d"][0]) * f4(c - 1) for c in q],
    "AprQ4": lambda v, q: [f4(v["d"][0]) * f4(c - 8) for c in q],
}  # fmt: skip


def blocks(dtype: str, n: int) -> list[bytes]:
    """Random blocks whose f16 scales are ordinary numbers."""
    row, rng = DTYPES[dtype], random.Random(dtype)
    found = []
    for _ in range(n):
        block = bytearray(rng.randbytes(row.block_bytes))
        for field in LAYOUTS[dtype].fields:
            if field.name in ("d", "m", "dmin") and field.n_bytes == 2:
                block[field.offset : field.offset + 2] = struct.pack("<e", rng.uniform(-2, 2))
        if dtype == "MXFP4":
            block[0] = rng.randrange(100, 150)
        if dtype == "NVFP4":
            block[:4] = bytes(rng.randrange(0x7F) for _ in range(4))
        found.append(bytes(block))
    return found


@pytest.mark.parametrize("dtype", FORMULAS)
def test_values_follow_from_the_fields(dtype: str) -> None:
    for block in blocks(dtype, 20):
        parts, codes = parts_of(dtype, block)
        assert codes is not None
        values = {name: numbers for part in parts for name, numbers in part.values.items()}
        expected = decode(dtype, block, (DTYPES[dtype].block,))
        assert np.array_equal(np.array(FORMULAS[dtype](values, codes), f4), expected)


@pytest.mark.parametrize("dtype", LAYOUTS)
def test_fields_cover_the_block(dtype: str) -> None:
    block = blocks(dtype, 1)[0]
    parts, codes = parts_of(dtype, block)
    assert b"".join(part.data for part in parts) == block
    assert [part.offset for part in parts] == [sum(len(p.data) for p in parts[:i]) for i in range(len(parts))]
    assert all(part.values for part in parts)
    assert codes is None or len(codes) == DTYPES[dtype].block
    assert (codes is None) == (dtype not in FORMULAS and dtype != "Q8_K")
    assert LAYOUTS[dtype].formula


def test_every_block_type_has_a_layout() -> None:
    quantized = {row.name for row in DTYPES.values() if row.is_quantized}
    assert quantized - set(LAYOUTS) == {"AprQ8", "Q8_1"}
    parts, codes = parts_of("Q8_1", bytes(40))
    assert [part.name for part in parts] == ["bytes"]
    assert codes is None


def test_the_scales_of_a_table_type_stand_where_the_dtype_says() -> None:
    """`Dtype.scales` names the same places for those f16 scales that llama.cpp checks."""
    for name, layout in LAYOUTS.items():
        if DTYPES[name].scales:
            halves = {f.offset for f in layout.fields if f.name in ("d", "m", "dmin") and f.n_bytes == 2}
            assert halves == set(DTYPES[name].scales), name
