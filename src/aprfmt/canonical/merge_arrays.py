"""Arithmetic on ranges of weights: scratch memory, sums in a fixed order, random masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from threading import local
from typing import Protocol

from aprfmt.types import Array

CHUNK = 1 << 20
"""Values per call. Threads wait for each other between calls, so calls are few and long."""


_RUN = 256


class Values(Protocol):
    """The values of a weight in one model."""

    def read_into(self, first: int, out: Array) -> None:
        """Fills `out`, float32, with the elements from `first` on, in row-major order."""


class _Scratch(local):
    """A thread's scratch memory for the values of a chunk, reused for the next one.

    numpy requests large pages for arrays of this size: they take half the time of fresh small ones.
    """

    def __init__(self) -> None:
        self._arrays: list[Array] = []
        self._n_taken = 0

    def start(self) -> None:
        """Releases everything for reuse."""
        self._n_taken = 0

    def take(self, n: int) -> Array:
        """An uninitialized array of `n` float32, at most CHUNK."""
        import numpy as np

        if self._n_taken == len(self._arrays):
            self._arrays.append(np.empty(CHUNK, np.float32))
        self._n_taken += 1
        return self._arrays[self._n_taken - 1][:n]

    @contextmanager
    def lent(self, n_bytes: int) -> Iterator[memoryview]:
        """Scratch bytes that are released at the end of the block."""
        import numpy as np

        if n_bytes > 4 * CHUNK:
            yield np.empty(n_bytes, np.uint8).data
            return
        data: memoryview = self.take(CHUNK).view(np.uint8)[:n_bytes].data
        yield data
        self._n_taken -= 1


SCRATCH = _Scratch()


def values_in(of: Values, first: int, last: int) -> Array:
    """Elements `first` to `last` as float32, in scratch memory."""
    out = SCRATCH.take(last - first)
    of.read_into(first, out)
    return out


def sum_of(x: Array) -> float:
    """The sum of a vector of float32: runs of 256 in float32, their sums in float64."""
    import numpy as np

    whole = len(x) // _RUN * _RUN
    return float(np.einsum("ij->i", x[:whole].reshape(-1, _RUN)).sum(dtype=np.float64)) + float(x[whole:].sum())


def sum_of_products(x: Array, y: Array) -> float:
    """The dot product of two vectors of float32: runs of 256 products in float32, their sums in float64."""
    import numpy as np

    whole = len(x) // _RUN * _RUN
    runs = np.einsum("ij,ij->i", x[:whole].reshape(-1, _RUN), y[:whole].reshape(-1, _RUN))
    return float(runs.sum(dtype=np.float64)) + float(np.einsum("i,i->", x[whole:], y[whole:]))


def bin_of(counts: Array | None, k: int) -> tuple[int, int, int]:
    """The bin of the `k`-th largest value, its rank in that bin (from 1), and the bin's count."""
    import numpy as np

    assert counts is not None
    above = np.cumsum(counts[::-1])
    place = int(np.searchsorted(above, k))
    found = len(counts) - 1 - place
    return found, k - int(above[place - 1] if place else 0), int(counts[found])


_DRAWS = 4
"""16-bit numbers per output of the generator."""


def dare_mask(seed: int, name: str, model: int, first: int, last: int, density: float) -> Array:
    """Which of the elements [first, last) of the weight `name` of an input are kept: bool, each with probability
    `density`.

    The probability has 16 bits.
    """
    import numpy as np

    key = int.from_bytes(blake2b(f"{seed}\0{model}\0{name}".encode(), digest_size=16).digest(), "little")
    low, high = first // _DRAWS, -(-last // _DRAWS)
    generator = np.random.PCG64DXSM(key)
    generator.advance(low)
    drawn = generator.random_raw(high - low).view("<u2")
    kept: Array = drawn[first - low * _DRAWS : last - low * _DRAWS] < min(round(density * (1 << 16)), (1 << 16) - 1)
    return kept
