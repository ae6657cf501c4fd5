"""A remote file: its metadata, how its bytes are fetched, and what was fetched so far.

Every byte that is used must be covered by the file's digest, although a server may answer two requests for the same
range differently. Three records ensure this: the digest of each header unit that was used, compared when its chunk is
hashed; the hash state before each chunk, which checks a chunk that is fetched again; and the digest of a chunk that was
used and evicted before it was hashed.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from aprfmt.errors import ChecksumError
from aprfmt.text import first_few, format_bytes, plural

CHUNK_BYTES = 16 << 20
"""Size of a fetch of weights."""

BLOCK_BYTES = 128 << 10
"""Size of a fetch of a header, unless more is requested."""

MOST_HEADER_BYTES = 32 << 20
"""Longer reads go through chunks, also in a header."""

_MOST_KEPT_BYTES = 32 << 20  # of headers, in memory
_HASHED_BYTES = 1 << 20


class Fetch(Protocol):
    """Yields the bytes [start, end) of a file in chunks. Raises AprError after its retries."""

    def __call__(self, start: int, end: int) -> Iterator[bytes]:
        """Continues after a cut connection."""
        ...


@dataclass(slots=True)
class Traffic:
    """What this process fetched.

    Attributes:
        requests, n_bytes: range requests, and the bytes they returned.
        reused_bytes: bytes that an earlier run had fetched.
        used: addresses of the files of which any byte was used.
        verified: addresses of the files whose digest was compared.
        skipped: files of a repository that are left out, each with the reason.
        origins: addresses of the repositories, with the revision, and of files of other servers.
        unstated: addresses of the files whose server states no digest.
    """

    requests: int = 0
    n_bytes: int = 0
    reused_bytes: int = 0
    used: dict[str, None] = field(default_factory=dict)
    verified: dict[str, None] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    unstated: dict[str, None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_request(self) -> None:
        """Counts a range request."""
        with self._lock:
            self.requests += 1

    def count_bytes(self, n: int) -> None:
        """Counts bytes that a request returned."""
        with self._lock:
            self.n_bytes += n

    @property
    def unverified(self) -> list[str]:
        """Files that were read in part, so their digest could not be compared."""
        return [address for address in self.used if address not in self.verified and address not in self.unstated]

    def to_json(self) -> dict[str, object]:
        """The summary in the command line's JSON."""
        skipped: dict[str, object] = {"skipped_files": self.skipped} if self.skipped else {}
        skipped |= {"files_without_digest": len(self.unstated)} if self.unstated else {}
        return {
            "sources": self.origins, "requests": self.requests, "fetched_bytes": self.n_bytes,
            "reused_bytes": self.reused_bytes, "verified_files": len(self.verified),
            "unverified_files": len(self.unverified), **skipped,
        }  # fmt: skip

    def sentence(self) -> str:
        """The summary as a sentence."""
        reused = f", {format_bytes(self.reused_bytes)} from an earlier run" if self.reused_bytes else ""
        verified = f", {plural(len(self.verified), 'digest')} verified" if self.verified else ""
        unverified = (
            f", {plural(len(self.unverified), 'file')} read in part and not verified" if self.unverified else ""
        )
        what = f"{format_bytes(self.n_bytes)} in {plural(self.requests, 'request')}{reused}{verified}{unverified}"
        skipped = f"; skipped {first_few(self.skipped)}" if self.skipped else ""
        if self.unstated:
            skipped += "; the server provides no digest, so the bytes are not verified (apr validate --sha256)"
        return f"fetched {what}: {', '.join(self.origins)}{skipped}"


traffic = Traffic()


