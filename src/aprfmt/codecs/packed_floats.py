"""Checkpoints of small floats and integers with scales: FP8, INT8, NVFP4, MXFP4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from aprfmt.codecs import nvfp4 as nvfp4_ggml
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.packed import (
    FLOATS,
    INPUT_SCALE,
    SCALE,
    TRANSPOSED_STEP,
    Decoded,
    Grid,
    PackedBlocks,
    Settings,
    StoredTensors,
    count,
    expect,
    flat,
    grid_of,
    refusal,
    region,
    require_symmetric,
    scale_blocks,
)
from aprfmt.codecs.packed_ints import grid_integers
from aprfmt.codecs.stream import TensorSource
from aprfmt.io.source import Buffer
from aprfmt.types import Array

if TYPE_CHECKING:
    import numpy as np

# OCP microscaling formats, E2M1: sign, two exponent bits, one mantissa bit.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


MX_BLOCK = 32


FLOATS_OF_8_BITS = ("F8_E4M3", "F8_E5M2")


def fp8(sources: StoredTensors, settings: Settings) -> Decoded:
    """8-bit floats times a scale per tensor, row or block (exponents if it is stored as U8).

    The scale is called inverse in checkpoints that divide by its reciprocal; the product is the same.
    """
    weight = sources.get("") or sources[".weight"]
    expect("FP8", weight, FLOATS_OF_8_BITS)
    if len(weight.shape) < 2:
        raise refusal("FP8", weight.name, f"has shape {list(weight.shape)}, expected a matrix")
    scale = sources.get("_scale_inv") or sources.get("_scale") or sources[".scale"]
    expect("FP8", scale, (*FLOATS, "F8_E8M0", "U8"))
    grid = grid_of("FP8", scale, weight.shape, scale_blocks("FP8", settings, scale.name))
    return Decoded(weight.shape, _Scaled(weight, grid))


@dataclass(frozen=True, slots=True)
class _Scaled:
    """Tiles of stored values times a grid of scales."""

    weight: TensorSource
    grid: Grid

    def __call__(self, rows: range, columns: range) -> Array:
        values: Array = region(self.weight, self.weight.shape[-1], rows, columns) * self.grid.at(rows, columns)
        return values


def int8(sources: StoredTensors, settings: Settings) -> Decoded:
    """8-bit integers, minus an optional zero point, times a scale (compressed-tensors)."""
    import numpy as np

    weight, scale, zero = sources[".weight"], sources[".weight_scale"], sources.get(".weight_zero_point")
    expect("INT8", weight, ("I8",), ndim=2)
    expect("INT8", scale, FLOATS)
    blocks = scale_blocks("INT8", settings, scale.name)
    grid = grid_of("INT8", scale, weight.shape, blocks)
    if ".weight_g_idx" in sources and grid.grid[1] > 1:
        raise refusal("INT8", weight.name, "act-order of 8-bit groups is not supported")
    zeros: Grid | None = None
    if zero is None:
        require_symmetric("INT8", scale, settings)
    else:
        expect("INT8", zero, ("I8",), scale.shape)
        zeros = grid_of("INT8", zero, weight.shape, blocks)
    width = weight.shape[-1]

    def tile(rows: range, columns: range) -> Array:
        values = region(weight, width, rows, columns).astype(np.float32)
        if zeros is not None:
            values -= zeros.at(rows, columns)
        return values * grid.at(rows, columns)

    def fields(rows: range, columns: range) -> Array:
        return region(weight, width, rows, columns, "U8") ^ np.uint8(0x80)

    def zero_points(rows: range, columns: range) -> Array:
        half = np.float32(128)
        return np.asarray(half) if zeros is None else zeros.at(rows, columns) + half

    integers = grid_integers(grid, (weight.shape[0], width), 8, fields, zero_points)
    return Decoded(weight.shape, tile, blocks=integers.blocks, integers=integers)


def nvfp4(sources: StoredTensors, settings: Settings) -> Decoded:
    """Pairs of 4-bit floats, an 8-bit float scale per 16 values, and a tensor scale.

    compressed-tensors divides by the tensor scale, ModelOpt multiplies by it.
    """
    import numpy as np

    divides = ".weight_global_scale" in sources
    overall = sources[".weight_global_scale" if divides else ".weight_scale_2"]
    factor = _one_scale("NVFP4", overall)
    inputs = sources.get(".input_global_scale") or sources.get(".input_scale")

    def scales(values: Array) -> Array:
        scaled: Array = (values / factor if divides else values * factor).astype(np.float32)
        return scaled

    decoded = _fp4("NVFP4", sources, nvfp4_ggml.GROUP, ("F8_E4M3",), scales)
    if decoded.shape[-1] % DTYPES["NVFP4"].block:
        return decoded
    own = {SCALE: factor} | ({INPUT_SCALE: _one_scale("NVFP4", inputs)} if inputs is not None else {})
    stored = {name: (float(np.float32(1) / value if divides else value),) for name, value in own.items()}
    packed = sources.get(".weight_packed") or sources[".weight"]
    between = partial(_nvfp4_blocks, packed, sources[".weight_scale"])
    change = abs(stored[SCALE][0] * float(factor) - 1) if divides else 0.0
    return replace(decoded, blocks=lambda: PackedBlocks("NVFP4", between, stored, change))


def _one_scale(scheme: str, source: TensorSource) -> np.float32:
    """The scale of a whole tensor. Raises RefusedError unless it is a single positive finite value."""
    import numpy as np

    expect(scheme, source, ("F32",))
    if count(source) != 1:
        raise refusal(scheme, source.name, f"has shape {list(source.shape)}, expected one value")
    value = np.float32(flat(source)[0])
    if not 0 < value < np.inf:
        raise refusal(scheme, source.name, f"is {value}, expected a positive finite scale")
    return value


def _nvfp4_blocks(packed: TensorSource, scale: TensorSource, start: int, stop: int) -> Buffer:
    """GGML blocks start .. stop of the sources. Raises RefusedError for a scale that they cannot store."""
    import numpy as np

    def octets(source: TensorSource, per_block: int) -> Array:
        data = np.empty((stop - start) * per_block, "u1")
        source.read_into(start * per_block, data.data)
        return data

    scales = octets(scale, nvfp4_ggml.SCALES)
    if ((scales & 0x7F) == 0x7F).any() or (scales > 0x80).any():
        raise refusal("NVFP4", scale.name, "has a scale that is NaN or negative", "decode it with --dtype bf16")
    return nvfp4_ggml.pack(octets(packed, nvfp4_ggml.CODES).data, scales.data)


def mxfp4_matrix(sources: StoredTensors, settings: Settings) -> Decoded:
    """Pairs of 4-bit floats, an exponent as the scale of 32 values (compressed-tensors, DeepSeek V4)."""
    return _fp4("MXFP4", sources, MX_BLOCK, ("U8", "F8_E8M0"), lambda values: values)


def _fp4(
    scheme: str, sources: StoredTensors, group: int, scale_dtypes: tuple[str, ...], scales: Callable[[Array], Array]
) -> Decoded:
    packed = sources.get(".weight_packed") or sources[".weight"]
    expect(scheme, packed, ("U8", "I8"), ndim=2)
    rows, half = packed.shape
    columns = 2 * half
    scale = sources.get(".weight_scale") or sources[".scale"]
    expect(scheme, scale, scale_dtypes, (rows, columns // group))
    if columns % group:
        raise refusal(scheme, packed.name, f"rows of {columns} values do not divide into groups of {group}")
    as_dtype = "F8_E8M0" if scale.dtype == "U8" else None
    grid = Grid(scale, rows, (rows, columns // group), 1, group, dtype=as_dtype)

    def tile(rows: range, columns: range) -> Array:
        octets = region(packed, half, rows, range(columns.start // 2, -(-columns.stop // 2)), "U8")
        skip = columns.start % 2
        values: Array = fp4_values(octets)[:, skip : skip + len(columns)] * scales(grid.at(rows, columns))
        return values

    return Decoded((rows, columns), tile)


def fp4_values(octets: Array) -> Array:
    """Two values per byte along the last axis, the low half first, float32."""
    values: Array = _fp4_pairs()[octets].view("<f4")
    return values


@cache
def _fp4_pairs() -> Array:
    """The two values of each byte, as one 8-byte number."""
    import numpy as np

    pairs = [(FP4_VALUES[byte & 15], FP4_VALUES[byte >> 4]) for byte in range(256)]
    return np.array(pairs, dtype="<f4").view("<u8").reshape(-1)


def mxfp4_experts(sources: StoredTensors, settings: Settings) -> Decoded:
    """Experts of gpt-oss: paired 4-bit floats [experts, out, in / 32, 16], exponents [experts, out, in / 32].

    The dequantized weight is [experts, in, out], as in the model's own layers.
    """
    blocks, scale = sources["_blocks"], sources["_scales"]
    expect("MXFP4", blocks, ("U8",), ndim=4)
    expect("MXFP4", scale, ("U8",), blocks.shape[:-1])
    experts, n_out, n_blocks, n_bytes = blocks.shape
    if n_bytes != MX_BLOCK // 2:
        raise refusal("MXFP4", blocks.name, f"blocks of {n_bytes} bytes, expected {MX_BLOCK // 2}")
    n_in = n_blocks * MX_BLOCK

    def tile(rows: range, columns: range) -> Array:
        expert = rows.start // n_in
        first, last = rows.start - expert * n_in, rows.stop - expert * n_in
        span = range(first // MX_BLOCK, -(-last // MX_BLOCK))
        lines = range(expert * n_out + columns.start, expert * n_out + columns.stop)
        octets = region(blocks, n_blocks * n_bytes, lines, range(span.start * n_bytes, span.stop * n_bytes))
        exponents = region(scale, n_blocks, lines, span, "F8_E8M0")
        values = fp4_values(octets).reshape(len(lines), len(span), MX_BLOCK) * exponents[:, :, None]
        skip = first - span.start * MX_BLOCK
        return values.reshape(len(lines), -1)[:, skip : skip + len(rows)].T

    return Decoded((experts, n_in, n_out), tile, step=TRANSPOSED_STEP, period=n_in)
