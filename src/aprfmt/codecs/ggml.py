"""GGML blocks through gguf.quants, in pieces that keep its temporaries small."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from aprfmt.codecs.dtypes import DTYPES, Dtype
from aprfmt.codecs.stream import BLOCK, blocks
from aprfmt.errors import MissingDependencyError, UnsupportedError, UsageError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# What gguf.quants can write; the others need llama.cpp. A test holds this against the package.
ENCODABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")

# What gguf.quants cannot read: intermediate types that no model file holds, and types newer than the package.
UNREADABLE = ("Q8_1", "Q8_K", "Q1_0")


@cache
def _quants() -> Any:
    try:
        import gguf.quants
    except ImportError as error:
        raise MissingDependencyError("GGML dtypes need the package gguf", hint="pip install gguf") from error
    return gguf.quants


def _type(row: Dtype) -> Any:
    import gguf

    return gguf.GGMLQuantizationType(row.ggml_id)


def decode(dtype: str, data: Any, *, tensor: str | None = None) -> Array:
    """Whole blocks as float32, 1-d. Raises UnsupportedError for dtypes that no decoder exists for."""
    import numpy as np

    row = DTYPES[dtype]
    if dtype in UNREADABLE:
        raise UnsupportedError(
            f"{dtype} cannot be decoded", tensor=tensor, hint="keep the tensor as it is (--dtype keep)"
        )
    quants, kind = _quants(), _type(row)
    stored = np.frombuffer(data, dtype="u1").reshape(-1, row.block_bytes)
    out = np.empty((len(stored), row.block), dtype="<f4")
    with np.errstate(all="ignore"):
        for part in blocks(len(stored), BLOCK // row.block):
            # One row holds many blocks: gguf.quants loops over groups of rows in Python.
            out[part] = quants.dequantize(stored[part].reshape(1, -1), kind).reshape(-1, row.block)
    return out.reshape(-1)


def decode_padded(dtype: str, data: Any, cols: int, *, tensor: str | None = None) -> Array:
    """Whole rows of `cols` values, each padded to whole blocks, as float32, 1-d, without the padding."""
    row_blocks = -(-cols // DTYPES[dtype].block)
    values = decode(dtype, data, tensor=tensor).reshape(-1, row_blocks * DTYPES[dtype].block)
    return values[:, :cols].reshape(-1)


def encode(dtype: str, values: Array) -> Array:
    """float32 `values` (whole blocks) as stored bytes, uint8. Raises MissingDependencyError, UsageError."""
    import numpy as np

    row = DTYPES[dtype]
    if dtype not in ENCODABLE:
        raise MissingDependencyError(
            f"{dtype} can only be written by llama.cpp",
            hint="export to GGUF with --quantize; pip install 'aprfmt[llama]' brings llama.cpp",
        )
    if values.size % row.block:
        raise UsageError(f"{dtype} stores blocks of {row.block} values; {values.size} do not divide")
    quants, kind = _quants(), _type(row)
    out = np.empty((values.size // row.block, row.block_bytes), dtype="u1")
    rows = np.ascontiguousarray(values, dtype="<f4").reshape(-1, row.block)
    with np.errstate(all="ignore"):
        for part in blocks(len(rows), BLOCK // row.block):
            out[part] = quants.quantize(rows[part].reshape(1, -1), kind).reshape(-1, row.block_bytes)
    return out.reshape(-1)
