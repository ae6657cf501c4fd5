"""Reads rows of one or several concatenated source tensors, also of transposed matrices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.stream import TensorSource
from aprfmt.errors import RefusedError
from aprfmt.io.pipe import CHUNK_BYTES
from aprfmt.io.recent import RecentValues
from aprfmt.io.source import Buffer
from aprfmt.types import Array, Shape

_SMALL = 1e-7
"""Added to the norm of a column before dividing by it."""


def column_lengths(lines: list[SourceRows], n_rows: int, row_elements: int) -> Array:
    """The norm of each column, float32 [row_elements], plus epsilon."""
    import numpy as np

    squares = np.zeros(row_elements)
    step = max(1, CHUNK_BYTES // (8 * row_elements))
    for start in range(0, n_rows, step):
        block = take_rows(lines, np.arange(start, min(start + step, n_rows)), row_elements)
        squares += np.square(block, dtype=np.float64).sum(axis=0)
    return np.sqrt(squares).astype(np.float32) + np.float32(_SMALL)


def read_rows(sources: Sequence[TensorSource], ends: Array, part: Array, row_bytes: int) -> Buffer:
    """The rows `part` of all concatenated sources; `ends` are the rows at which the sources end.

    Rows that are close together in one source are read in one call with the rows in between, and picked from that;
    otherwise each run of neighbours is a separate read.
    """
    import numpy as np

    lowest, highest = int(part.min()), int(part.max()) + 1
    which = int(np.searchsorted(ends, lowest, side="right"))
    if highest <= ends[which] and highest - lowest <= 4 * len(part) + 64:
        first = lowest - (int(ends[which - 1]) if which else 0)
        near = bytearray((highest - lowest) * row_bytes)
        sources[which].read_into(first * row_bytes, memoryview(near))
        # A row as one void element: numpy then copies row by row instead of byte by byte.
        return as_bytes(np.frombuffer(near, dtype=np.dtype((np.void, row_bytes)))[part - lowest])
    out = bytearray(len(part) * row_bytes)
    view = memoryview(out)
    owner = np.searchsorted(ends, part, side="right")
    cuts = np.flatnonzero((np.diff(part) != 1) | (np.diff(owner) != 0)) + 1
    for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(part)], strict=True):
        which = int(owner[begin])
        first = int(part[begin]) - (int(ends[which - 1]) if which else 0)
        sources[which].read_into(first * row_bytes, view[begin * row_bytes : end * row_bytes])
    return out


_HELD_MATRICES = 2


class SourceRows:
    """A source as rows of `row_elements` elements, read on demand.

    A `transposed` source is read matrix by matrix, and the last ones are cached: each contributes to all of its rows.
    """

    def __init__(self, source: TensorSource, shape: Shape, transposed: bool, row_elements: int) -> None:
        import numpy as np

        self.element = np.dtype("<f4" if source.dtype == "F32" else f"<u{DTYPES[source.dtype].block_bytes}")
        self.count = prod(shape) // row_elements
        self._source = source
        self._row_bytes = row_elements * self.element.itemsize
        self._matrix = shape[-2:] if transposed and len(shape) >= 2 else None
        if self._matrix is not None and self._matrix[0] != row_elements:
            raise RefusedError(f"{list(shape)} does not transpose into rows of {row_elements}", tensor=source.name)
        self._matrices: RecentValues[int, Array] = RecentValues(_HELD_MATRICES)

    def take(self, part: Array) -> Array:
        """The rows `part`, as [rows, row_elements]."""
        import numpy as np

        if self._matrix is None:
            ends = np.array([self.count])
            return np.frombuffer(read_rows([self._source], ends, part, self._row_bytes), self.element).reshape(
                len(part), -1
            )
        out = np.empty((len(part), self._matrix[0]), self.element)
        number, row = np.divmod(part, self._matrix[1])
        for which in np.unique(number):
            mask = number == which
            matrix = self._matrices.get(int(which), partial(self._read, int(which)))
            out[mask] = matrix[row[mask]]
        return out

    def _read(self, number: int) -> Array:
        """Matrix `number`, transposed."""
        import numpy as np

        assert self._matrix is not None
        stored = np.empty(self._matrix, self.element)
        self._source.read_into(number * stored.nbytes, stored.reshape(-1).view("u1").data)
        return stored.T


def take_rows(lines: Sequence[SourceRows], part: Array, row_elements: int) -> Array:
    """The rows `part` of all concatenated sources, as [rows, row_elements]."""
    import numpy as np

    counts = [each.count for each in lines]
    ends = np.cumsum(counts)
    owner = np.searchsorted(ends, part, side="right")
    out = np.empty((len(part), row_elements), lines[0].element)
    for which in np.unique(owner):
        mask = owner == which
        out[mask] = lines[which].take(part[mask] - (ends[which] - counts[which]))
    return out


def as_bytes(array: Array) -> Buffer:
    """The bytes of an array in the order of its elements."""
    import numpy as np

    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
