"""Splits one stream of a weight into several stored tensors: codes, scales, zero points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Lock
from typing import Protocol

from aprfmt.codecs.stream import whole_units
from aprfmt.io.pipe import CHUNK_BYTES, Item, Job, item_bytes
from aprfmt.io.source import Buffer


class Split(Protocol):
    """A stream as several stored tensors."""

    def items(self, part: int) -> Iterator[Item]:
        """The stored bytes of a part."""


@dataclass(frozen=True, slots=True)
class SplitStream:
    """The parts of a stream, all computed from the same piece.

    The first part is written first. The others of a piece are kept until they are written, and recomputed if a missing
    piece is requested.

    Attributes:
        unit: bytes of the stream that are processed together; the last unit may be shorter.
        values: yields the stream, preferably in whole units.
        sizes: bytes of each part for that many bytes of the stream.
        make: computes them.
    """

    unit: int
    values: Callable[[int], Iterable[Item]]
    sizes: Callable[[int], Sequence[int]]
    make: Callable[[Buffer], Sequence[Buffer]]
    _kept: dict[int, list[Buffer | None]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def items(self, part: int) -> Iterator[Item]:
        """The stored bytes of a part."""
        pieces = whole_units(self.values(self.unit), self.unit, max(1, CHUNK_BYTES // self.unit) * self.unit)
        for number, item in enumerate(pieces):
            yield Job(self.sizes(item_bytes(item))[part], partial(self._make, item, number, part))

    def _make(self, item: Item, number: int, part: int) -> Buffer:
        if part:
            with self._lock:
                kept = self._kept.get(number, [])
                found = kept[part - 1] if kept else None
                if kept:
                    kept[part - 1] = None
                    if not any(one is not None for one in kept):
                        del self._kept[number]
            if found is not None:
                return found
        made = self.make(item.run() if isinstance(item, Job) else item)
        if not part:
            with self._lock:
                self._kept[number] = [*made[1:]]
        return made[part]


class _Assembly:
    """The parts of a stream while they are made, by whichever threads wait for them."""

    def __init__(self, stream: TransposedStream) -> None:
        import numpy as np

        self.parts = [np.empty(shape, "u1") for shape in stream.shapes]
        self.lines_left = sum(lines for lines, _ in stream.shapes)
        self._stream, self._changed = stream, Condition()
        size = max(1, CHUNK_BYTES // stream.unit) * stream.unit
        self._pieces = self._numbered(whole_units(stream.values(stream.unit), stream.unit, size))
        self._running = 0
        self._error: BaseException | None = None

    @staticmethod
    def _numbered(pieces: Iterable[Item]) -> Iterator[tuple[int, Item]]:
        start = 0
        for piece in pieces:
            yield start, piece
            start += item_bytes(piece)

    def finish(self) -> None:
        """Makes pieces that no other thread has begun, then waits for the others. Raises what any of them raised."""
        while True:
            with self._changed:
                piece = self._next()
                if piece is None:
                    self._changed.wait_for(lambda: not self._running or self._error is not None)
                if self._error is not None:
                    raise self._error
                if piece is None:
                    return
                self._running += 1
            error = None
            try:
                self._place(*piece)
            except BaseException as caught:  # raised by every thread that waits
                error = caught
            with self._changed:
                self._error = self._error or error
                self._running -= 1
                self._changed.notify_all()

    def _next(self) -> tuple[int, Item] | None:
        try:
            return next(self._pieces, None) if self._error is None else None
        except BaseException as error:
            self._error = error
            self._changed.notify_all()
            return None

    def _place(self, start: int, piece: Item) -> None:
        import numpy as np

        unit = self._stream.unit
        made = self._stream.make(piece.run() if isinstance(piece, Job) else piece)
        for part, columns in zip(self.parts, made, strict=True):
            lines = np.frombuffer(columns, "u1").reshape(len(part), -1)
            per_unit = lines.shape[1] // (item_bytes(piece) // unit)
            first = start // unit * per_unit
            part[:, first : first + lines.shape[1]] = lines


@dataclass(slots=True)
class TransposedStream:
    """Parts whose lines run across the rows of a weight, so that all of it must be read before the first is written.

    They are made once, by all threads that ask for any of them, and kept until the last of them is written.

    Attributes:
        unit: bytes of the stream that are made together, a divisor of its length.
        values: gives the stream; its pieces had better be whole units.
        shapes: lines of each part, and their bytes.
        make: gives the columns that some units become in each part, line by line.
    """

    unit: int
    values: Callable[[int], Iterable[Item]]
    shapes: Sequence[tuple[int, int]]
    make: Callable[[Buffer], Sequence[Buffer]]
    _assembly: _Assembly | None = None
    _lock: Lock = field(default_factory=Lock)

    def items(self, part: int) -> Iterator[Item]:
        """The stored bytes of a part."""
        lines, n_bytes = self.shapes[part]
        step = max(1, CHUNK_BYTES // n_bytes)
        for start in range(0, lines, step):
            stop = min(start + step, lines)
            yield Job((stop - start) * n_bytes, partial(self._lines, part, start, stop))

    def _lines(self, part: int, start: int, stop: int) -> Buffer:
        with self._lock:
            assembly = self._assembly = self._assembly or _Assembly(self)
        assembly.finish()
        with self._lock:
            assembly.lines_left -= stop - start
            if not assembly.lines_left:
                self._assembly = None
        lines: Buffer = assembly.parts[part][start:stop].reshape(-1).data
        return lines
