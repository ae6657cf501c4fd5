"""Known answers: what libggml must give for a fixed input before a function of it is used.

The answers (`Dtype.answers`) are CRC-32 values of what the numpy code gives, or, where only libggml encodes, of what
llama.cpp gave; a test repeats them with both. So a library that rounds differently is not used, rather than writing
other bytes.
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


def checksum_values(values: Array) -> int:
    """Of decoded values; any NaN equals any NaN."""
    import numpy as np

    return zlib.crc32(np.where(np.isnan(values), np.float32(0), values).astype("<f4").tobytes())


def decode_agrees(lib: Library, row: Dtype) -> bool:
    """Whether the library decodes the pattern as it should."""
    import numpy as np

    run = lib.row(symbol(row, "decode"))
    if run is None or row.answers is None or not has(lib, row, "decode"):
        return False
    stored, out = stored_pattern(row), np.empty(_N_VALUES, dtype="f4")
    run(stored.ctypes.data, out.ctypes.data, out.size)
    return checksum_values(out) == row.answers[0]


def encode_agrees(lib: Library, row: Dtype) -> bool:
    """Whether the library encodes the pattern as it should, with weights and without."""
    return (
        has(lib, row, "encode") and row.answers is not None and checksum_encoding(lib, row) == row.answers[1]
    )


def checksum_encoding(lib: Library, row: Dtype) -> int:
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
