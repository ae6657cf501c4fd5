"""Checkpoints of bitsandbytes: 4 bits (NF4, FP4) and LLM.int8."""

from __future__ import annotations

from collections.abc import Callable

from aprfmt.codecs.dtypes import DTYPES, n_elements
from aprfmt.codecs.packed import (
    FLOATS_BY_TORCH,
    Decoded,
    Settings,
    StoredTensors,
    count,
    expect,
    flat,
    positive,
    refusal,
    region,
)
from aprfmt.codecs.stream import TensorSource
from aprfmt.errors import AprError
from aprfmt.io import jsonx
from aprfmt.types import Array

# Quantiles of a normal distribution scaled to one (QLoRA, appendix E), and a float of 4 bits over its largest value.
_NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)


_BNB_FP4_VALUES = tuple(sign * value / 12 for sign in (1, -1) for value in _FP4_TWELFTHS)


_MAX_STATE_BYTES = 1 << 16


_LABEL = "bitsandbytes"


_CODES = {"nf4": _NF4_VALUES, "fp4": _BNB_FP4_VALUES}


def bnb4(kind: str, sources: StoredTensors, settings: Settings) -> Decoded:
    """4-bit codes of `kind`: "nf4", quantiles of a normal distribution, or "fp4", floats in their own encoding.

    Flat blocks, the high half of a byte first, each with its largest magnitude.
    """
    import numpy as np

    weight, state = sources[".weight"], _state(sources[f".weight.quant_state.bitsandbytes__{kind}"], kind)
    expect(_LABEL, weight, ("U8", "I8", "F16", "BF16", "F32"))  # codes are stored in any dtype of whole bytes
    dims = state.get("shape")
    if not isinstance(dims, list) or not 1 <= len(dims) <= 4:
        raise refusal(_LABEL, weight.name, f"its quant_state has shape {dims!r}")
    shape = tuple(positive(_LABEL, "a dimension of its quant_state", dim, weight.name) for dim in dims)
    n = n_elements(shape)
    stored = count(weight) * DTYPES[weight.dtype].block_bytes
    if stored != -(-n // 2):
        raise refusal(_LABEL, weight.name, f"{stored} bytes are stored, but a weight of {list(shape)} has {n} codes")
    size = positive(_LABEL, "blocksize", state.get("blocksize"), weight.name)
    quant_map = sources[".weight.quant_map"]
    expect(_LABEL, quant_map, ("F32",), (16,))
    code = flat(quant_map)
    # Kernels hard-code the values and ignore the stored ones: they must be equal.
    if not np.allclose(code, _CODES[kind], rtol=0, atol=1e-4):
        raise refusal(_LABEL, quant_map.name, f"values differ from those of {kind}")
    largest = _absmax(sources, state, -(-n // size))
    width = shape[-1]

    def tile(rows: range, columns: range) -> Array:
        first = rows.start * width + columns.start
        last = (rows.stop - 1) * width + columns.stop
        pairs = region(weight, stored, range(1), range(first // 2, -(-last // 2)), "U8")[0]
        codes = np.empty(2 * pairs.size, dtype="u1")
        codes[0::2], codes[1::2] = pairs >> 4, pairs & 15
        values: Array = code[codes[first % 2 : first % 2 + last - first]]
        block = np.arange(first, last) // size
        values = values * largest(range(int(block[0]), int(block[-1]) + 1))[block - block[0]]
        return values.reshape(len(rows), len(columns))

    return Decoded(shape, tile, FLOATS_BY_TORCH.get(str(state.get("dtype"))))


def _state(source: TensorSource, kind: str) -> dict[str, object]:
    """The JSON object stored as a byte tensor with the weight."""
    expect(_LABEL, source, ("U8",), ndim=1)
    if count(source) > _MAX_STATE_BYTES:
        raise refusal(_LABEL, source.name, f"{count(source)} bytes are not a valid quant_state")
    try:
        state = jsonx.loads(flat(source).tobytes())
    except AprError as error:
        raise refusal(_LABEL, source.name, f"cannot be read: {error.message}") from error
    if not isinstance(state, dict) or state.get("quant_type", kind) != kind:
        raise refusal(_LABEL, source.name, f"is not a valid quant_state of {kind} codes")
    return state


def _absmax(sources: StoredTensors, state: dict[str, object], n_blocks: int) -> Callable[[range], Array]:
    """A function that returns the largest magnitudes of a range of blocks, dequantizing them if they have 8 bits."""
    import numpy as np

    source, nested = sources[".weight.absmax"], sources.get(".weight.nested_absmax")
    if nested is None:
        expect(_LABEL, source, ("F32",), (n_blocks,))
        return lambda blocks: flat(source, blocks)
    expect(_LABEL, source, ("U8",), (n_blocks,))
    size = positive(_LABEL, "nested_blocksize", state.get("nested_blocksize"), source.name)
    expect(_LABEL, nested, ("F32",), (-(-n_blocks // size),))
    table = sources.get(".weight.nested_quant_map")
    if table is None:
        raise refusal(_LABEL, source.name, "nested_quant_map is missing")
    expect(_LABEL, table, ("F32",), (256,))
    offset = state.get("nested_offset")
    if isinstance(offset, bool) or not isinstance(offset, int | float):
        raise refusal(_LABEL, source.name, f"nested_offset is {offset!r}, not a number")
    with np.errstate(all="ignore"):
        code, shift = flat(table), np.float64(offset).astype(np.float32)

    def largest(blocks: range) -> Array:
        scale = flat(nested, range(blocks.start // size, -(-blocks.stop // size)))
        index = np.arange(blocks.start, blocks.stop) // size - blocks.start // size
        values: Array = code[flat(source, blocks)] * scale[index] + shift
        return values

    return largest


def llm_int8(sources: StoredTensors, settings: Settings) -> Decoded:
    """LLM.int8: signed bytes; 127 is the largest magnitude of the row."""
    import numpy as np

    weight, largest, layout = sources[".weight"], sources[".SCB"], sources.get(".weight_format")
    expect(_LABEL, weight, ("I8",), ndim=2)
    expect(_LABEL, largest, ("F32", "F16"), (weight.shape[0],))
    if layout is not None and (count(layout) != 1 or layout.dtype not in ("U8", "I8") or flat(layout)[0]):
        raise refusal(_LABEL, layout.name, "the rows are in a GPU-specific layout")
    width = weight.shape[1]

    def tile(rows: range, columns: range) -> Array:
        scale = flat(largest, rows).astype(np.float32)
        values: Array = region(weight, width, rows, columns) * scale[:, None] * np.float32(1 / 127)
        return values

    return Decoded(weight.shape, tile)
