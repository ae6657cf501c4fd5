"""Chunks of remote files, cached on this disk within a size limit.

FOLDER/DIGEST/00000       the first CHUNK_BYTES of the file with that digest, complete
FOLDER/DIGEST/00001.part  the next chunk, downloaded in part
FOLDER/.lock              held by the process that uses the folder

FOLDER belongs to this user; other names in it are left alone. A second process creates a folder of its own next to it,
under a temporary name.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from aprfmt.errors import AprError, ChecksumError, StorageError, storage_error, storage_errors
from aprfmt.io import remote_file
from aprfmt.io.cache import own_folder
from aprfmt.io.publish import remove
from aprfmt.io.remote_file import RemoteFile
from aprfmt.io.source import on_cancel
from aprfmt.io.temporary import sweep, temporary_beside
from aprfmt.types import PathLike

try:
    import fcntl
except ImportError:  # Windows: each of two processes downloads for itself
    fcntl = None  # type: ignore[assignment]

LEAST_STORED_BYTES = 64 << 20
"""The smallest disk limit that a store works with."""

_AHEAD = 3
_FOLDER = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_NAME = re.compile(r"[0-9]{5,}(\.part)?")
_KEPT_BYTES = 16 << 20  # files up to this size are kept after a conversion


@dataclass(eq=False, slots=True)
class _Chunk:
    """A chunk in the store or being downloaded; `users` have read parts of it."""

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
    users: set[RemoteFile] = field(default_factory=set)


class Store:
    """Chunks of files on this disk, at most `most_bytes` in all.

    When space is needed, chunks that were read and hashed are evicted first, then the least recently used.

    Args:
        folder: where the chunks are stored; if another process uses it, this one creates a folder of its own.
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
        self._remove_own: Callable[[], object] | None = None
        self.folder = self._claim(folder)
        self._parts: dict[Path, int] = {}
        self._is_given_up = False
        on_cancel(self._give_up)

    def _claim(self, folder: Path) -> Path:
        own_folder(folder)
        try:
            sweep(folder.parent)
            self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            own = temporary_beside(os.fspath(folder))
            os.mkdir(own, 0o700)
            self._remove_own = weakref.finalize(self, remove, own)
            return Path(own)
        except OSError as error:
            raise _no_room(error, folder) from error
        return folder

    def close(self) -> None:
        """Releases the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._remove_own is not None:
            self._remove_own()

    def _give_up(self, is_given_up: bool) -> None:
        with self._changed:
            self._is_given_up = is_given_up
            self._changed.notify_all()

    def read(self, file: RemoteFile, offset: int, buffer: memoryview) -> None:
        """Fills `buffer`, downloading the chunks that it needs. Raises AprError."""
        file.is_read = True
        remote_file.traffic.used[file.address] = None
        done = 0
        while done < len(buffer):
            number, at = divmod(offset + done, remote_file.CHUNK_BYTES)
            view = buffer[done : done + remote_file.CHUNK_BYTES - at]
            self._read_chunk(file, number, at, view)
            done += len(view)

    def _read_chunk(self, file: RemoteFile, number: int, at: int, view: memoryview) -> None:
        chunk = self._wait_for(file, number)
        try:
            with storage_errors(chunk.path):
                if file is not chunk.file and file not in chunk.users:
                    file.check_chunk(number, chunk.path)
                fd = os.open(chunk.path, os.O_RDONLY)
                try:
                    n = os.preadv(fd, [view], at)
                finally:
                    os.close(fd)
            if n < len(view):
                raise StorageError("a chunk of the cache was truncated", path=chunk.path, hint="run it again")
        finally:
            with self._changed:
                chunk.readers -= 1
                chunk.used += len(view)
                chunk.users.add(file)
                if chunk.is_old:
                    chunk.is_old = False
                    remote_file.traffic.reused_bytes += chunk.n_bytes
                self._tick += 1
                chunk.tick = self._tick
                self._changed.notify_all()

    def _wait_for(self, file: RemoteFile, number: int) -> _Chunk:
        """Waits for a chunk and registers this thread as a reader."""
        with self._changed:
            chunk = self._chunks.get((file.digest, number)) or self._begin(file, number, wait=True)
            chunk.readers += 1
            if number and (file.digest, number - 1) in self._chunks:
                for next_one in range(number + 1, min(number + 1 + _AHEAD, file.n_chunks)):
                    if (file.digest, next_one) not in self._chunks:
                        self._begin(file, next_one, wait=False)
            while not chunk.is_ready and chunk.error is None:
                if self._is_given_up:
                    chunk.readers -= 1
                    raise StorageError("the read was cancelled", path=file.address)
                self._changed.wait()
            if chunk.error is not None:
                chunk.readers -= 1
                raise chunk.error
            return chunk

    def adopt(self, files: Sequence[RemoteFile]) -> None:
        """Adopts what an earlier run has left of `files`, as far as space allows; removes its other chunks."""
        known = {file.digest: file for file in files}
        with self._changed, storage_errors(self.folder):
            for folder in sorted(self.folder.iterdir()):
                for path in sorted(folder.iterdir()) if is_kept_file(folder) else ():
                    is_chunk = _NAME.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode)
                    if is_chunk and not self._take(path, known.get(folder.name)):
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
        """Starts a download when there is space; without `wait` only in place of a chunk that was used up."""
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
                if self._is_given_up:
                    raise StorageError("the read was cancelled", path=file.address)
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
        for file in chunk.users:
            with suppress(FileNotFoundError):
                file.note_dropped(chunk.number, chunk.path)
        del self._chunks[chunk.file.digest, chunk.number]
        self._used -= chunk.n_bytes
        with suppress(FileNotFoundError):
            chunk.path.unlink()

    def _fetch(self, chunk: _Chunk) -> None:
        """Downloads a chunk, continuing what an earlier run has left, and hashes as far as chunks are in order."""
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
            with suppress(ChecksumError, OSError):  # `verify` reports it again
                chunk.file.hash_chunks(lambda number: self._open(chunk.file, number))
                with self._changed:
                    self._changed.notify_all()

    def _write(self, chunk: _Chunk) -> None:
        chunk.path.parent.mkdir(exist_ok=True)
        part = chunk.path.with_suffix(".part")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            done = os.fstat(fd).st_size
            if done > chunk.n_bytes:
                done = 0
            remote_file.traffic.reused_bytes += done
            start = chunk.number * remote_file.CHUNK_BYTES
            for data in chunk.file.fetch(start + done, start + chunk.n_bytes) if done < chunk.n_bytes else ():
                view = memoryview(data)
                while view:
                    n = os.pwrite(fd, view, done)
                    view, done = view[n:], done + n
            os.ftruncate(fd, done)
        finally:
            os.close(fd)
        try:
            if chunk.file.n_chunks == 1:
                chunk.file.hash_chunks(lambda _: os.open(part, os.O_RDONLY))
            chunk.file.check_chunk(chunk.number, part)
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
        """Compares a file whose weights were read with its digest, downloading what is missing.

        Raises ChecksumError; the file is then removed from the store.
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
        """Removes the chunks of `files`, by default of all files with more than one chunk."""
        with self._changed:
            for chunk in [*self._chunks.values()]:
                wanted = chunk.file.size > _KEPT_BYTES if files is None else chunk.file in files
                if wanted and chunk.is_ready and not chunk.readers:
                    self._drop(chunk)
                    with suppress(OSError):
                        chunk.path.parent.rmdir()


def is_kept_file(path: Path) -> bool:
    """Whether a path in the folder of a store is one where chunks are kept."""
    return _FOLDER.fullmatch(path.name) is not None and stat.S_ISDIR(path.lstat().st_mode)


def _is_spent(chunk: _Chunk) -> bool:
    """Whether the chunk was fully read and hashed: a conversion reads each byte once, except headers."""
    least = chunk.n_bytes if chunk.number else chunk.n_bytes - chunk.n_bytes // 8
    return chunk.used >= least and chunk.number < chunk.file.hashed


def _no_room(error: OSError, path: PathLike) -> StorageError:
    found = storage_error(error, path)
    hint = "set APR_CACHE to a folder on another disk, or lower --max-disk"
    return StorageError(f"downloaded data cannot be stored: {found.message}", path=path, hint=hint)
