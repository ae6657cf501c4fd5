"""Digests that identify an imported file: its CRC-32 or its BLAKE3, computed from bytes that are moved anyway.

A CRC costs next to nothing and detects accidents. BLAKE3 is computed by threads, since it takes a quarter of the time
of a copy.
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
"""The user-facing name of each kind of digest, and its number of hexadecimal digits."""


class Digest(NamedTuple):
    """A digest of a file: one of KINDS, and its value in hex."""

    kind: str
    value: str


_BUFFER_BYTES = 512 << 10  # fits the cache
_QUEUE_LENGTH = 4


def new_hash() -> blake3:
    """An empty BLAKE3 hash."""
    from blake3 import blake3

    return blake3()


def digest_of(kind: str, parts: Iterable[Buffer]) -> Digest:
    """The digest of the concatenated parts."""
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
    """The error text for a restored file whose digest of that kind differs."""
    return f"{name} would differ from the imported file: its {KINDS[kind][0]} differs"


class StreamDigest:
    """BLAKE3 of buffers that are added in order and not modified; use it in a `with` block."""

    def __init__(self) -> None:
        self._hash = new_hash()
        self._queue: queue.Queue[Buffer | None] = queue.Queue(_QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._work, name="apr-hash", daemon=True)

    def _work(self) -> None:
        while (data := self._queue.get()) is not None:
            self._hash.update(data)

    def add(self, data: Buffer) -> None:
        """Adds the next bytes; blocks while many are pending."""
        self._queue.put(data)

    def __enter__(self) -> StreamDigest:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._queue.put(None)
        self._thread.join()

    def digest(self) -> Digest:
        """The digest; call it after the block."""
        return Digest(BLAKE3, self._hash.hexdigest())


class PendingDigest(Protocol):
    """A digest that is known once the whole file was read; it records the reads of its source.

    Attributes:
        kind: of KINDS.
        stand_in: a random text of the digest's length that is patched later.
    """

    kind: ClassVar[str]
    stand_in: str

    def digest(self) -> Digest:
        """The digest of the whole file; reads what was not read yet. Raises as Source.read_into."""
        ...


def _placeholder(kind: str) -> str:
    return token_urlsafe(KINDS[kind][1] * 3 // 4)


def follow(kind: str, sources: Sequence[Source]) -> list[PendingDigest]:
    """Starts computing the digest of each file while it is read."""
    if kind == BLAKE3:
        return list(Follower(sources).trails)
    return [PendingCrc(source) for source in sources]


class PendingCrc(ReadChecksum):
    """The CRC-32 of the parts of a file that were read, and finally of the whole file."""

    kind: ClassVar[str] = CRC32

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.stand_in = _placeholder(CRC32)
        self._source = source
        source.record = self

    def digest(self) -> Digest:
        """The digest of the whole file; reads what was not read yet. Raises as Source.read_into."""
        return crc_digest(crc32_of_range(self._source, 0, self._source.size))


@dataclass(eq=False, slots=True)
class ProgressiveDigest:
    """Tracks how far a file was read and how far it was hashed."""

    kind: ClassVar[str] = BLAKE3
    source: Source
    follower: Follower
    hash: blake3 = field(default_factory=new_hash)
    stand_in: str = field(default_factory=lambda: _placeholder(BLAKE3))
    reached: int = 0
    done: int = 0

    def add(self, start: int, data: Buffer) -> None:
        """Records that the bytes from `start` were read."""
        if start + len(data) > self.reached:
            self.reached = start + len(data)
            self.follower.wake()

    def digest(self) -> Digest:
        """The digest of the whole file; reads what was not read yet. Raises as Source.read_into."""
        self.follower.finish()
        return Digest(BLAKE3, self.hash.hexdigest())

    def close(self) -> None:
        """Stops without a result."""
        self.follower.stop()


class Follower:
    """Computes the BLAKE3 of files that are read anyway, in a thread that follows their readers.

    It rereads what they have read, so the bytes come from the page cache.
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
        """Signals that there is more to hash."""
        self._news.set()
        if self._thread is None:
            self._start()

    def finish(self) -> None:
        """Waits until all files are hashed."""
        self._is_over = True
        self._start()
        self._news.set()
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stops the thread as soon as possible."""
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
