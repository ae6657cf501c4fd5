"""A file that lies elsewhere: what is known of it, how its bytes come, and what was fetched so far."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from aprfmt.errors import ChecksumError
from aprfmt.text import format_bytes, plural

CHUNK_BYTES = 16 << 20
"""What is fetched of weights at once."""

BLOCK_BYTES = 128 << 10
"""What is fetched of a header at once, unless more is asked for."""

_MOST_BLOCKS = 256
_DIRECT_BYTES = 1 << 20  # longer reads of a header are not cut into blocks
_HASHED_BYTES = 1 << 20


class Fetch(Protocol):
    """Gives the bytes [start, end) of a file in pieces. Raises AprError, after it tried again where that may help."""

    def __call__(self, start: int, end: int) -> Iterator[bytes]:
        """Goes on where a connection was cut."""
        ...


@dataclass(slots=True)
class Traffic:
    """What was fetched by this process.

    Attributes:
        requests, n_bytes: requests for parts of files, and what came of them.
        reused_bytes: what an earlier run had fetched.
        verified: names of the files whose digest was compared.
        origins: addresses of the repositories, with the revision.
    """

    requests: int = 0
    n_bytes: int = 0
    reused_bytes: int = 0
    verified: list[str] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """What the objects of the command line say of it."""
        return {
            "sources": self.origins,
            "requests": self.requests,
            "fetched_bytes": self.n_bytes,
            "reused_bytes": self.reused_bytes,
            "verified_files": len(self.verified),
        }

    def sentence(self) -> str:
        """The same for people."""
        reused = f", {format_bytes(self.reused_bytes)} of an earlier run" if self.reused_bytes else ""
        verified = f", {plural(len(self.verified), 'digest')} compared" if self.verified else ""
        what = f"{format_bytes(self.n_bytes)} in {plural(self.requests, 'request')}{reused}{verified}"
        return f"fetched {what}: {', '.join(self.origins)}"


traffic = Traffic()


@dataclass(eq=False, slots=True)
class RemoteFile:
    """A file elsewhere.

    Attributes:
        name: in its repository.
        address: for messages.
        size: in bytes.
        digest: in hex: SHA-256 of 64 digits, or git's of a blob, SHA-1 of 40 digits.
        fetch: gives its bytes.
        is_text: whether it is not a file of weights, of which only the header may be wanted.
        is_read: whether more than its header was read.
    """

    name: str
    address: str
    size: int
    digest: str
    fetch: Fetch
    is_text: bool = False
    is_read: bool = False
    _blocks: dict[int, bytes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _hash_lock: threading.Lock = field(default_factory=threading.Lock)
    _hash: hashlib._Hash | None = None
    _hashed: int = 0
    _is_bad: bool = False

    @property
    def n_chunks(self) -> int:
        """Chunks of the file; the last one may be shorter."""
        return -(-self.size // CHUNK_BYTES)

    @property
    def hashed(self) -> int:
        """How many of its first chunks the digest is taken of."""
        return self._hashed

    def chunk_bytes(self, number: int) -> int:
        """The length of a chunk."""
        return min(CHUNK_BYTES, self.size - number * CHUNK_BYTES)

    def head(self, offset: int, n_bytes: int) -> bytes:
        """Bytes of a header, by blocks that are kept in memory. Raises AprError."""
        if n_bytes >= _DIRECT_BYTES:
            return b"".join(self.fetch(offset, offset + n_bytes))
        with self._lock:
            numbers = range(offset // BLOCK_BYTES, -(-(offset + n_bytes) // BLOCK_BYTES))
            missing = [number for number in numbers if number not in self._blocks]
            if missing:
                self._fetch_blocks(missing[0], missing[-1] + 1)
            data = b"".join(self._blocks[number] for number in numbers)
            while len(self._blocks) > _MOST_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        start = offset - numbers.start * BLOCK_BYTES
        return data[start : start + n_bytes]

    def _fetch_blocks(self, first: int, end: int) -> None:
        start = first * BLOCK_BYTES
        data = b"".join(self.fetch(start, min(end * BLOCK_BYTES, self.size)))
        for number in range(first, end):
            at = number * BLOCK_BYTES - start
            self._blocks[number] = data[at : at + BLOCK_BYTES]

    def hash_chunks(self, open_chunk: Callable[[int], int | None]) -> None:
        """Takes the digest of the chunks that follow, as long as `open_chunk` gives a file of them.

        Raises ChecksumError where the digest of the whole file is another one.
        """
        with self._hash_lock:
            if self._is_bad:
                raise self._bad()
            if self._hash is None:
                self._hash = hashlib.sha256() if len(self.digest) == 64 else _git_hash(self.size)
            while self._hashed < self.n_chunks and (fd := open_chunk(self._hashed)) is not None:
                try:
                    while data := os.read(fd, _HASHED_BYTES):
                        self._hash.update(data)
                finally:
                    os.close(fd)
                self._hashed += 1
                if self._hashed == self.n_chunks:
                    self._compare()

    def _compare(self) -> None:
        assert self._hash is not None
        if self._hash.hexdigest() != self.digest:
            self._is_bad = True
            raise self._bad()
        traffic.verified.append(self.address)

    def _bad(self) -> ChecksumError:
        return ChecksumError(
            "what was fetched is not the file that the hub lists: its digest differs",
            path=self.address,
            hint="run it again; if this persists, the repository or a proxy on the way is damaged",
        )


def _git_hash(size: int) -> hashlib._Hash:
    """The digest that git names a blob by."""
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
