"""GGML blocks with the codes of a quantized checkpoint, and blocks with separate tensor scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod

from aprfmt.codecs import affine
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.packed import (
    SCALE,
    Decoded,
    PackedBlocks,
    Settings,
    StoredTensors,
    Tile,
    count,
    expect,
    flat,
    refusal,
)
from aprfmt.codecs.recode import decode
from aprfmt.codecs.stream import STEP, TensorSource
from aprfmt.io.source import Buffer
from aprfmt.types import Array, Shape


def scaled(sources: StoredTensors, settings: Settings) -> Decoded:
    """Blocks times the scale of their matrix; the sources are ".weight" and scales, F32 with one value or one per
    matrix.

    Raises RefusedError for other shapes, and for scales that are not positive and finite.
    """
    import numpy as np

    weight = sources[".weight"]
    scales = {which: _numbers(weight, source) for which, source in sources.items() if which != ".weight"}
    factors = np.array(scales.get(SCALE, (1.0,)), np.float32)
    row, width = DTYPES[weight.dtype], weight.shape[-1]
    rows_each = max(1, prod(weight.shape[:-1]) // len(factors))
    row_bytes = row.n_bytes((width,))

    def tile(rows: range, columns: range) -> Array:
        first, stop = columns.start // row.block, -(-columns.stop // row.block)
        size = (stop - first) * row.block_bytes
        data = np.empty((len(rows), size), "u1")
        if size == row_bytes:
            weight.read_into(rows.start * row_bytes, data.reshape(-1).data)
        else:
            for line, number in zip(data, rows, strict=True):
                weight.read_into(number * row_bytes + first * row.block_bytes, line.data)
        values = decode(weight.dtype, data.data, (len(rows), (stop - first) * row.block))
        skip = columns.start - first * row.block
        own = factors[np.minimum(np.arange(rows.start, rows.stop) // rows_each, len(factors) - 1)]
        product: Array = values[:, skip : skip + len(columns)] * own[:, None]
        return product

    blocks = PackedBlocks(weight.dtype, partial(_stored, weight), scales)
    return Decoded(weight.shape, tile, "BF16", blocks=lambda: blocks)


def _numbers(weight: TensorSource, source: TensorSource) -> tuple[float, ...]:
    import numpy as np

    expect(weight.dtype, source, ("F32",))
    n_matrices = prod(weight.shape[:-2])
    if count(source) not in (1, n_matrices):
        what = f"{count(source)} scales do not match {n_matrices} matrices"
        raise refusal(weight.dtype, source.name, what)
    values = flat(source)
    if not (np.isfinite(values) & (values > 0)).all():
        raise refusal(weight.dtype, source.name, "has scales that are not positive and finite")
    return tuple(values.tolist())


def _stored(weight: TensorSource, start: int, stop: int) -> Buffer:
    size = DTYPES[weight.dtype].block_bytes
    data = bytearray((stop - start) * size)
    weight.read_into(start * size, memoryview(data))
    return data


@dataclass(frozen=True, slots=True)
class Integers:
    """A weight of unsigned integer codes: value = scale * code + bias.

    Attributes:
        shape: row-major; groups of `group` values of a row share scale and bias.
        bits: per code.
        fields: decodes the codes of a tile, uint8.
        numbers: decodes scales and biases of whole rows, [rows, groups], float32 or float64.
        exact: refuse blocks unless scales and biases are exact in F16.
    """

    shape: Shape
    bits: int
    group: int
    fields: Tile
    numbers: Callable[[range], tuple[Array, Array]]
    exact: bool = False

    def blocks(self) -> PackedBlocks | None:
        """GGML blocks with the same codes, with the scales rounded to F16; None if no type fits."""
        if self.group % affine.BLOCK:
            return None
        found = affine.fitting_blocks(self.bits, self.all_numbers())
        if found is None or (self.exact and found[1]):
            return None
        dtype, change = found
        return PackedBlocks(dtype, partial(self._between, dtype), change=change)

    def all_numbers(self) -> Iterator[tuple[Array, Array]]:
        """Scales and biases of all rows, a few rows at a time."""
        n_rows, step = prod(self.shape[:-1]), max(1, STEP // self.shape[-1])
        for start in range(0, n_rows, step):
            yield self.numbers(range(start, min(start + step, n_rows)))

    def _between(self, dtype: str, start: int, stop: int) -> Buffer:
        import numpy as np

        width = self.shape[-1]
        per_row, per_group = width // affine.BLOCK, self.group // affine.BLOCK
        rows = range(start // per_row, -(-stop // per_row))
        codes = self.fields(rows, range(width)).reshape(-1, affine.BLOCK)
        scale, bias = (np.repeat(numbers.reshape(-1), per_group) for numbers in self.numbers(rows))
        part = slice(start - rows.start * per_row, stop - rows.start * per_row)
        return affine.write_blocks(dtype, codes[part], scale[part], bias[part])
