"""A folder of files that can be rebuilt: looked up by key, built by one process at a time, evicted oldest first.

$APR_CACHE, else $XDG_CACHE_HOME/aprfmt, else ~/.cache/aprfmt
    KIND/                 mode 0700, owned by this user
    KIND/KEY.SUFFIX       complete files, mode 0600; the modification time is the time of last use
    KIND/KEY.SUFFIX.lock  size and CRC-32 of the file as JSON; locked exclusively while the file is built or removed,
                          shared while it is in use

The CRC-32 of a file is checked on each use, so damage and power cuts do not go unnoticed. Files that another user could
have written are never used.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from aprfmt.errors import AprError, ChecksumError, StorageError, UsageError, storage_errors
from aprfmt.io.source import Source
from aprfmt.types import PathLike

try:
    import fcntl
except ImportError:  # Windows: two processes may build the same file; the later one wins
    fcntl = None  # type: ignore[assignment]

EXPORTS = "exports"
"""The kind of the files that models were exported to, for llama.cpp."""

CACHE_VARIABLE = "APR_CACHE"
"""Environment variable that sets the cache folder."""


def cache_home(environment: Mapping[str, str] | None = None) -> Path:
    """The folder of everything that is cached; it may not exist yet. Raises UsageError without a home folder."""
    env = os.environ if environment is None else environment
    if env.get(CACHE_VARIABLE):
        return expand_home(env[CACHE_VARIABLE], "the cache", CACHE_VARIABLE)
    return expand_home(env.get("XDG_CACHE_HOME") or "~/.cache", "the cache", CACHE_VARIABLE) / "aprfmt"


def expand_home(path: str, what: str, variable: str) -> Path:
    """Expands ~ in the path of `what`, which an environment variable sets. Raises UsageError for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(
            f"cannot locate {what}: {path} refers to the home folder of an unknown user", hint=f"set {variable}=FOLDER"
        ) from None


_PAUSE_S = 0.02
_PATIENCE_S = 2.0
"""How long to wait for a removed file whose lock is still held by its readers."""

_MOST_RECORD_BYTES = 200


def own_folder(path: Path) -> None:
    """Creates the folder `path`, or checks an existing one: owned by this user, mode 0700.

    Raises StorageError, also for a folder with files that others could have written.
    """
    hint = f"set {CACHE_VARIABLE}=FOLDER to use another one"
    is_foreign = False
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(0o700, exist_ok=True)
        if not hasattr(os, "geteuid"):
            return
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            info, owners = os.fstat(fd), {os.lstat(path).st_uid}
            owners.add(info.st_uid)
            if owners == {os.geteuid()} and info.st_mode & 0o077:
                os.fchmod(fd, 0o700)
                if is_foreign := bool(info.st_mode & 0o022 and os.listdir(fd)):
                    os.fchmod(fd, stat.S_IMODE(info.st_mode))
                info = os.fstat(fd)
        finally:
            os.close(fd)
        around = path.parent.stat().st_mode
    except OSError as error:
        raise StorageError(f"the cache is not writable: {error.strerror}", path=path, hint=hint) from error
    if owners != {os.geteuid()}:
        raise StorageError("the cache belongs to another user", path=path, hint=hint)
    if is_foreign:
        what, hint = (
            "other users could write to the cache: its files are ignored",
            f"rm -r {shlex.quote(str(path))}, or {hint}",
        )
        raise StorageError(what, path=path, hint=hint)
    if info.st_mode & 0o022 or (around & stat.S_IWOTH and not around & stat.S_ISVTX):
        raise StorageError("other users can write to the cache", path=path, hint=hint)


@contextmanager
def storing_in(folder: PathLike, variable: str = CACHE_VARIABLE) -> Iterator[None]:
    """An error of the block about a full disk under `folder` gets the hint to set `variable` to another folder."""
    try:
        yield
    except StorageError as error:
        place = Path(os.path.abspath(error.path or os.sep))
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and place.is_relative_to(os.path.abspath(folder)):
            error.hint = f"free some space, or set {variable} to a folder on another disk"
        raise


_in_use: weakref.WeakValueDictionary[str, CacheEntry] = weakref.WeakValueDictionary()


def in_use(paths: Iterable[PathLike]) -> list[CacheEntry]:
    """The cache entries among the files at `paths`; holding an entry keeps its file."""
    return [entry for path in paths if (entry := _in_use.get(os.path.abspath(path))) is not None]


