"""Looks up paths, and reads files or memory with bounds checks, read-only.

Where `os.path` treats a path that cannot be accessed as missing, the functions here raise.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import NamedTuple, Protocol, Self

from aprfmt.errors import (
    ZERO_BYTE,
    ChangedError,
    NotFoundError,
    TruncatedError,
    UnknownFormatError,
    UsageError,
    storage_error,
    storage_errors,
)
from aprfmt.types import PathLike

Buffer = bytes | bytearray | memoryview

PIPE_HINT = "write it to a file first: COMMAND > model.gguf"
"""For a model in a pipe: its bytes are read in any order."""

_PIECE_BYTES = 64 << 10


class FileIdentity(NamedTuple):
    """Distinguishes a file from another one, and from itself before a modification."""

    size: int
    mtime_ns: int
    device: int
    inode: int

    @classmethod
    def of(cls, info: os.stat_result) -> FileIdentity:
        """Builds it from a stat result."""
        return cls(info.st_size, info.st_mtime_ns, info.st_dev, info.st_ino)


class ReadRecorder(Protocol):
    """Observes the reads of a file."""

    def add(self, start: int, data: Buffer) -> None:
        """The bytes `data` were read from `start`; called by any thread."""

    def close(self) -> None:
        """The file is about to be closed."""


class Source:
    """Bytes of one file: `read` and `read_into` copy them, `view` maps them without a copy.

    Use `view` only to hand tensors to the user: the memoryview stays valid after `close`, but the process dies of
    SIGBUS if the file is truncated meanwhile. Everything else reads, so that truncation raises an error and the
    resident set stays small.

    Attributes:
        path: as it was given, for messages.
        size: bytes of the file when it was opened; later bytes are never read.
        identity: of the file when it was opened, None for bytes in memory.
        record: if given, it observes all reads except mappings, and is closed with the source.
        unpacked: sources of what was unpacked from this one, closed with it.
        stated_digest: SHA-256 that a remote file's server states, in hex (for short files git's blob digest, 40
            digits); None for other files.
    """

    stated_digest: str | None = None

    def __init__(
        self, path: str, fd: int | None, data: Buffer | None, size: int, identity: FileIdentity | None = None
    ) -> None:
        self.path = path
        self.size = size
        self.identity = identity
        self.record: ReadRecorder | None = None
        self.unpacked: list[Source] = []
        self._place = absolute(path) if identity else path
        self._fd = fd
        self._view: memoryview | None = memoryview(data) if data is not None else None
        self._map_lock = threading.Lock()

    @classmethod
    def open(cls, path: PathLike) -> Source:
        """Opens `path` for reading. Raises NotFoundError, StorageError, UnknownFormatError (a device, a pipe)."""
        name = os.fspath(path)
        if "\0" in name:
            raise NotFoundError(ZERO_BYTE, path=name)
        if (make := _STAND_INS.get(os.path.abspath(name)) if _STAND_INS else None) is not None:
            source = make(name)
        else:
            source = cls._open(name)
        for opened in _OPENED.get():
            opened.append(source)
        return source

    @classmethod
    def _open(cls, name: str) -> Source:
        with storage_errors(name), ExitStack() as stack:
            fd = os.open(name, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
            stack.callback(os.close, fd)
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                is_pipe = stat.S_ISFIFO(info.st_mode)
                what = "a pipe, not a regular file" if is_pipe else "not a regular file"
                hint = PIPE_HINT if is_pipe else "pass a model file or a Hugging Face folder"
                raise UnknownFormatError(what, path=name, hint=hint)
            source = cls(name, fd, None, info.st_size, FileIdentity.of(info))
            stack.pop_all()
        return source

    @classmethod
    def from_bytes(cls, data: Buffer, path: PathLike) -> Self:
        """A source over bytes in memory, for images that had to be decompressed; `path` is for messages."""
        return cls(os.fspath(path), None, data, len(data))

    def check(self, offset: int, n_bytes: int, what: str = "data", tensor: str | None = None) -> None:
        """Raises TruncatedError unless [offset, offset + n_bytes) is inside the file."""
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.size:
            raise TruncatedError(
                f"{what} needs bytes {offset} to {offset + n_bytes}, but the file has {self.size} bytes",
                path=self.path,
                tensor=tensor,
                offset=offset,
            )

    def check_unchanged(self, *, digest: bool = False) -> None:
        """Raises ChangedError if the file is not the one that was opened, or was modified since.

        With `digest` (for what decides on an output) a file with a stated digest is compared with it, whatever was
        read: raises
        ChecksumError.

        Size, mtime and inode decide, of the open file and of what its path refers to now. A write within the same clock
        tick of the file system as the open goes unnoticed. Works on a closed source too.
        """
        if self.identity is None:
            return
        with storage_errors(self.path):
            found = [] if self._fd is None else [os.fstat(self._fd)]
            try:
                found.append(os.stat(self._place))
            except (FileNotFoundError, NotADirectoryError):
                raise self._changed("no longer exists") from None
        for info in found:
            if FileIdentity.of(info) != self.identity:
                raise self._changed(_difference(self.identity, FileIdentity.of(info)))

    def _changed(self, how: str, offset: int | None = None) -> ChangedError:
        return ChangedError(f"the file changed while it was read: it {how}", path=self.path, offset=offset)

    def view(self, offset: int = 0, n_bytes: int | None = None) -> memoryview:
        """A read-only, zero-copy view of `n_bytes` bytes at `offset` (to the end by default).

        Raises TruncatedError beyond the end, ChangedError if the file was truncated since it was opened.
        """
        n_bytes = self.size - offset if n_bytes is None else n_bytes
        self.check(offset, n_bytes)
        if self._fd is not None:
            with storage_errors(self.path):
                now = os.fstat(self._fd).st_size
            if now < self.size:
                raise self._changed("shrank", now)
        if self._view is None:
            with self._map_lock:
                if self._view is None:
                    self._view = self._map()
        return self._view[offset : offset + n_bytes].toreadonly()

    def _map(self) -> memoryview:
        if self._fd is None:
            raise UsageError("the file is closed", path=self.path, hint="use its tensors inside the with block")
        if self.size == 0:
            return memoryview(b"")
        try:
            with storage_errors(self.path):
                return memoryview(mmap.mmap(self._fd, self.size, access=mmap.ACCESS_READ))
        except ValueError:  # longer than the file is now
            raise self._changed("shrank", self.size) from None

    def read(self, offset: int, n_bytes: int) -> bytes:
        """A copy of `n_bytes` bytes at `offset`; thread-safe."""
        self.check(offset, n_bytes)
        if self._fd is None:
            return bytes(self.view(offset, n_bytes))
        with storage_errors(self.path):
            data = os.pread(self._fd, n_bytes, offset)
        if len(data) < n_bytes:  # interrupted, or at the end of a file that shrank
            rest = bytearray(n_bytes - len(data))
            self._fill(offset + len(data), memoryview(rest))
            data += rest
        if self.record is not None:
            self.record.add(offset, data)
        return data

    def read_pieces(self, offset: int, n_bytes: int) -> Iterator[bytes]:
        """`read` in pieces, each of which gets the memory of the one before: fresh pages take longer than the copy."""
        for start in range(offset, offset + n_bytes, _PIECE_BYTES):
            yield self.read(start, min(_PIECE_BYTES, offset + n_bytes - start))

    def read_data(self, offset: int, n_bytes: int) -> bytes:
        """Reads tensor data, which is large and read once, in order: a remote file caches it on disk."""
        return self.read(offset, n_bytes)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `offset`; thread-safe."""
        self.check(offset, len(buffer))
        if self._fd is None:
            buffer[:] = self.view(offset, len(buffer))
            return
        self._fill(offset, buffer)
        if self.record is not None:
            self.record.add(offset, buffer)

    def _fill(self, offset: int, buffer: memoryview) -> None:
        assert self._fd is not None
        done = 0
        while done < len(buffer):
            with storage_errors(self.path):
                n = os.preadv(self._fd, [buffer[done:]], offset + done)
            if n == 0:
                raise self._changed("shrank", offset + done)
            done += n

    def close(self) -> None:
        """Closes the file. Views that were handed out keep their mapping."""
        if self.record is not None:
            self.record.close()
        for source in self.unpacked:
            source.close()
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with suppress(OSError):  # nothing was written, so nothing can be lost
                os.close(fd)
        self._view = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_STAND_INS: dict[str, Callable[[str], Source]] = {}


