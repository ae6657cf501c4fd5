"""Statistics of a tensor in constant memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from aprfmt.codecs.values import BLOCK_VALUES, values
from aprfmt.io.pipe import source_chunks
from aprfmt.model import Tensor
from aprfmt.types import Array


@dataclass(slots=True)
class Stats:
    """Running statistics of one tensor; mean, std, min and max cover the finite values.

    `moments=False` omits mean and std, which saves most of the time.
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
        """Adds the values of `block`, with the pairwise update of mean and squared deviation."""
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
        """The keys of `tensors --stats`; None without finite values."""
        some, known = self.min <= self.max, self._n_finite > 0
        return {
            "mean": self._mean if known else None, "std": math.sqrt(self._m2 / self._n_finite) if known else None,
            "min": self.min if some else None, "max": self.max if some else None, "nan_count": self.nan_count,
            "inf_count": self.inf_count, "zero_fraction": self.zero_count / self.n if self.n else 0.0,
        }  # fmt: skip


def tensor_stats(tensor: Tensor) -> Stats:
    """Statistics of all values of `tensor`. Raises UnsupportedError for a dtype that cannot be decoded."""
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
