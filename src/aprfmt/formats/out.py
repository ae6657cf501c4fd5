"""A tensor on its way into a container: every writer takes these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aprfmt.io.segments import Stream
from aprfmt.io.source import Buffer


@dataclass(frozen=True, slots=True)
class OutTensor:
    """Name, dtype, shape (row-major) and the bytes, produced when they are written.

    `chunks()` gives the stored bytes of `dtype` in order, `n_bytes` in all; it may be called more than once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int
    chunks: Callable[[], Iterable[Buffer]]

    def stream(self) -> Stream:
        """The bytes as a segment of a file."""
        return Stream(self.n_bytes, self.chunks, self.name)
