"""Atomic output: a temporary file or folder beside the target, fsync, rename. Nothing half-written remains."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Self

from aprfmt.errors import AprError, ExistsError, RefusedError, StorageError, storage_errors
from aprfmt.io.source import Buffer, exists, is_file, is_folder, is_same
from aprfmt.io.system import start_writeback
from aprfmt.types import PathLike

_WRITEBACK_BYTES = 16 << 20
_STRIDE = 1 << 20
"""Writes end at multiples of this: the kernel then takes large pages; a write that straddles costs twice as much."""
_MOST_PARTS = 512


def check_target(target: PathLike, sources: list[str], force: bool, *, folder: bool = False) -> None:
    """Refuses an output that is an input, exists (without `force`), is of another kind, or has no folder to lie in.

    `folder` says that the output is one; a device or a pipe is never replaced.
    """
    name = os.fspath(target)
    if exists(name):
        if not (is_folder(name) if folder else is_file(name)):
            wanted = "a folder" if folder else "a plain file"
            raise RefusedError(
                f"the output exists and is not {wanted}", path=name, hint="choose another output with -o"
            )
        if any(is_same(name, source) for source in sources):
            raise RefusedError("the output is the input", path=name, hint="choose another output with -o")
    if not force and exists(name, follow=False):
        raise _exists(name)
    parent = os.path.dirname(os.path.abspath(name))
    if not is_folder(parent):
        raise StorageError("the output's folder does not exist", path=parent, hint=f"mkdir -p {parent}")


def check_space(folder: PathLike, n_bytes: int) -> None:
    """Raises StorageError when `folder`'s disk has less than `n_bytes` bytes free."""
    with storage_errors(folder):
        free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise StorageError(
            f"disk full: the output needs {n_bytes} bytes, {free} are free",
            path=folder,
            hint="free some space or write to another disk; nothing was written",
        )


def _exists(path: PathLike) -> ExistsError:
    return ExistsError("the output exists", path=path, hint="add --force to replace it")


