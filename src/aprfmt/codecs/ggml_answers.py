"""Known answers: what libggml must give for a fixed input before a function of it is used.

The answers are CRC-32 values of what the numpy code gives, or, where only libggml encodes, of what llama.cpp gave; a
test repeats them with both. A library that rounds differently is thus not used rather than giving other bytes.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from aprfmt.codecs.dtypes import Dtype
from aprfmt.types import Array

if TYPE_CHECKING:
    from aprfmt.codecs.libggml import Library

_N_VALUES = 1024
_COLS = 256

ANSWERS = {
    "Q4_0": (0x520B4E9D, 0xF048AA44),
    "Q4_1": (0xAF8C825B, 0xB612BD88),
    "Q5_0": (0xB60FA8CB, 0x9ABAE1C5),
    "Q5_1": (0x82940A9C, 0x110B89B5),
    "Q8_0": (0x90CD23CE, 0x9D87E099),
    "Q2_K": (0x01FE78A8, 0x5C8D7F2D),
    "Q3_K": (0x0A13D009, 0x2B6F0E4A),
    "Q4_K": (0x60E14A52, 0x8C0CAA68),
    "Q5_K": (0x1329A65A, 0xBA0082E8),
    "Q6_K": (0x6CF8D642, 0x8556EAA8),
    "IQ2_XXS": (0x366FC602, 0x830DEA13),
    "IQ2_XS": (0x35011156, 0xC0251C13),
    "IQ3_XXS": (0x33A8D3A6, 0xBE22607B),
    "IQ1_S": (0x8B61BB85, 0xF9748A91),
    "IQ4_NL": (0x63A3B4A8, 0xE90AE0A7),
    "IQ3_S": (0x31E0F77D, 0x6EE64F11),
    "IQ2_S": (0xD89286A2, 0x9C37F0F6),
    "IQ4_XS": (0xA1B36B0D, 0x8131AFB0),
    "IQ1_M": (0x86321C97, 0xA21C8558),
    "TQ1_0": (0x90CE9B86, 0x176F396A),
    "TQ2_0": (0x08E77E3D, 0x91DE8987),
    "MXFP4": (0xCDDC91C4, 0x5B9C7F5C),
    "NVFP4": (0xB4657A12, 0xDF732CBE),
    "Q1_0": (0x820C0562, 0xDE9948CF),
    "Q2_0": (0x1AE88425, 0xFFCC4148),
}
"""Of each type: what the stored pattern decodes to, and what the values are encoded to."""


def symbol(row: Dtype, direction: str) -> str:
    """The function of libggml that decodes or encodes a type."""
    return ("dequantize_row_" if direction == "decode" else "quantize_") + _ggml_name(row)


def _ggml_name(row: Dtype) -> str:
    return row.name.lower().replace("_k", "_K")


def stored_pattern(row: Dtype) -> Array:
    """The blocks to decode, uint8: every byte value, no pattern that shuffled bits would survive."""
    import numpy as np

    i = np.arange(_N_VALUES // row.block * row.block_bytes)
    return (i * 37 + 11 * (i // 7) + 101).astype("u1")


def value_pattern() -> Array:
    """The values to encode, float32: small multiples of powers of two, so that few sums round at all."""
    import numpy as np

    i = np.arange(_N_VALUES)
    values = ((i * i * 7 + i * 37) % 509 - 254).astype("f4") / np.float32(64)
    return np.ldexp(values, -(i // _COLS)).astype("f4")


def weight_pattern() -> Array:
    """The importance of the columns, float32."""
    import numpy as np

    return ((np.arange(_COLS) * 5 % 17 + 1) / 8).astype("f4")


def decoded_answer(values: Array) -> int:
    """Of decoded values; any NaN equals any NaN."""
    import numpy as np

    return zlib.crc32(np.where(np.isnan(values), np.float32(0), values).astype("<f4").tobytes())


def decode_agrees(lib: Library, row: Dtype) -> bool:
    """Whether the library decodes the pattern as it should."""
    import numpy as np

    run = lib.row(symbol(row, "decode"))
    if run is None or not has(lib, row, "decode"):
        return False
    stored, out = stored_pattern(row), np.empty(_N_VALUES, dtype="f4")
    run(stored.ctypes.data, out.ctypes.data, out.size)
    return decoded_answer(out) == ANSWERS[row.name][0]


def encode_agrees(lib: Library, row: Dtype) -> bool:
    """Whether the library encodes the pattern as it should, with weights and without."""
    return has(lib, row, "encode") and encoded_answer(lib, row) == ANSWERS[row.name][1]


def encoded_answer(lib: Library, row: Dtype) -> int:
    """CRC-32 of what the library makes of the values: without weights, if the type can do so, then with them."""
    import numpy as np

    assert row.ggml_id is not None
    values, weights = value_pattern(), weight_pattern()
    crc = 0
    for address in (None, weights.ctypes.data):
        if address is None and lib.needs_weights(row.ggml_id):
            continue
        out = np.zeros(_N_VALUES // row.block * row.block_bytes, dtype="u1")
        lib.quantize(row.ggml_id, values.ctypes.data, out.ctypes.data, _N_VALUES // _COLS, _COLS, address)
        crc = zlib.crc32(out.tobytes(), crc)
    return crc


def has(lib: Library, row: Dtype, direction: str) -> bool:
    """Whether the library has the function, and the type as the dtype table says."""
    assert row.ggml_id is not None
    if not lib.has(symbol(row, direction)):  # asked for the geometry, it would read beyond its table
        return False
    return lib.geometry(row.ggml_id) == (_ggml_name(row), row.block, row.block_bytes)
