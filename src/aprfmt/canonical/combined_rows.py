"""Tensors with other rows than their stored source: the base of them all, and rows in a new order and sums of rows."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from aprfmt.canonical.source_rows import read_rows
from aprfmt.codecs.packed import TensorScales
from aprfmt.codecs.recode import decode, encode
from aprfmt.codecs.stream import STEP, TensorSource
from aprfmt.types import Array, Shape


@dataclass(frozen=True, slots=True)
class OtherRows:
    """A tensor with another number of rows than its source, read where that is stored.

    Attributes:
        source: the stored tensor.
        n_rows: the number of rows; each is whole blocks.
        scales: none: a tensor with tensor scales is refused.
    """

    source: TensorSource
    n_rows: int
    scales: TensorScales

    @property
    def name(self) -> str:
        """Name of the tensor."""
        return self.source.name

    @property
    def dtype(self) -> str:
        """Dtype of the tensor."""
        return self.source.dtype

    @property
    def shape(self) -> Shape:
        """Row-major shape."""
        return (self.n_rows, *self.source.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.source.n_bytes // self.source.shape[0]

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return self.row_bytes * self.n_rows


def row_values(source: TensorSource, rows: Array) -> Array:
    """The values of some rows of a tensor, in any order: float32 [rows, values]."""
    import numpy as np

    values = prod(source.shape[1:])
    out = np.empty((len(rows), values), np.float32)
    size, step = source.n_bytes // source.shape[0], max(1, STEP // max(1, values))
    for at in range(0, len(rows), step):
        some = rows[at : at + step]
        data = read_rows([source], np.array([source.shape[0]]), some, size)
        out[at : at + step] = decode(source.dtype, data, (len(some), *source.shape[1:])).reshape(len(some), -1)
    return out


@dataclass(frozen=True, slots=True)
class RowSums:
    """New rows as copies and sums of old ones.

    Attributes:
        copied: the old row of each new one, int64 [new]; -1 for a sum.
        starts: where the terms of each new row start, int64 [new + 1]; a sum without terms is 0.
        index, weight: the old row of each term, int64, and its weight, float32.
    """

    copied: Array
    starts: Array
    index: Array
    weight: Array


@dataclass(frozen=True, slots=True)
class CombinedRows(OtherRows):
    """Copies and sums of rows; sums are computed in float32 while they are read, and rounded once."""

    made: RowSums

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset`."""
        import numpy as np

        if not len(buffer):
            return
        size = self.row_bytes
        first, last = offset // size, -(-(offset + len(buffer)) // size)
        copied = self.made.copied[first:last]
        out = np.empty((len(copied), size), np.uint8)
        if len(stored := np.flatnonzero(copied >= 0)):
            data = read_rows([self.source], np.array([self.source.shape[0]]), copied[stored], size)
            out[stored] = np.frombuffer(data, np.uint8).reshape(-1, size)
        sums = first + np.flatnonzero(copied < 0)
        longest = int((self.made.starts[sums + 1] - self.made.starts[sums]).max(initial=1))
        step = max(1, STEP // (longest * prod(self.source.shape[1:])))
        for at in range(0, len(sums), step):
            some = sums[at : at + step]
            out[some - first] = np.frombuffer(encode(self.dtype, self._sums(some)), np.uint8).reshape(-1, size)
        buffer[:] = out.reshape(-1).data[offset - first * size :][: len(buffer)]

    def _sums(self, rows: Array) -> Array:
        """Some rows that are sums, ascending: float32, in the shape of the tensor."""
        import numpy as np

        starts = self.made.starts
        terms = slice(int(starts[rows[0]]), int(starts[rows[-1] + 1]))  # copied rows in between have none
        used, where = np.unique(self.made.index[terms], return_inverse=True)
        out = np.zeros((len(rows), prod(self.source.shape[1:])), np.float32)
        has_terms = starts[rows] < starts[rows + 1]
        if len(used):
            values = row_values(self.source, used)[where] * self.made.weight[terms, None]
            out[has_terms] = np.add.reduceat(values, starts[rows[has_terms]] - terms.start)
        return out.reshape(len(rows), *self.source.shape[1:])