class AtomicFile:
    """A file that appears under its name only when the `with` block ends without an exception.

    Without `fsync` it may be empty after a power cut. Errors name the target, never the temporary file.
    """

    def __init__(self, target: PathLike, *, force: bool = False, n_bytes: int = 0, fsync: bool = True) -> None:
        self.target = os.path.abspath(target)
        self._force = force
        self._n_bytes = n_bytes
        self._fsync = fsync
        self._fd = -1
        self._temporary = ""
        self._held: list[memoryview] = []
        self._held_bytes = 0
        self._written = 0
        self._begun = 0  # bytes that the kernel was told to write

    @property
    def temporary(self) -> str:
        """Path of the unfinished file, for checks before it is published; `flush` first."""
        return self._temporary

    def __enter__(self) -> Self:
        folder = os.path.dirname(self.target)
        check_space(folder, self._n_bytes)
        self._temporary = _temporary_beside(self.target)
        with storage_errors(folder):
            # The permissions that any new file gets, as the umask allows.
            self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        return self

    def write(self, data: Buffer) -> None:
        """Appends all of `data`, which must stay as it is until the file is complete. Raises StorageError."""
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: _STRIDE - (self._written + self._held_bytes) % _STRIDE]
            self._held.append(part)
            self._held_bytes += len(part)
            view = view[len(part) :]
            if (self._written + self._held_bytes) % _STRIDE == 0 or len(self._held) == _MOST_PARTS:
                self.flush()

    def flush(self) -> None:
        """Writes what is held, and lets the kernel begin to store it."""
        parts, self._held, self._held_bytes = self._held, [], 0
        with storage_errors(self.target):
            while parts:
                n = os.writev(self._fd, parts)
                self._written += n
                while parts and n >= len(parts[0]):
                    n -= len(parts.pop(0))
                if n:
                    parts[0] = parts[0][n:]
        if self._fsync and self._written - self._begun >= _WRITEBACK_BYTES:
            start_writeback(self._fd, self._begun, self._written - self._begun)
            self._begun = self._written

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.flush()
                with storage_errors(self.target):
                    if self._fsync:
                        os.fsync(self._fd)
                    self._close()  # network disks say only here that something could not be stored
                    _appear(self._temporary, self.target, self._force)
                    _sync_folder(os.path.dirname(self.target))
            elif isinstance(error, AprError) and error.path == self._temporary:
                error.path = self.target
        finally:
            with suppress(OSError):
                self._close()
            _remove(self._temporary)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class AtomicFolder:
    """Files that appear under their names in the folder `target` together, when the `with` block ends well.

    They are written in a temporary folder, which the `with` statement gives. Errors name the target. There are three
    cases:

        no such folder    the temporary folder takes its name
        `force`           the folder is kept: new files replace those of the same name, and `stale` names (glob
                          patterns) that the new ones do not replace are removed, so that no old shard stays
        `shared`          the folder exists and is not ours: files are put into it, replacing others with `force` only

    When one file cannot appear, those that did are taken back, and what they replaced is put back.
    """

    def __init__(
        self,
        target: PathLike,
        *,
        force: bool = False,
        n_bytes: int = 0,
        stale: tuple[str, ...] = (),
        shared: bool = False,
    ) -> None:
        self.target = os.path.abspath(target)
        self._force = force
        self._n_bytes = n_bytes
        self._stale = stale
        self._shared = shared
        self._temporary = ""

    def __enter__(self) -> Path:
        # Into a shared folder nothing is written beside: its parent may belong to somebody else.
        temporary = _temporary_beside(os.path.join(self.target, "parts") if self._shared else self.target)
        folder = os.path.dirname(temporary)
        check_space(folder, self._n_bytes)
        with storage_errors(folder):
            os.mkdir(temporary)
        self._temporary = temporary
        return Path(temporary)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with storage_errors(self.target):
                    self._publish()
            elif isinstance(error, AprError) and error.path and error.path.startswith(self._temporary):
                error.path = self.target + error.path.removeprefix(self._temporary)
        finally:
            if self._temporary:
                _remove(self._temporary)

    def _publish(self) -> None:
        _sync_folder(self._temporary)
        if not exists(self.target, follow=False):
            os.rename(self._temporary, self.target)
            _sync_folder(os.path.dirname(self.target))
            return
        if not (self._force or self._shared):
            raise _exists(self.target)
        new = sorted(_files_below(self._temporary))
        aside = os.path.join(self._temporary, ".replaced")
        done: list[tuple[str, str | None]] = []  # (what appeared or went, what was there)
        try:
            for name in new:
                source, target = os.path.join(self._temporary, name), os.path.join(self.target, name)
                if os.path.dirname(name):
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                old = None
                if self._force and exists(target, follow=False):
                    old = os.path.join(aside, name)
                    done.append((target, old))
                    _keep(target, old)
                _appear(source, target, self._force)
                if old is None:
                    done.append((target, None))
            for name in set(self._stale_names()) - set(new):
                target, old = os.path.join(self.target, name), os.path.join(aside, name)
                done.append((target, old))
                _keep(target, old)
                with suppress(FileNotFoundError):
                    os.unlink(target)
            _sync_folder(self.target)
        except BaseException:
            for target, old in reversed(done):
                try:
                    os.unlink(target) if old is None else os.replace(old, target)
                except FileNotFoundError:
                    pass
                except OSError:
                    self._temporary = ""  # what could not be put back is kept there
            raise

    def _stale_names(self) -> Iterator[str]:
        for pattern in self._stale:
            inner, pattern = os.path.split(pattern)
            folder = os.path.join(self.target, inner)
            for name in os.listdir(folder) if is_folder(folder) else ():
                if fnmatchcase(name, pattern):
                    yield os.path.join(inner, name)


def _files_below(folder: str) -> Iterator[str]:
    """Every file below the folder, relative to it. Raises OSError, where a glob would pass over a folder."""

    def refuse(error: OSError) -> None:
        raise error

    for place, _, names in os.walk(folder, onerror=refuse):
        yield from (os.path.relpath(os.path.join(place, name), folder) for name in names)


def _temporary_beside(target: str) -> str:
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name[:64]}.{os.urandom(4).hex()}.tmp")


def _appear(temporary: str, target: str, force: bool) -> None:
    """Gives a complete file its name; without `force` never in the place of another. Raises ExistsError, OSError."""
    if force:
        os.replace(temporary, target)
        return
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise _exists(target) from None
    except OSError:  # a file system without hard links
        if exists(target, follow=False):
            raise _exists(target) from None
        os.rename(temporary, target)


def _keep(path: str, aside: str) -> None:
    """Keeps what is at `path` as `aside` too, or only there on a file system without hard links."""
    os.makedirs(os.path.dirname(aside), exist_ok=True)
    try:
        os.link(path, aside)
    except OSError:
        os.rename(path, aside)


def _remove(temporary: str) -> None:
    """Removes a temporary file or folder that may be gone already.

    Tried twice, since on network disks a removal can fail once. What cannot be removed stays: the outcome of the
    write matters more than a stray file.
    """
    for _ in range(2):
        try:
            if is_folder(temporary):
                shutil.rmtree(temporary)
            else:
                os.unlink(temporary)
        except FileNotFoundError:
            return
        except OSError:
            continue
        return


def _sync_folder(folder: str) -> None:
    """Makes new names in the folder last through a power cut."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder that may be written to but not read
        return
    try:
        os.fsync(fd)
    finally:
        with suppress(OSError):
            os.close(fd)
