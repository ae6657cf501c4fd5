"""The fields of each block dtype and their values, for inspection.

`parts_of` decodes one block in plain Python; `recode.decode` is the fast decoder. Offsets and packings are those of
llama.cpp's ggml-common.h and ggml-quants.c; codes come in the order of their values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Number: TypeAlias = int | float
Decoded: TypeAlias = Mapping[str, Sequence[Number]]
"""Values of a field: usually one list of numbers, under its own name."""

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of IQ4_NL and IQ4_XS codes."""


@dataclass(frozen=True, slots=True)
class BlockField:
    """A field of a block type: its offset in the block, and how its bytes are decoded."""

    name: str
    offset: int
    n_bytes: int
    read: Callable[[bytes, str], Decoded]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A block type: its fields, the codes of its values, and the formula of a value.

    Attributes:
        fields: in the order of their bytes.
        codes: decodes the code of each value from the bytes of all fields; None if codes index a table of vectors.
        formula: of a value, from its code and the scales.
    """

    fields: tuple[BlockField, ...]
    codes: Callable[[Mapping[str, bytes]], list[int]] | None
    formula: str


@dataclass(frozen=True, slots=True)
class BlockPart:
    """A field of one block: its bytes and decoded values.

    Attributes:
        offset: of the first byte, from the start of the block.
        data: the bytes.
        values: numbers by name: {"d": [0.5]}, {"scales": [...], "mins": [...]}.
    """

    name: str
    offset: int
    data: bytes
    values: Decoded


def parts_of(dtype: str, block: bytes) -> tuple[list[BlockPart], list[int] | None]:
    """The fields of one stored block, and the code of each of its values; a single field of bytes without a layout.

    The codes are None if they index a table of vectors, or are unknown.
    """
    layout = LAYOUTS.get(dtype)
    if layout is None:
        return [BlockPart("bytes", 0, block, {})], None
    raw = {field.name: block[field.offset : field.offset + field.n_bytes] for field in layout.fields}
    parts = [BlockPart(f.name, f.offset, raw[f.name], f.read(raw[f.name], f.name)) for f in layout.fields]
    return parts, layout.codes(raw) if layout.codes is not None else None


def formula_of(dtype: str) -> str:
    """The formula of a value from the fields of its block; "" if none is known."""
    layout = LAYOUTS.get(dtype)
    return layout.formula if layout is not None else ""


# --- how bytes are read ---


def _f16(data: bytes, name: str) -> Decoded:
    return {name: struct.unpack(f"<{len(data) // 2}e", data)}


def _f32(data: bytes, name: str) -> Decoded:
    return {name: struct.unpack(f"<{len(data) // 4}f", data)}


def _u8(data: bytes, name: str) -> Decoded:
    return {name: list(data)}


def _i8(data: bytes, name: str) -> Decoded:
    return {name: struct.unpack(f"<{len(data)}b", data)}


def _u16(data: bytes, name: str) -> Decoded:
    return {name: struct.unpack(f"<{len(data) // 2}H", data)}


def _i16(data: bytes, name: str) -> Decoded:
    return {name: struct.unpack(f"<{len(data) // 2}h", data)}


def _e8m0(data: bytes, name: str) -> Decoded:
    """A power of two; the code 0 is 2^-127."""
    return {name: [2.0 ** (code - 127) for code in data]}


def _ue4m3(data: bytes, name: str) -> Decoded:
    """Unsigned floats with 4 exponent bits (bias 7) and 3 mantissa bits; 0x7F is NaN and counts as 0."""
    values = []
    for code in data:
        exponent, mantissa = code >> 3 & 15, code & 7
        value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
        values.append(0.0 if code in (0x7F, 0xFF) else value)
    return {name: values}


def _halves(data: bytes, name: str) -> Decoded:
    """Q2_K: 4-bit scale in the low half, 4-bit minimum in the high half."""
    return {name: [code & 15 for code in data], "mins": [code >> 4 for code in data]}


def _six_bits(data: bytes, name: str) -> Decoded:
    """Q4_K, Q5_K: eight 6-bit scales and eight 6-bit minima in twelve bytes."""
    scales, mins = [code & 63 for code in data[:4]], [code & 63 for code in data[4:8]]
    for j in range(4):
        scales.append(data[8 + j] & 15 | data[j] >> 6 << 4)
        mins.append(data[8 + j] >> 4 | data[4 + j] >> 6 << 4)
    return {name: scales, "mins": mins}


def _signed_six_bits(data: bytes, name: str) -> Decoded:
    """Q3_K: sixteen scales from -32 to 31, four bits of each in eight bytes, two in four more."""
    low = [code & 15 for code in data[:8]] + [code >> 4 for code in data[:8]]
    high = [data[8 + i % 4] >> 2 * (i // 4) & 3 for i in range(16)]
    return {name: [(a | b << 4) - 32 for a, b in zip(low, high, strict=True)]}


def _low_scales(data: bytes, name: str) -> Decoded:
    """IQ4_XS, the lower four bits of eight scales."""
    return {name: [half for code in data for half in (code & 15, code >> 4)]}


def _high_scales(data: bytes, name: str) -> Decoded:
    """IQ4_XS, the upper two bits of eight scales."""
    word = int.from_bytes(data, "little")
    return {name: [word >> 2 * i & 3 for i in range(8)]}


# --- the codes of the values ---


def _nibbles(data: bytes, run: int) -> list[int]:
    """The low halves of each `run` bytes, then the high ones."""
    codes: list[int] = []
    for start in range(0, len(data), run):
        part = data[start : start + run]
        codes += [code & 15 for code in part] + [code >> 4 for code in part]
    return codes


def _quarters(data: bytes) -> list[int]:
    """The lowest two bits of each 32 bytes, then the next ones."""
    return [
        code >> shift & 3
        for start in range(0, len(data), 32)
        for shift in (0, 2, 4, 6)
        for code in data[start : start + 32]
    ]


def _bits(data: bytes) -> list[int]:
    """Every bit, the lowest of each byte first."""
    return [code >> i & 1 for code in data for i in range(8)]


def _bit_planes(data: bytes, n: int) -> list[int]:
    """The lowest bit of every byte, then the next one of every byte: `n` planes."""
    return [code >> i & 1 for i in range(n) for code in data]


def _signed(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data)}b", data))


def _of_qs(run: int) -> Callable[[Mapping[str, bytes]], list[int]]:
    return lambda raw: _nibbles(raw["qs"], run)


def _q5(raw: Mapping[str, bytes]) -> list[int]:
    return [low | high << 4 for low, high in zip(_nibbles(raw["qs"], 16), _bits(raw["qh"]), strict=True)]


def _q5_k(raw: Mapping[str, bytes]) -> list[int]:
    return [low | high << 4 for low, high in zip(_nibbles(raw["qs"], 32), _bit_planes(raw["qh"], 8), strict=True)]


def _q3_k(raw: Mapping[str, bytes]) -> list[int]:
    return [q - (0 if bit else 4) for q, bit in zip(_quarters(raw["qs"]), _bit_planes(raw["hmask"], 8), strict=True)]


def _q6_k(raw: Mapping[str, bytes]) -> list[int]:
    low = _nibbles(raw["ql"], 64)
    return [a | b << 4 for a, b in zip(low, _quarters(raw["qh"]), strict=True)]


def _fields(*rows: tuple[str, int, Callable[[bytes, str], Decoded]]) -> tuple[BlockField, ...]:
    """Fields side by side, (name, bytes, how they are read) each."""
    found, at = [], 0
    for name, n_bytes, read in rows:
        found.append(BlockField(name, at, n_bytes, read))
        at += n_bytes
    return tuple(found)


_D = ("d", 2, _f16)
_TABLE = "value = d × scale × table[code], with signs"

LAYOUTS: dict[str, BlockLayout] = {
    "Q4_0": BlockLayout(_fields(_D, ("qs", 16, _u8)), _of_qs(16), "value = d × (code - 8)"),
    "Q4_1": BlockLayout(_fields(_D, ("m", 2, _f16), ("qs", 16, _u8)), _of_qs(16), "value = d × code + m"),
    "Q5_0": BlockLayout(_fields(_D, ("qh", 4, _u8), ("qs", 16, _u8)), _q5, "value = d × (code - 16)"),
    "Q5_1": BlockLayout(
        _fields(_D, ("m", 2, _f16), ("qh", 4, _u8), ("qs", 16, _u8)), _q5, "value = d × code + m"
    ),
    "Q8_0": BlockLayout(_fields(_D, ("qs", 32, _i8)), lambda raw: _signed(raw["qs"]), "value = d × code"),
    "Q2_K": BlockLayout(
        _fields(("scales", 16, _halves), ("qs", 64, _u8), _D, ("dmin", 2, _f16)),
        lambda raw: _quarters(raw["qs"]), "value = d × scale × code - dmin × min, one scale and min per 16 values",
    ),
    "Q3_K": BlockLayout(
        _fields(("hmask", 32, _u8), ("qs", 64, _u8), ("scales", 12, _signed_six_bits), _D),
        _q3_k, "value = d × scale × code, one scale per 16 values",
    ),
    "Q4_K": BlockLayout(
        _fields(_D, ("dmin", 2, _f16), ("scales", 12, _six_bits), ("qs", 128, _u8)),
        _of_qs(32), "value = d × scale × code - dmin × min, one scale and min per 32 values",
    ),
    "Q5_K": BlockLayout(
        _fields(_D, ("dmin", 2, _f16), ("scales", 12, _six_bits), ("qh", 32, _u8), ("qs", 128, _u8)),
        _q5_k, "value = d × scale × code - dmin × min, one scale and min per 32 values",
    ),
    "Q6_K": BlockLayout(
        _fields(("ql", 128, _u8), ("qh", 64, _u8), ("scales", 16, _i8), _D),
        _q6_k, "value = d × scale × (code - 32), one scale per 16 values",
    ),
    "Q8_K": BlockLayout(
        _fields(("d", 4, _f32), ("qs", 256, _i8), ("bsums", 32, _i16)),
        lambda raw: _signed(raw["qs"]), "value = d × code; bsums: sums of 16 codes each",
    ),
    "IQ4_NL": BlockLayout(_fields(_D, ("qs", 16, _u8)), _of_qs(16), f"value = d × {IQ4_VALUES}[code]"),
    "IQ4_XS": BlockLayout(
        _fields(_D, ("scales_h", 2, _high_scales), ("scales_l", 4, _low_scales), ("qs", 128, _u8)),
        _of_qs(16), f"value = d × (scale - 32) × {IQ4_VALUES}[code], a scale for each 32: scales_l + 16 × scales_h",
    ),
    "MXFP4": BlockLayout(
        _fields(("e", 1, _e8m0), ("qs", 16, _u8)), _of_qs(16), "value = e × the E2M1 float of the code (0 to ±6)"
    ),
    "NVFP4": BlockLayout(
        _fields(("d", 4, _ue4m3), ("qs", 32, _u8)),
        _of_qs(8), "value = d × the E2M1 float of the code (0 to ±6), one d per 16 values",
    ),
    "Q1_0": BlockLayout(
        _fields(_D, ("qs", 16, _u8)), lambda raw: _bits(raw["qs"]), "value = d where the bit is 1, else -d"
    ),
    "Q2_0": BlockLayout(
        _fields(_D, ("qs", 16, _u8)),
        lambda raw: [code >> shift & 3 for code in raw["qs"] for shift in (0, 2, 4, 6)], "value = d × (code - 1)",
    ),
    "TQ2_0": BlockLayout(_fields(("qs", 64, _u8), _D), lambda raw: _quarters(raw["qs"]), "value = d × (code - 1)"),
    "TQ1_0": BlockLayout(
        _fields(("qs", 48, _u8), ("qh", 4, _u8), _D), None,
        "value = d × (digit - 1); a byte holds five digits to base 3",
    ),
    "AprQ4": BlockLayout(
        _fields(_D, ("qs", 16, _u8)),
        lambda raw: [half for code in raw["qs"] for half in (code & 15, code >> 4)], "value = d × (code - 8)",
    ),
    "IQ1_S": BlockLayout(_fields(_D, ("qs", 32, _u8), ("qh", 16, _u16)), None, _TABLE),
    "IQ1_M": BlockLayout(_fields(("qs", 32, _u8), ("qh", 16, _u8), ("scales", 8, _u16)), None, _TABLE),
    "IQ2_XXS": BlockLayout(_fields(_D, ("qs", 64, _u16)), None, _TABLE),
    "IQ2_XS": BlockLayout(_fields(_D, ("qs", 64, _u16), ("scales", 8, _u8)), None, _TABLE),
    "IQ2_S": BlockLayout(_fields(_D, ("qs", 64, _u8), ("qh", 8, _u8), ("scales", 8, _u8)), None, _TABLE),
    "IQ3_XXS": BlockLayout(_fields(_D, ("qs", 96, _u8)), None, _TABLE),
    "IQ3_S": BlockLayout(
        _fields(_D, ("qs", 64, _u8), ("qh", 8, _u8), ("signs", 32, _u8), ("scales", 4, _u8)), None, _TABLE
    ),
}  # fmt: skip
"""Dtype -> its layout; AprQ8 has no blocks, and Q8_1 exists only within a computation."""
