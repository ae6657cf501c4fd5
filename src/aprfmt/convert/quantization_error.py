"""The error of each type for a tensor, measured on a sample of its rows with the codec that will write it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs import ggml, plain
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.recode import decode
from aprfmt.codecs.stream import whole_units
from aprfmt.io.pipe import Job, item_bytes
from aprfmt.types import Array, Shape

if TYPE_CHECKING:
    import numpy as np

SAMPLED_VALUES = 1 << 15
"""Values of a tensor that are encoded per type: IQ types take about a second per million."""

_SAMPLED_PIECES = 8
"""Chunks of about a mebibyte that are read of a tensor."""


@dataclass(frozen=True, slots=True)
class RowSample:
    """Rows of a tensor.

    Attributes:
        values: float32 [rows, columns].
        weights: float32 [rows, columns], column importances of each row; None: all equal.
        matrices: for a stack, the matrix of each row.
        use: [rows, 1], how often the matrix of each row is used.
    """

    values: Array
    weights: Array | None
    matrices: Array
    use: Array


def sample_rows(
    tensor: CanonicalTensor, weights: Array | None, counts: Array | None = None, n_values: int = SAMPLED_VALUES
) -> RowSample:
    """Reads a sample of about `n_values` values, whole rows chosen by the tensor's name.

    Reads a few mebibytes at most.

    Args:
        tensor: the tensor.
        weights: [matrices * columns] as for `CanonicalTensor.out`.
        counts: [matrices], the tokens routed to each expert of a stack.
        n_values: approximate number of values.
    """
    import numpy as np

    shape: Shape = tensor.shape
    cols, n_rows = shape[-1], math.prod(shape[:-1])
    rng = np.random.default_rng(zlib.crc32(tensor.name.encode(errors="surrogateescape")))
    row_bytes = DTYPES[tensor.dtype].n_bytes((cols,))
    wanted = max(16, n_values // cols)
    parts, numbers = [], []
    for first, data in _pieces(tensor, row_bytes, rng):
        here = len(data) // row_bytes
        share = min(here, -(-wanted // min(_SAMPLED_PIECES, -(-n_rows // here))))
        rows = np.sort(rng.choice(here, share, replace=False))
        stored = np.frombuffer(data, "u1").reshape(here, row_bytes)[rows]
        parts.append(decode(tensor.dtype, stored.tobytes(), (share, cols)).astype("f4"))
        numbers.append(first + rows)
    values, rows = np.concatenate(parts), np.concatenate(numbers)
    matrices = rows // (shape[-2] if len(shape) > 1 else 1)
    use = np.ones((len(rows), 1)) if counts is None else counts.reshape(-1, 1)[matrices % counts.size].astype("f8")
    if weights is None:
        return RowSample(values, None, matrices, use)
    per_matrix = weights.reshape(-1, cols)
    return RowSample(values, per_matrix[matrices % len(per_matrix)], matrices, use)


def _pieces(tensor: CanonicalTensor, row_bytes: int, rng: np.random.Generator) -> Iterator[tuple[int, Array]]:
    """(first row, bytes) of some chunks of whole rows; other chunks are not read."""
    import numpy as np

    step = max(1, (1 << 20) // row_bytes) * row_bytes
    n = -(-tensor.n_bytes // step)
    drawn = set(rng.choice(n, min(n, _SAMPLED_PIECES), replace=False).tolist())
    at = 0
    for item in whole_units(tensor.items(row_bytes), row_bytes, step):
        size = item_bytes(item)
        if any(i * step < at + size and at < (i + 1) * step for i in drawn):
            yield at // row_bytes, np.frombuffer(item.run() if isinstance(item, Job) else item, "u1")
        at += size


def error_of(sample: RowSample, dtype: str) -> float:
    """The relative squared error of the sample in a type: sum of w (x - x')^2 over sum of w x^2.

    Raises RefusedError for values that the type cannot hold, MissingDependencyError without its encoder.
    """
    import numpy as np

    values = sample.values
    back: Array = np.empty_like(values)
    for matrix in np.unique(sample.matrices) if sample.weights is not None else [None]:
        rows = slice(None) if matrix is None else sample.matrices == matrix
        weights = None if sample.weights is None else sample.weights[rows][0]
        back[rows] = _round_trip(dtype, values[rows], weights)
    return relative_error(sample, back)


def relative_error(sample: RowSample, back: Array) -> float:
    """The relative squared error of the values `back` [rows, columns] of a sample: sum of w (x - x')^2 over w x^2."""
    import numpy as np

    values = sample.values
    scale = sample.use if sample.weights is None else sample.use * sample.weights
    total = float((scale * values.astype("f8") ** 2).sum())
    if total == 0:  # columns and experts that no token reached, or zeros
        scale, total = np.ones((1, 1)), float((values.astype("f8") ** 2).sum()) or 1.0
    return float((scale * (values.astype("f8") - back) ** 2).sum()) / total


def _round_trip(dtype: str, values: Array, weights: Array | None) -> Array:
    flat = values.reshape(-1)
    if DTYPES[dtype].kind == "plain":
        return decode(dtype, plain.encode(dtype, flat, None).tobytes(), values.shape)
    stored = ggml.encode(dtype, flat, values.shape[-1], weights)
    return ggml.decode(dtype, stored).reshape(values.shape)