def register_remote(path: PathLike, make: Callable[[str], Source]) -> None:
    """Makes `Source.open(path)` return what `make` returns for the path: a remote file."""
    _STAND_INS[os.path.abspath(path)] = make


_WAITERS: list[Callable[[bool], None]] = []


def on_cancel(call: Callable[[bool], None]) -> None:
    """Registers `call`: called with True when pending reads should be cancelled, and with False afterwards."""
    _WAITERS.append(call)


@contextmanager
def cancelled_reads() -> Iterator[None]:
    """Within the block, reads that wait for remote bytes raise StorageError."""
    for call in _WAITERS:
        call(True)
    try:
        yield
    finally:
        for call in _WAITERS:
            call(False)


_OPENED: ContextVar[tuple[list[Source], ...]] = ContextVar("opened", default=())


@contextmanager
def watch_opened() -> Iterator[list[Source]]:
    """Collects the files that the block opens, including those it closes again; blocks may be nested."""
    opened: list[Source] = []
    token = _OPENED.set((*_OPENED.get(), opened))
    try:
        yield opened
    finally:
        _OPENED.reset(token)


@contextmanager
def unwatched() -> Iterator[None]:
    """Keeps scratch files that the block opens out of the `watch_opened` blocks around it."""
    token = _OPENED.set(())
    try:
        yield
    finally:
        _OPENED.reset(token)


