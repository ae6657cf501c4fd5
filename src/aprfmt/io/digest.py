"""What tells that a file is the one that was imported: its CRC-32, or its BLAKE3, of bytes that move anyway.

A CRC costs next to nothing and finds accidents. BLAKE3 is made by threads, since it takes a quarter of the time of a
copy.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from secrets import token_urlsafe
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from aprfmt.io.crc import ReadChecksum, crc32, crc32_of_range
from aprfmt.io.source import Buffer, Source

if TYPE_CHECKING:
    from blake3 import blake3

CRC32, BLAKE3 = "crc32", "blake3"

KINDS = {CRC32: ("CRC-32", 8), BLAKE3: ("BLAKE3", 64)}
"""What users call each kind of digest, and how many hexadecimal digits it has."""


class Digest(NamedTuple):
    """A digest of a file: a kind of KINDS, and its value in hex."""

    kind: str
    value: str


_BUFFER_BYTES = 512 << 10  # stays in the cache
_QUEUE_LENGTH = 4


def new_hash() -> blake3:
    """An empty BLAKE3."""
    from blake3 import blake3

    return blake3()


def digest_of(kind: str, parts: Iterable[Buffer]) -> Digest:
    """The digest of parts laid end to end."""
    if kind == CRC32:
        value = 0
        for part in parts:
            value = crc32(part, value)
        return crc_digest(value)
    found = new_hash()
    for part in parts:
        found.update(part)
    return Digest(kind, found.hexdigest())


def crc_digest(value: int) -> Digest:
    """A CRC-32 as a digest."""
    return Digest(CRC32, f"{value:08x}")


def altered(name: str, kind: str) -> str:
    """What is wrong with a restored file whose digest of that kind does not fit."""
    return f"{name} would differ from the imported file: its {KINDS[kind][0]} differs"


class StreamDigest:
    """BLAKE3 of buffers that are handed over in order and stay as they are; use it in a `with` block."""

    def __init__(self) -> None:
        self._hash = new_hash()
        self._queue: queue.Queue[Buffer | None] = queue.Queue(_QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._work, name="apr-hash", daemon=True)

    def _work(self) -> None:
        while (data := self._queue.get()) is not None:
            self._hash.update(data)

    def add(self, data: Buffer) -> None:
        """Takes the next bytes; waits where many are left to do."""
        self._queue.put(data)

    def __enter__(self) -> StreamDigest:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._queue.put(None)
        self._thread.join()

    def digest(self) -> Digest:
        """The digest, after the block."""
        return Digest(BLAKE3, self._hash.hexdigest())


class PendingDigest(Protocol):
    """A digest of a file that is known when all of it was read; the record of its source.

    Attributes:
        kind: of KINDS.
        stand_in: a text of the digest's length that nobody can foresee, for the place where it will stand.
    """

    kind: ClassVar[str]
    stand_in: str

    def digest(self) -> Digest:
        """The digest of the whole file; what was not read yet is read now. Raises as Source.read_into."""
        ...


def _placeholder(kind: str) -> str:
    return token_urlsafe(KINDS[kind][1] * 3 // 4)


def follow(kind: str, sources: Sequence[Source]) -> list[PendingDigest]:
    """Takes the digest of each file while it is read."""
    if kind == BLAKE3:
        return list(Follower(sources).trails)
    return [PendingCrc(source) for source in sources]


class PendingCrc(ReadChecksum):
    """The CRC-32 of what was read of a file, and in the end of all of it."""

    kind: ClassVar[str] = CRC32

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.stand_in = _placeholder(CRC32)
        self._source = source
        source.record = self

    def digest(self) -> Digest:
        """The digest of the whole file; what was not read yet is read now. Raises as Source.read_into."""
        return crc_digest(crc32_of_range(self._source, 0, self._source.size))


@dataclass(eq=False, slots=True)
class ProgressiveDigest:
    """How far a file was read, and how far its BLAKE3 has come behind that."""

    kind: ClassVar[str] = BLAKE3
    source: Source
    follower: Follower
    hash: blake3 = field(default_factory=new_hash)
    stand_in: str = field(default_factory=lambda: _placeholder(BLAKE3))
    reached: int = 0
    done: int = 0

    def add(self, start: int, data: Buffer) -> None:
        """Notes that the bytes from `start` were read."""
        if start + len(data) > self.reached:
            self.reached = start + len(data)
            self.follower.wake()

    def digest(self) -> Digest:
        """The digest of the whole file; what was not read yet is read now. Raises as Source.read_into."""
        self.follower.finish()
        return Digest(BLAKE3, self.hash.hexdigest())

    def close(self) -> None:
        """Ends the work without a result."""
        self.follower.stop()


class Follower:
    """Makes the BLAKE3 of files that are read anyway: a thread goes through each behind those who read it.

    It reads what they have read before, so the bytes come out of the page cache and the disk has no more to do.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.trails = [ProgressiveDigest(source, self) for source in sources]
        for trail in self.trails:
            trail.source.record = trail
        self._is_over = self._is_stopped = False
        self._news = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def wake(self) -> None:
        """There is more to do."""
        self._news.set()
        if self._thread is None:
            self._start()

    def finish(self) -> None:
        """Waits until all files are done."""
        self._is_over = True
        self._start()
        self._news.set()
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Ends the thread as soon as can be."""
        self._is_stopped = self._is_over = True
        self._news.set()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_stopped:
                self._thread = threading.Thread(target=self._work, name="apr-hash", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        try:
            while not self._is_stopped:
                self._news.clear()
                is_over = self._is_over
                ends = ((trail, trail.source.size if is_over else trail.reached) for trail in self.trails)
                trail, end = next(((trail, end) for trail, end in ends if trail.done < end), (None, 0))
                if trail is not None:
                    view = buffer[: end - trail.done]
                    trail.source.read_into(trail.done, view)
                    trail.hash.update(view)
                    trail.done += len(view)
                elif is_over:
                    return
                else:
                    self._news.wait()
        except BaseException as error:
            self._error = error
