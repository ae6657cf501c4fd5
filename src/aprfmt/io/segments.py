"""What a file will consist of, decided before a byte is written: literals, zeros and streams, end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from aprfmt.io.source import Buffer


@dataclass(frozen=True, slots=True)
class Job:
    """`n_bytes` bytes that `run()` makes, in any thread and any order with other jobs."""

    n_bytes: int
    run: Callable[[], Buffer]


Item: TypeAlias = Buffer | Job
"""A piece of a stream: bytes, or the job that makes them."""


def item_bytes(item: Item) -> int:
    """Length of a piece in bytes."""
    return item.n_bytes if isinstance(item, Job) else memoryview(item).nbytes


def run_jobs(items: Iterable[Item]) -> Iterator[Buffer]:
    """The bytes of `items`, their jobs run one after the other where they are needed."""
    for item in items:
        yield item.run() if isinstance(item, Job) else item


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that are known already (a header, an index)."""

    data: Buffer

    @property
    def n_bytes(self) -> int:
        """Length in bytes."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Zeros:
    """Padding."""

    n_bytes: int


@dataclass(frozen=True, slots=True)
class Stream:
    """`n_bytes` bytes that `chunks()` gives piece by piece when they are written; `label` names the tensor.

    A buffer must stay untouched after it was given: another thread writes it.
    """

    n_bytes: int
    chunks: Callable[[], Iterable[Item]]
    label: str = ""


Segment: TypeAlias = Literal | Zeros | Stream


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One output file. With `crc_footer` a little-endian CRC-32 of everything before it ends the file."""

    name: str
    segments: Sequence[Segment]
    crc_footer: bool = False

    @property
    def n_bytes(self) -> int:
        """Final size of the file in bytes."""
        return sum(segment.n_bytes for segment in self.segments) + (4 if self.crc_footer else 0)


def padding(n_bytes: int, alignment: int) -> int:
    """Bytes missing from `n_bytes` to the next multiple of `alignment`."""
    return -n_bytes % alignment
