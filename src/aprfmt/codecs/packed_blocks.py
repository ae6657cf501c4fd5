"""GGML blocks with the codes of a quantized checkpoint, and blocks with separate tensor scales."""

from __future__ import annotations

from functools import partial
from math import prod

from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.packed import SCALE, Decoded, PackedBlocks, Settings, StoredTensors, count, expect, flat, refusal
from aprfmt.codecs.recode import decode
from aprfmt.codecs.stream import TensorSource
from aprfmt.io.source import Buffer
from aprfmt.types import Array


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
