"""Figures of a tensor in constant memory: bytes are decoded in pieces of about 64 Ki values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from aprfmt.codecs.dtypes import DTYPES, n_elements
from aprfmt.codecs.recode import decode, is_padded, stored_bytes
from aprfmt.codecs.stream import rebatch, regroup
from aprfmt.io.pipe import source_chunks
from aprfmt.io.source import Buffer
from aprfmt.model import Tensor
from aprfmt.types import Array, Shape

BLOCK_VALUES = 1 << 16
"""Values decoded at a time: a multiple of every block size, small enough to stay in the cache as float64."""


@dataclass(slots=True)
class Stats:
    """Running figures of one tensor; mean, std, min and max are over the finite values.

    `moments=False` leaves mean and std out, which saves most of the time.
    """

    moments: bool = True
    n: int = 0
    nan_count: int = 0
    inf_count: int = 0
    zero_count: int = 0
    min: float = math.inf
    max: float = -math.inf
    _mean: float = 0.0
    _m2: float = 0.0
    _n_finite: int = 0

    def add(self, block: Array) -> None:
        """Takes the values of `block` in, by the pairwise update of mean and squared deviation."""
        import numpy as np

        values = block.view(block.real.dtype) if block.dtype.kind == "c" else block
        values = values.astype("u1") if values.dtype.kind == "b" else values
        if not values.size:
            return
        self.n += values.size
        low, high = float(values.min()), float(values.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            self.nan_count += int(np.isnan(values).sum())
            self.inf_count += int(np.isinf(values).sum())
            values = values[np.isfinite(values)]
            if not values.size:
                return
            low, high = float(values.min()), float(values.max())
        self.min, self.max = min(self.min, low), max(self.max, high)
        if low <= 0 <= high:
            self.zero_count += values.size - int(np.count_nonzero(values))
        if not self.moments:
            return
        values = values.astype(np.float64, copy=False)
        n, mean = values.size, float(values.mean())
        centred = values - mean
        with np.errstate(over="ignore"):
            m2 = float(np.einsum("i,i->", centred, centred))  # no BLAS: its threads cost more than they give
        total = self._n_finite + n
        delta = mean - self._mean
        self._m2 += m2 + delta * delta * (self._n_finite * n / total)
        self._mean += delta * n / total
        self._n_finite = total

    def to_json(self) -> dict[str, float | None]:
        """The keys of `tensors --stats`; None where no finite value was seen."""
        some, known = self.min <= self.max, self._n_finite > 0
        return {
            "mean": self._mean if known else None,
            "std": math.sqrt(self._m2 / self._n_finite) if known else None,
            "min": self.min if some else None,
            "max": self.max if some else None,
            "nan_count": self.nan_count,
            "inf_count": self.inf_count,
            "zero_fraction": self.zero_count / self.n if self.n else 0.0,
        }


def tensor_stats(tensor: Tensor) -> Stats:
    """Figures of all values of `tensor`. Raises UnsupportedError for a dtype that cannot be decoded."""
    stats = Stats()
    for block in blocks(tensor):
        stats.add(block)
    return stats


def blocks(tensor: Tensor, step: int = BLOCK_VALUES) -> Iterator[Array]:
    """All values of `tensor` in order, as flat arrays of `step` values (the last one shorter)."""
    return values(
        tensor.dtype,
        tensor.shape,
        lambda: source_chunks(tensor.source, tensor.offset, tensor.n_bytes),
        step,
        name=tensor.name,
    )


def values(
    dtype: str,
    shape: tuple[int, ...],
    chunks: Callable[[], Iterable[Buffer]],
    step: int = BLOCK_VALUES,
    *,
    name: str | None = None,
) -> Iterator[Array]:
    """Decodes the stored bytes that `chunks()` produces; flat arrays of `step` values, the last shorter.

    BF16 and quantized dtypes come as float32, the others as they are stored.
    """
    for block in rebatch(_pieces(dtype, shape, chunks(), name), step):
        for start in range(0, block.size, step):
            yield block[start : start + step]


def _pieces(dtype: str, shape: Shape, chunks: Iterable[Buffer], name: str | None) -> Iterator[Array]:
    row, left, head, stream = DTYPES[dtype], n_elements(shape), b"", iter(chunks)
    unit_shape: Shape = (row.block,)
    if dtype == "AprQ8":  # one float32 scale for the whole tensor, which each piece needs, then a byte a value
        unit_shape, unit_bytes = (1,), 1
        rest: Buffer = b""
        while len(head) < 4 and (part := next(stream, None)) is not None:
            head, rest = head + bytes(part[: 4 - len(head)]), part[4 - len(head) :]
        stream = chain([rest], stream)
    elif is_padded(row, shape):  # each row was filled up to whole blocks
        unit_shape, unit_bytes = shape[-1:], stored_bytes(dtype, shape[-1:], padded=True)
    else:
        unit_bytes = row.block_bytes
    size = max(1, BLOCK_VALUES // unit_shape[0]) * unit_bytes
    for buffer in regroup(stream, size, size):  # whole steps, so that none is put together from two
        n_units = len(buffer) // unit_bytes
        n = min(n_units * unit_shape[0], left)
        piece_shape = (n_units, *unit_shape) if is_padded(row, shape) else (n,)
        yield decode(dtype, head + buffer if head else buffer, piece_shape, tensor=name).reshape(-1)
        left -= n