def watched_paths() -> Iterator[str]:
    """The paths that were opened in any `watch_opened` block around the call."""
    return (source.path for opened in _OPENED.get() for source in opened)


def _difference(then: FileIdentity, now: FileIdentity) -> str:
    if (then.device, then.inode) != (now.device, now.inode):
        return "was replaced by another file"
    if then.size != now.size:
        return f"had {then.size} bytes, now has {now.size}"
    return "was written to"


def read_whole(path: PathLike) -> bytes:
    """All bytes of a file. Raises what Source.open raises."""
    with Source.open(path) as source:
        return source.read(0, source.size)


def absolute(path: PathLike) -> str:
    """The absolute path that the operating system means by `path`.

    `..` is kept: behind a link or a missing folder, removing it would name another file. Raises UsageError for a zero
    byte;
    NotFoundError if the working directory is gone.
    """
    name = os.fspath(path)
    if "\0" in name:
        raise UsageError(ZERO_BYTE, path=name)
    if os.path.isabs(name):
        whole = name
    else:
        with storage_errors(name):
            whole = os.path.join(os.getcwd(), name)
    return whole.rstrip(os.sep) or os.sep if os.pardir in whole.split(os.sep) else os.path.normpath(whole)


def exists(path: PathLike, *, follow: bool = True) -> bool:
    """Whether the name exists; without `follow` a link counts whatever its target."""
    return _mode(path, follow) is not None


def is_file(path: PathLike) -> bool:
    """Whether the path is a regular file, or a link to one. Raises StorageError."""
    return stat.S_ISREG(_mode(path) or 0)


def is_folder(path: PathLike) -> bool:
    """Whether the path is a folder, or a link to one. Raises StorageError."""
    return stat.S_ISDIR(_mode(path) or 0)


def is_same(a: PathLike, b: PathLike) -> bool:
    """Whether both existing paths are one file. Raises NotFoundError, StorageError."""
    with storage_errors(a):
        return os.path.samefile(a, b)


def _mode(path: PathLike, follow: bool = True) -> int | None:
    try:
        return os.stat(path, follow_symlinks=follow).st_mode
    except ValueError:  # a zero byte in the name
        return None
    except OSError as error:
        failure = storage_error(error, path)
        if isinstance(failure, FileNotFoundError):
            return None
        raise failure from error


def padding(n_bytes: int, alignment: int) -> int:
    """Bytes from `n_bytes` to the next multiple of `alignment`."""
    return -n_bytes % alignment
