"""The values of a stored tensor in constant memory: decoded in chunks of about 64 Ki values, and histograms."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TypedDict

from aprfmt.codecs.dtypes import DTYPES, n_elements
from aprfmt.codecs.recode import decode, is_padded, stored_bytes
from aprfmt.codecs.stream import rebatch, regroup
from aprfmt.io.source import Buffer
from aprfmt.types import Array, Shape

BLOCK_VALUES = 1 << 16
"""Values decoded at a time: a multiple of every block size, small enough for the cache as float64."""

_BINS = 128
_DRAWN_BINS = 64


def values(
    dtype: str,
    shape: tuple[int, ...],
    chunks: Callable[[], Iterable[Buffer]],
    step: int = BLOCK_VALUES,
    *,
    name: str | None = None,
) -> Iterator[Array]:
    """Decodes the stored bytes that `chunks()` yields; flat arrays of `step` values, the last one shorter.

    BF16 and quantized dtypes become float32, the others are unchanged.
    """
    for block in rebatch(_pieces(dtype, shape, chunks(), name), step):
        for start in range(0, block.size, step):
            yield block[start : start + step]


def _pieces(dtype: str, shape: Shape, chunks: Iterable[Buffer], name: str | None) -> Iterator[Array]:
    row, left, head, stream = DTYPES[dtype], n_elements(shape), b"", iter(chunks)
    unit_shape: Shape = (row.block,)
    if dtype == "AprQ8":  # one float32 scale for the whole tensor, which each piece needs, then one byte per value
        unit_shape, unit_bytes = (1,), 1
        rest: Buffer = b""
        while len(head) < 4 and (part := next(stream, None)) is not None:
            head, rest = head + bytes(part[: 4 - len(head)]), part[4 - len(head) :]
        stream = chain([rest], stream)
    elif is_padded(row, shape):  # each row was padded to whole blocks
        unit_shape, unit_bytes = shape[-1:], stored_bytes(dtype, shape[-1:], padded=True)
    else:
        unit_bytes = row.block_bytes
    size = max(1, BLOCK_VALUES // unit_shape[0]) * unit_bytes
    for buffer in regroup(stream, size, size):  # whole steps, so that no array is joined from two pieces
        n_units = len(buffer) // unit_bytes
        n = min(n_units * unit_shape[0], left)
        piece_shape = (n_units, *unit_shape) if is_padded(row, shape) else (n,)
        yield decode(dtype, head + buffer if head else buffer, piece_shape, tensor=name).reshape(-1)
        left -= n


class HistogramJson(TypedDict):
    """Counts of equal bins from -reach to reach."""

    reach: float
    counts: list[int]


class Histogram:
    """A histogram with 128 equal bins from -reach to reach, which the first block of values determines.

    Values beyond it count in the outer bins; NaN and infinities are ignored.
    """

    def __init__(self) -> None:
        self.reach = 0.0
        self.counts: Array | None = None

    def add(self, block: Array) -> None:
        """Adds the values of `block`."""
        import numpy as np

        values = block.view(block.real.dtype) if block.dtype.kind == "c" else block
        values = values.astype(np.float64 if values.dtype.itemsize > 4 else np.float32, copy=False)
        values = values[np.isfinite(values)]
        if not values.size:
            return
        if self.counts is None:
            largest = float(np.abs(values).max()) or 1.0
            rms = math.sqrt(float(np.mean(np.square(values.astype(np.float64) / largest))))  # of the largest
            self.reach = min(1.25 * min(1.0, 8 * rms) * largest, sys.float_info.max) or 1.0
            self.counts = np.zeros(_BINS, np.int64)
        scaled = (values.astype(np.float64) / self.reach + 1) * (_BINS / 2)
        self.counts += np.bincount(np.clip(scaled, 0, _BINS - 1).astype(np.int16), minlength=_BINS)

    def to_json(self) -> HistogramJson | None:
        """None without finite values."""
        return None if self.counts is None else {"reach": self.reach, "counts": self.counts.tolist()}

    def bulk(self) -> float:
        """The magnitude below which 99.9 % of the values lie, at the resolution of bins; 0 without values."""
        if self.counts is None:
            return 0.0
        half = _BINS // 2
        from_outside = (self.counts + self.counts[::-1])[:half].cumsum()
        outer = int((from_outside <= 0.001 * self.counts.sum()).sum())  # bins that contain at most 0.1 %
        return self.reach * max(1, half - outer) / half

    def rebin(self, reach: float) -> list[float]:
        """The counts in 64 bins from -reach to reach, assuming uniform density within each bin."""
        import numpy as np

        if self.counts is None:
            return [0.0] * _DRAWN_BINS
        below = np.concatenate(([0], self.counts.cumsum()))
        edges = np.linspace(-self.reach, self.reach, _BINS + 1)
        drawn = np.linspace(-reach, reach, _DRAWN_BINS + 1)
        return [float(count) for count in np.diff(np.interp(drawn, edges, below))]