@dataclass(eq=False, slots=True)
class RemoteFile:
    """A remote file.

    Attributes:
        name: in its repository.
        address: for messages.
        size: in bytes.
        digest: in hex: SHA-256 (64 digits), or git's SHA-1 of a blob (40 digits).
        is_stated: whether the server states that digest; else it only names the chunks on this disk.
        fetch: yields its bytes.
        server: what has it, for messages.
        is_text: whether it is something other than weights, which may be needed whole.
        is_read: whether more than its header was read.
        hashed: number of leading chunks that are hashed.
        is_verified: whether the digest of the whole file was compared.
    """

    name: str
    address: str
    size: int
    digest: str
    fetch: Fetch
    is_text: bool = False
    is_read: bool = False
    hashed: int = 0
    is_verified: bool = False
    server: str = "the hub"
    is_stated: bool = True
    _kept: dict[int, bytes] = field(default_factory=dict)
    _used: dict[int, bytes] = field(default_factory=dict)
    _dropped: dict[int, bytes] = field(default_factory=dict)
    _states: list[hashlib._Hash] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _hash_lock: threading.Lock = field(default_factory=threading.Lock)
    _is_bad: bool = False

    @property
    def n_chunks(self) -> int:
        """Number of chunks; the last one may be shorter."""
        return -(-self.size // CHUNK_BYTES)

    @property
    def is_used(self) -> bool:
        """Whether any of its bytes were used."""
        return self.is_read or bool(self._used)

    def chunk_bytes(self, number: int) -> int:
        """Length of a chunk."""
        return min(CHUNK_BYTES, self.size - number * CHUNK_BYTES)

    def prefetch(self, n_bytes: int) -> None:
        """Fetches the first bytes of a header, which count as used only when `head` returns them. Raises AprError."""
        with self._lock:
            self._kept |= self._fetch_units(range(-(-min(self.size, n_bytes) // _unit())))

    def head(self, offset: int, n_bytes: int) -> bytes | None:
        """Header bytes, by units that are kept in memory; None for bytes that must come from chunks.

        Those are long reads, and ranges that were hashed before, with which they could not be compared. Raises
        AprError;
        ChecksumError if bytes that are fetched again differ.
        """
        if n_bytes > MOST_HEADER_BYTES:
            return None
        unit = _unit()
        numbers = range(offset // unit, -(-(offset + n_bytes) // unit))
        with self._lock:
            if any(number not in self._used and number * unit // CHUNK_BYTES < self.hashed for number in numbers):
                return None
            found = {number: self._kept[number] for number in numbers if number in self._kept}
            if missing := [number for number in numbers if number not in found]:
                end = -(-(missing[-1] + 1) * unit // BLOCK_BYTES) * BLOCK_BYTES // unit
                fetched = self._fetch_units(range(missing[0], max(end, missing[-1] + 1)))
                self._kept |= fetched
                found |= fetched
            for number in numbers:
                self._use(number, found[number])
            while len(self._kept) * unit > _MOST_KEPT_BYTES:
                del self._kept[next(iter(self._kept))]
        traffic.used[self.address] = None
        data = b"".join(found[number] for number in numbers)
        start = offset - numbers.start * unit
        return data[start : start + n_bytes]

    def _fetch_units(self, numbers: range) -> dict[int, bytes]:
        unit = _unit()
        start, end = numbers.start * unit, min(numbers.stop * unit, self.size)
        data = b"".join(self.fetch(start, end))
        return {number: data[at : at + unit] for number, at in zip(numbers, range(0, len(data), unit), strict=False)}

    def _use(self, number: int, data: bytes) -> None:
        digest = hashlib.sha256(data).digest()
        if self._used.setdefault(number, digest) != digest:
            raise self.bad()

    def hash_chunks(self, open_chunk: Callable[[int], int | None]) -> None:
        """Hashes the following chunks, as long as `open_chunk` returns a file for them.

        Raises ChecksumError if the digest of the whole file differs, or if a header that was used differs from the
        file.
        """
        with self._hash_lock:
            self._check_good()
            while self.hashed < self.n_chunks and (fd := open_chunk(self.hashed)) is not None:
                try:
                    after = self._hash_of(fd, self.hashed)
                    with self._lock:
                        self._compare_units(fd)
                        self._states.append(after)
                        self.hashed += 1
                finally:
                    os.close(fd)
            if self.hashed == self.n_chunks and not self.is_verified:
                self._compare()

    def check_chunk(self, number: int, path: Path) -> None:
        """Raises ChecksumError if a chunk that was fetched again differs from the bytes used or hashed before."""
        with self._hash_lock:
            self._check_good()
            if number not in self._dropped and number >= self.hashed:
                return
            fd = os.open(path, os.O_RDONLY)
            try:
                if number < self.hashed:
                    is_same = self._hash_of(fd, number).digest() == self._states[number + 1].digest()
                else:
                    is_same = _sha256_of(fd) == self._dropped[number]
            finally:
                os.close(fd)
            if not is_same:
                raise self.bad()

    def note_dropped(self, number: int, path: Path) -> None:
        """Keeps the digest of a chunk that was used and is evicted before it was hashed."""
        if number < self.hashed or self._is_bad:
            return
        fd = os.open(path, os.O_RDONLY)
        try:
            self._dropped[number] = _sha256_of(fd)
        finally:
            os.close(fd)

    def _hash_of(self, fd: int, number: int) -> hashlib._Hash:
        """The hash state after a chunk."""
        if not self._states:
            self._states.append(new_hash(self.digest, self.size))
        state = self._states[number].copy()
        while data := os.read(fd, _HASHED_BYTES):
            state.update(data)
        return state

    def _compare_units(self, fd: int) -> None:
        """Compares the header units that were used with the chunk that is hashed."""
        unit, start = _unit(), self.hashed * CHUNK_BYTES
        for number, digest in self._used.items():
            at = number * unit - start
            if 0 <= at < CHUNK_BYTES and hashlib.sha256(os.pread(fd, unit, at)).digest() != digest:
                raise self.bad()

    def _compare(self) -> None:
        state = self._states[-1] if self._states else new_hash(self.digest, self.size)
        if self.is_stated and state.hexdigest() != self.digest:
            raise self.bad()
        self.is_verified = True
        if self.is_stated:
            traffic.verified[self.address] = None

    def _check_good(self) -> None:
        if self._is_bad:
            raise self.bad()

    def bad(self) -> ChecksumError:
        """The error for bytes that are not the file's; nothing of it is used from then on."""
        self._is_bad = True
        return ChecksumError(
            f"the download differs from the file on {self.server}: digest mismatch",
            path=self.address,
            hint="run it again; if this persists, the repository or a proxy corrupts the file",
        )


def _unit() -> int:
    """The unit in which header bytes are compared; a chunk is a whole number of units."""
    return min(BLOCK_BYTES, CHUNK_BYTES)


def _sha256_of(fd: int) -> bytes:
    found = hashlib.sha256()
    while data := os.read(fd, _HASHED_BYTES):
        found.update(data)
    return found.digest()


def new_hash(digest: str, size: int) -> hashlib._Hash:
    """An empty hash of the digest's kind: SHA-256, or git's SHA-1 of a blob of `size` bytes."""
    return hashlib.sha256() if len(digest) == 64 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
