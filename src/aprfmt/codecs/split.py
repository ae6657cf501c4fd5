"""Splits one stream of a weight into several stored tensors: codes, scales, zero points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

from aprfmt.codecs.stream import whole_units
from aprfmt.io.pipe import CHUNK_BYTES, Item, Job, item_bytes
from aprfmt.io.source import Buffer


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
