"""Stored bytes of tensors, and regrouping of their streams, so that codecs get whole blocks from any chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from aprfmt.codecs.dtypes import Measured
from aprfmt.io.pipe import Item, Job
from aprfmt.io.source import Buffer
from aprfmt.types import Array

STEP = 1 << 18
"""Values per piece: 1 MiB of float32; a multiple of every block size."""

BLOCK = 1 << 16
"""Values per arithmetic step, so that temporaries fit the cache."""


class TensorSource(Measured, Protocol):
    """Stored bytes of a tensor with random access: a tensor of a file, or one computed on read."""

    @property
    def name(self) -> str:
        """Name of the tensor."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the tensor."""


def read_whole(source: TensorSource) -> memoryview:
    """Reads all bytes into private writable memory, unaffected by changes of the file."""
    return read_part(source, 0, source.n_bytes)


def read_part(source: TensorSource, start: int, n_bytes: int) -> memoryview:
    """Reads `n_bytes` bytes from byte `start` on into private writable memory."""
    import numpy as np

    data = np.empty(n_bytes, np.uint8).data  # a bytearray would be zeroed while other threads wait
    source.read_into(start, data)
    return data


def regroup(chunks: Iterable[Buffer], unit: int, piece: int) -> Iterator[Buffer]:
    """Regroups bytes into chunks that are multiples of `unit`, at most `piece` (itself a multiple) long.

    A remainder that is not a whole unit comes last.
    """
    pending = b""
    for chunk in chunks:
        view = memoryview(chunk)
        if not view.nbytes:
            continue
        view = view.cast("B")
        if pending:  # never a whole unit
            take = unit - len(pending)
            pending += bytes(view[:take])
            view = view[take:]
            if len(pending) < unit:
                continue
            yield pending
            pending = b""
        whole = len(view) // unit * unit
        for start in range(0, whole, piece):
            yield view[start : min(start + piece, whole)]
        pending = bytes(view[whole:])
    if pending:
        yield pending


def whole_units(items: Iterable[Item], unit: int, piece: int) -> Iterator[Item]:
    """`regroup` for items: keeps jobs of whole units; computes everything else at once and regroups it."""
    pending: Buffer = b""
    for item in items:
        if isinstance(item, Job):
            if not pending and item.n_bytes % unit == 0:
                yield item
                continue
            item = item.run()
        parts = list(regroup([pending, item], unit, piece))
        pending = parts.pop() if parts and len(parts[-1]) % unit else b""
        yield from parts
    if len(pending):
        yield pending


def rebatch(arrays: Iterable[Array], unit: int) -> Iterator[Array]:
    """Regroups values into 1-d arrays whose lengths are multiples of `unit`; a remainder comes last."""
    import numpy as np

    pending: Array | None = None
    for values in arrays:
        if pending is not None:
            values = np.concatenate([pending, values])
        whole = values.size // unit * unit
        if whole:
            yield values[:whole]
        pending = values[whole:] if whole < values.size else None
    if pending is not None:
        yield pending


def blocks(n: int, size: int = BLOCK) -> Iterator[slice]:
    """Slices of at most `size` that cover range(n)."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))
