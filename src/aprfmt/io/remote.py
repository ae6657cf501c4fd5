"""Files that lie elsewhere: empty stand-ins of their size on this disk, their bytes fetched when they are read.

FOLDER/DIGEST/00000     the first CHUNK_BYTES of the file with that digest, complete
FOLDER/DIGEST/00001.part  the next ones, as far as they came
FOLDER/.lock            held by the process that uses the folder

Headers are read by ranges and kept in memory. Weights are read by whole chunks, which stay on the disk until the room
is needed for others; what an interrupted run leaves is used by the next one. A file's digest is taken as its chunks
come in order, and compared when a command asks whether its sources are what they were.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from aprfmt.errors import AprError, ChecksumError, StorageError, UsageError, storage_error, storage_errors
from aprfmt.io.source import Identity, Source, stand_for
from aprfmt.text import format_bytes, plural
from aprfmt.types import PathLike

try:
    import fcntl
except ImportError:  # Windows: two processes fetch each for itself
    fcntl = None  # type: ignore[assignment]

CHUNK_BYTES = 16 << 20
"""What is fetched of weights at once."""

LEAST_STORED_BYTES = 4 * CHUNK_BYTES
"""The smallest limit on the disk that a store works with."""

_BLOCK_BYTES = 128 << 10  # of a header
_MOST_BLOCKS = 256
_DIRECT_BYTES = 1 << 20  # longer reads of a header are not cut into blocks
_AHEAD = 3
_HEADS_AT_ONCE = 8
_SHORT_BYTES = 1 << 20  # texts that are fetched before they are asked for
_KEPT_BYTES = CHUNK_BYTES  # files up to this size stay in the store after a conversion
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
        is_text: whether it is no file of weights, of which only the header may be wanted.
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
            numbers = range(offset // _BLOCK_BYTES, -(-(offset + n_bytes) // _BLOCK_BYTES))
            missing = [number for number in numbers if number not in self._blocks]
            if missing:
                self._fetch_blocks(missing[0], missing[-1] + 1)
            data = b"".join(self._blocks[number] for number in numbers)
            while len(self._blocks) > _MOST_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        start = offset - numbers.start * _BLOCK_BYTES
        return data[start : start + n_bytes]

    def _fetch_blocks(self, first: int, end: int) -> None:
        start = first * _BLOCK_BYTES
        data = b"".join(self.fetch(start, min(end * _BLOCK_BYTES, self.size)))
        for number in range(first, end):
            at = number * _BLOCK_BYTES - start
            self._blocks[number] = data[at : at + _BLOCK_BYTES]

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
            hint="run it again; if it stays so, the repository or a proxy on the way is damaged",
        )


def _git_hash(size: int) -> hashlib._Hash:
    """The digest that git names a blob by."""
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


@dataclass(eq=False, slots=True)
class _Chunk:
    """A chunk that is in the store or on its way into it."""

    file: RemoteFile
    number: int
    n_bytes: int
    path: Path
    used: int = 0
    tick: int = 0
    readers: int = 0
    is_ready: bool = False
    is_old: bool = False
    error: BaseException | None = None


class Store:
    """Chunks of files on this disk, never more than `most_bytes` of them together.

    What was read, and hashed, goes first where room is needed, then what was not used for longest.

    Args:
        folder: where they lie; another process that uses it keeps it, and this one takes a folder of its own.
        most_bytes: the limit.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.peak_bytes = 0
        self._chunks: dict[tuple[str, int], _Chunk] = {}
        self._used = 0
        self._tick = 0
        self._changed = threading.Condition()
        self._lock: int | None = None
        self._own: tempfile.TemporaryDirectory[str] | None = None
        self.folder = self._claim(folder)
        self._parts: dict[Path, int] = {}

    def _claim(self, folder: Path) -> Path:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            self._own = tempfile.TemporaryDirectory(dir=folder.parent, prefix="chunks-", ignore_cleanup_errors=True)
            return Path(self._own.name)
        except OSError as error:
            raise _no_room(error, folder) from error
        return folder

    def close(self) -> None:
        """Leaves the folder to others."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._own is not None:
            self._own.cleanup()

    def read(self, file: RemoteFile, offset: int, buffer: memoryview) -> None:
        """Fills `buffer`; fetches the chunks that it takes. Raises AprError."""
        file.is_read = True
        done = 0
        while done < len(buffer):
            number, at = divmod(offset + done, CHUNK_BYTES)
            view = buffer[done : done + CHUNK_BYTES - at]
            self._read_chunk(file, number, at, view)
            done += len(view)

    def _read_chunk(self, file: RemoteFile, number: int, at: int, view: memoryview) -> None:
        chunk = self._wait_for(file, number)
        try:
            with storage_errors(chunk.path):
                fd = os.open(chunk.path, os.O_RDONLY)
                try:
                    n = os.preadv(fd, [view], at)
                finally:
                    os.close(fd)
            if n < len(view):
                raise StorageError("a chunk of the cache became shorter", path=chunk.path, hint="run it again")
        finally:
            with self._changed:
                chunk.readers -= 1
                chunk.used += len(view)
                if chunk.is_old:
                    chunk.is_old = False
                    traffic.reused_bytes += chunk.n_bytes
                self._tick += 1
                chunk.tick = self._tick
                self._changed.notify_all()

    def _wait_for(self, file: RemoteFile, number: int) -> _Chunk:
        """The chunk, ready, with this thread among its readers."""
        with self._changed:
            chunk = self._chunks.get((file.digest, number)) or self._begin(file, number, wait=True)
            chunk.readers += 1
            if number and (file.digest, number - 1) in self._chunks:
                for next_one in range(number + 1, min(number + 1 + _AHEAD, file.n_chunks)):
                    if (file.digest, next_one) not in self._chunks:
                        self._begin(file, next_one, wait=False)
            while not chunk.is_ready and chunk.error is None:
                self._changed.wait()
            if chunk.error is not None:
                chunk.readers -= 1
                raise chunk.error
            return chunk

    def adopt(self, files: Sequence[RemoteFile]) -> None:
        """Takes over what an earlier run has left of `files`, as far as there is room; removes the rest."""
        known = {file.digest: file for file in files}
        with self._changed, storage_errors(self.folder):
            for folder in sorted(self.folder.iterdir()):
                for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                    if not self._take(path, known.get(folder.name)):
                        path.unlink()
            self.peak_bytes = max(self.peak_bytes, self._used)

    def _take(self, path: Path, file: RemoteFile | None) -> bool:
        n_bytes, number = path.stat().st_size, int(path.stem) if path.stem.isdecimal() else -1
        if file is None or not 0 <= number < file.n_chunks or self._used + n_bytes > self.most_bytes:
            return False
        if path.suffix == ".part":
            if n_bytes > file.chunk_bytes(number):
                return False
            self._parts[path] = n_bytes
            self._used += n_bytes
            return True
        if path.suffix or n_bytes != file.chunk_bytes(number):
            return False
        self._chunks[file.digest, number] = _Chunk(file, number, n_bytes, path, is_ready=True, is_old=True)
        self._used += n_bytes
        return True

    def _begin(self, file: RemoteFile, number: int, *, wait: bool) -> _Chunk:
        """Starts to fetch a chunk when there is room; without `wait` only in place of what was used up."""
        n_bytes = file.chunk_bytes(number)
        chunk = _Chunk(file, number, n_bytes, self.folder / file.digest / f"{number:05}", tick=self._tick)
        own = chunk.path.with_suffix(".part")
        while self._used + (more_bytes := n_bytes - self._parts.get(own, 0)) > self.most_bytes:
            if (old := next((path for path in self._parts if path != own), None)) is not None:
                self._used -= self._parts.pop(old)
                old.unlink(missing_ok=True)
                continue
            victim = self._victim()
            if victim is not None and (wait or _is_spent(victim)):
                self._drop(victim)
            elif wait:
                self._changed.wait()
                if (found := self._chunks.get((file.digest, number))) is not None:
                    return found
            else:
                return chunk
        self._chunks[file.digest, number] = chunk
        self._parts.pop(own, None)
        self._used += more_bytes
        self.peak_bytes = max(self.peak_bytes, self._used)
        threading.Thread(target=self._fetch, args=(chunk,), name="apr-fetch", daemon=True).start()
        return chunk

    def _victim(self) -> _Chunk | None:
        free = [chunk for chunk in self._chunks.values() if chunk.is_ready and not chunk.readers]
        return min(free, key=lambda chunk: (not _is_spent(chunk), chunk.tick), default=None)

    def _drop(self, chunk: _Chunk) -> None:
        del self._chunks[chunk.file.digest, chunk.number]
        self._used -= chunk.n_bytes
        with suppress(FileNotFoundError):
            chunk.path.unlink()

    def _fetch(self, chunk: _Chunk) -> None:
        """Fetches a chunk behind what an earlier run has left of it, and takes the digest as far as it goes."""
        error: BaseException | None = None
        try:
            self._write(chunk)
        except BaseException as caught:
            error = caught
            if isinstance(caught, OSError) and not isinstance(caught, AprError):
                error = _no_room(caught, chunk.path)
        with self._changed:
            chunk.error, chunk.is_ready = error, error is None
            if error is not None:
                self._chunks.pop((chunk.file.digest, chunk.number), None)
                self._used -= chunk.n_bytes
                part = chunk.path.with_suffix(".part")
                with suppress(OSError):
                    self._parts[part] = part.stat().st_size
                    self._used += self._parts[part]
            self._changed.notify_all()
        if error is None:
            with suppress(ChecksumError, OSError):  # `verify` says so again
                chunk.file.hash_chunks(lambda number: self._open(chunk.file, number))
                with self._changed:
                    self._changed.notify_all()

    def _write(self, chunk: _Chunk) -> None:
        chunk.path.parent.mkdir(exist_ok=True)
        part = chunk.path.with_suffix(".part")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            done = os.fstat(fd).st_size
            if done > chunk.n_bytes:
                done = 0
            traffic.reused_bytes += done
            start = chunk.number * CHUNK_BYTES
            for data in chunk.file.fetch(start + done, start + chunk.n_bytes) if done < chunk.n_bytes else ():
                view = memoryview(data)
                while view:
                    n = os.pwrite(fd, view, done)
                    view, done = view[n:], done + n
            os.ftruncate(fd, done)
        finally:
            os.close(fd)
        if chunk.file.n_chunks == 1:
            try:
                chunk.file.hash_chunks(lambda _: os.open(part, os.O_RDONLY))
            except ChecksumError:
                part.unlink()
                raise
        os.replace(part, chunk.path)

    def _open(self, file: RemoteFile, number: int) -> int | None:
        with self._changed:
            chunk = self._chunks.get((file.digest, number))
            if chunk is None or not chunk.is_ready:
                return None
            return os.open(chunk.path, os.O_RDONLY)

    def verify(self, file: RemoteFile) -> None:
        """Compares a file of which weights were read with its digest; fetches what is missing of it.

        Raises ChecksumError; nothing of the file is kept then.
        """
        try:
            file.hash_chunks(lambda number: self._open(file, number))
            while file.hashed < file.n_chunks:
                chunk = self._wait_for(file, file.hashed)
                try:
                    file.hash_chunks(lambda number: self._open(file, number))
                finally:
                    with self._changed:
                        chunk.readers -= 1
                        self._changed.notify_all()
        except ChecksumError:
            self.clear([file])
            raise

    def clear(self, files: Sequence[RemoteFile] | None = None) -> None:
        """Removes what is kept of `files`, by default of all that have more than one chunk."""
        with self._changed:
            for chunk in [*self._chunks.values()]:
                wanted = chunk.file.size > _KEPT_BYTES if files is None else chunk.file in files
                if wanted and chunk.is_ready and not chunk.readers:
                    self._drop(chunk)
                    with suppress(OSError):
                        chunk.path.parent.rmdir()


def _is_spent(chunk: _Chunk) -> bool:
    """Whether all of it was read, and hashed: a conversion reads each byte once, but for a header."""
    least = chunk.n_bytes if chunk.number else chunk.n_bytes - chunk.n_bytes // 8
    return chunk.used >= least and chunk.number < chunk.file.hashed


def _no_room(error: OSError, path: PathLike) -> StorageError:
    found = storage_error(error, path)
    hint = "set APR_CACHE to a folder on another disk, or allow less with --max-disk"
    return StorageError(f"what is fetched cannot be kept: {found.message}", path=path, hint=hint)


class RemoteSource(Source):
    """A file elsewhere, read as any other; `view` gives a copy."""

    def __init__(self, path: str, file: RemoteFile, store: Store, identity: Identity) -> None:
        super().__init__(path, None, None, file.size, identity)
        self.file = file
        self.store = store
        self._is_open = True

    def check_unchanged(self) -> None:
        """Compares what was read of weights with the file's digest; see Store.verify."""
        if self.file.is_read:
            self.store.verify(self.file)

    def view(self, offset: int = 0, n_bytes: int | None = None) -> memoryview:
        """A copy of `n_bytes` bytes at `offset` (to the end by default), read-only."""
        return memoryview(self.read(offset, self.size - offset if n_bytes is None else n_bytes)).toreadonly()

    def read(self, offset: int, n_bytes: int) -> bytes:
        """A copy of `n_bytes` bytes at `offset`, which are a header's; texts are fetched whole."""
        self._check_open(offset, n_bytes)
        if self.file.is_text:
            return self.read_data(offset, n_bytes)
        data = self.file.head(offset, n_bytes) if n_bytes else b""
        if self.record is not None:
            self.record.add(offset, data)
        return data

    def read_data(self, offset: int, n_bytes: int) -> bytes:
        """A copy of `n_bytes` bytes of weights at `offset`."""
        buffer = bytearray(n_bytes)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `offset` with bytes of weights."""
        self._check_open(offset, len(buffer))
        self.store.read(self.file, offset, buffer)
        if self.record is not None:
            self.record.add(offset, buffer)

    def _check_open(self, offset: int, n_bytes: int) -> None:
        self.check(offset, n_bytes)
        if not self._is_open:
            raise UsageError("the file is closed", path=self.path, hint="use its tensors inside the with block")

    def close(self) -> None:
        """Ends reading."""
        self._is_open = False
        super().close()


def place(folder: Path, files: Sequence[RemoteFile], store: Store) -> None:
    """Puts a stand-in for each file into `folder`, and makes Source.open read it elsewhere. Raises StorageError.

    A stand-in has the size of its file and no bytes: who opens it otherwise finds zeros and no model.
    """
    for file in files:
        path = folder / file.name
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_file() or path.stat().st_size != file.size:
                with open(path, "wb") as made:
                    made.truncate(file.size)
            identity = Identity.of(os.stat(path))
        stand_for(path, _maker(file, store, identity))


def _maker(file: RemoteFile, store: Store, identity: Identity) -> Callable[[str], Source]:
    return lambda path: RemoteSource(path, file, store, identity)


def limit_stores(sources: Sequence[Source], most_bytes: int | None) -> list[Store]:
    """Sets what files that lie elsewhere may take of the disk; None: as much as the largest of them. The stores."""
    stores = {id(source.store): source.store for source in sources if isinstance(source, RemoteSource)}
    for store in stores.values():
        sizes = [source.size for source in sources if isinstance(source, RemoteSource) and source.store is store]
        store.most_bytes = max(*sizes, LEAST_STORED_BYTES) if most_bytes is None else most_bytes
    return [*stores.values()]


def fetch_heads(files: Sequence[RemoteFile], store: Store) -> None:
    """Fetches headers of weights and short texts, several at once; an error is left to who reads them."""

    def head(file: RemoteFile) -> None:
        with suppress(Exception):
            if not file.is_text:
                file.head(0, min(file.size, _BLOCK_BYTES))
            elif 0 < file.size <= _SHORT_BYTES:
                store.read(file, 0, memoryview(bytearray(1)))

    if files:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_HEADS_AT_ONCE, "apr-fetch") as pool:
            list(pool.map(head, files))


def remove_old(folder: Path, before: float) -> None:
    """Removes what runs that were never repeated have left in the stores below `folder`, by its time of change."""
    for path in folder.glob("*/chunks*/*"):
        with suppress(OSError):
            if path.is_dir() and path.stat().st_mtime < before:
                shutil.rmtree(path)