class CacheEntry:
    """A file of the cache that is not removed while this object lives.

    Attributes:
        path: the file.
        made: whether it was built by this call.
    """

    def __init__(self, path: Path, lock: int, crc: int, *, made: bool) -> None:
        self.path, self.made = path, made
        self._lock, self._crc = lock, crc
        self._close = weakref.finalize(self, os.close, lock)
        self._error: AprError | None = None
        self._thread: threading.Thread | None = None
        _in_use[os.path.abspath(path)] = self
        if not made:
            # A thread that never starts would keep this object, and its lock, until garbage collection.
            self._thread = threading.Thread(target=self._check, name="apr-cache", daemon=True)
            self._thread.start()

    def _check(self) -> None:
        try:
            if _crc_of(self.path) != self._crc:
                hint = "run it again: the file is recreated"
                self._error = ChecksumError("the file in the cache is damaged", path=self.path, hint=hint)
        except AprError as error:
            self._error = error

    def confirm(self) -> None:
        """Waits until the checksum of the file has been verified; verification starts when the entry is created.

        Raises ChecksumError, after which the next run rebuilds the file, and StorageError.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is None:
            return
        if _is_at(self._lock, _lock_of(self.path)):  # those who have loaded it keep an unlinked file
            _unlink(self.path)
        raise self._error

    def close(self) -> None:
        """Releases the file."""
        self._close()


class CacheFolder:
    """The cached files of one kind.

    Args:
        kind: the name of the folder below cache_home().
    """

    def __init__(self, kind: str) -> None:
        self.path = cache_home() / kind

    def entry(self, name: str, make: Callable[[Path], None]) -> CacheEntry:
        """Returns the file `name`; if it is missing, calls `make` with the path to write. Only one process builds it.

        Marks an existing file as used last. Raises StorageError, and what `make` raises.
        """
        own_folder(self.path)
        with storing_in(self.path):
            return self._entry(self.path / name, make)

    def _entry(self, target: Path, make: Callable[[Path], None]) -> CacheEntry:
        begun = time.monotonic()
        while True:
            lock = _open_lock(target)
            try:
                if (entry := self._take(target, lock, make)) is not None:
                    return entry
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
            time.sleep(_PAUSE_S)
            if time.monotonic() - begun > _PATIENCE_S and not target.exists():
                _lock_of(target).unlink(missing_ok=True)

    def _take(self, target: Path, lock: int, make: Callable[[Path], None]) -> CacheEntry | None:
        """The entry, which then owns `lock`; None if other processes interfere."""
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_SH)
        crc = _recorded(target, lock)
        made = False
        if crc is None:
            if not _try_lock(lock) or not _is_at(lock, _lock_of(target)):
                return None
            crc = _recorded(target, lock)  # another process may have built it before we got the lock
            if made := crc is None:
                crc = _build(target, lock, make)
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_SH)
        if not _is_at(lock, _lock_of(target)):
            return None
        with suppress(OSError):
            os.utime(target)
        return CacheEntry(target, lock, crc, made=made)

    def trim(self, max_bytes: int) -> list[Path]:
        """Removes the least recently used files until at most `max_bytes` are left; returns those removed.

        Files in use are kept, whatever their size.
        """
        files = []
        for lock in self.path.glob("*.lock"):
            path = lock.with_suffix("")
            with suppress(OSError):
                info = path.lstat()
                files.append((info.st_mtime_ns, info.st_size, path))
        total, removed = sum(size for _, size, _ in files), []
        for _, size, path in sorted(files):
            if total <= max_bytes:
                break
            if _removed(path):
                total -= size
                removed.append(path)
        return removed


def _lock_of(target: Path) -> Path:
    return Path(f"{target}.lock")


def _open_lock(target: Path) -> int:
    """Opens the lock file and returns its descriptor. Raises StorageError, also for a link or another user's file."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    path = _lock_of(target)
    with storage_errors(path):
        lock = os.open(path, flags, 0o600)
        info = os.fstat(lock)
    if not stat.S_ISREG(info.st_mode) or (hasattr(os, "geteuid") and info.st_uid != os.geteuid()):
        os.close(lock)
        raise StorageError("the lock file in the cache is invalid", path=path, hint="delete it and run again")
    return lock


def _try_lock(lock: int) -> bool:
    """Tries to turn the lock into an exclusive one; on failure a shared lock is lost."""
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _is_at(lock: int, path: Path) -> bool:
    """Whether the lock is the file at `path`: whoever removes a file removes its lock too."""
    try:
        return os.path.samestat(os.fstat(lock), os.lstat(path))
    except FileNotFoundError:
        return False


def _recorded(target: Path, lock: int) -> int | None:
    """The expected CRC-32 of the file at `target`; None if the file is incomplete or not ours."""
    try:
        record = json.loads(os.pread(lock, _MOST_RECORD_BYTES, 0))
        info = os.lstat(target)
        is_ours = stat.S_ISREG(info.st_mode) and info.st_uid == os.fstat(lock).st_uid
        return int(record["crc32"], 16) if is_ours and record["size"] == info.st_size else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _build(target: Path, lock: int, make: Callable[[Path], None]) -> int:
    """Builds the file, records its CRC-32 and returns it."""
    os.ftruncate(lock, 0)
    with storage_errors(target):
        target.unlink(missing_ok=True)  # a link would redirect the write
    make(target)
    with storage_errors(target):
        os.chmod(target, 0o600)
        crc = _crc_of(target)
        os.pwrite(lock, json.dumps({"size": target.stat().st_size, "crc32": f"{crc:08x}"}).encode(), 0)
    return crc


def _crc_of(path: Path) -> int:
    from aprfmt.io.crc import crc32_of_range

    with Source.open(path) as source:
        return crc32_of_range(source, 0, source.size)


def _removed(target: Path) -> bool:
    """Removes a file that is not in use; returns whether it is gone."""
    try:
        lock = _open_lock(target)
    except StorageError:
        return False
    try:
        if not _try_lock(lock) or not _is_at(lock, _lock_of(target)):
            return False
        return _unlink(target)
    finally:
        os.close(lock)


def _unlink(target: Path) -> bool:
    """Removes a file and its lock; returns whether that succeeded."""
    try:
        target.unlink(missing_ok=True)
        _lock_of(target).unlink(missing_ok=True)
    except OSError:
        return False
    return True
