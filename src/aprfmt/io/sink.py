"""Atomic output: a temporary file or folder beside the target, fsync, rename. Nothing half-written remains."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from aprfmt.errors import ExistsError, RefusedError, StorageError, storage_error
from aprfmt.io.source import Buffer
from aprfmt.io.system import start_writeback

_WRITEBACK_BYTES = 16 << 20
_STRIDE = 1 << 20
"""Writes end at multiples of this: the kernel then takes large pages; a write that straddles costs twice as much."""
_MOST_PARTS = 512


def check_target(
    target: str | os.PathLike[str], sources: list[str], force: bool, *, folder: bool = False
) -> None:
    """Refuses an output that is an input, exists (without `force`), is of another kind, or has no folder to lie in.

    `folder` says that the output is one; a device or a pipe is never replaced.
    """
    name = os.fspath(target)
    if os.path.lexists(name):
        if os.path.exists(name) and not (os.path.isdir(name) if folder else os.path.isfile(name)):
            wanted = "a folder" if folder else "a plain file"
            raise RefusedError(
                f"the output exists and is not {wanted}", path=name, hint="choose another name with -o"
            )
        for source in sources:
            if os.path.exists(name) and os.path.samefile(name, source):
                raise RefusedError("the output is the input", path=name, hint="choose another name with -o")
        if not force:
            raise ExistsError("the output exists", path=name, hint="add --force to replace it")
    parent = os.path.dirname(os.path.abspath(name))
    if not os.path.isdir(parent):
        raise StorageError("the output's folder does not exist", path=parent, hint=f"mkdir -p {parent}")


def check_space(folder: str | os.PathLike[str], n_bytes: int) -> None:
    """Raises StorageError when `folder`'s disk has less than `n_bytes` bytes free."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise storage_error(error, folder) from error
    if free < n_bytes:
        raise StorageError(
            f"disk full: the output needs {n_bytes} bytes, {free} are free",
            path=folder,
            hint="free some space or write to another disk; nothing was written",
        )


class AtomicFile:
    """A file that appears under its name only when the `with` block ends without an exception.

    Without `fsync` it may be empty after a power cut.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        force: bool = False,
        n_bytes: int = 0,
        fsync: bool = True,
    ) -> None:
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
        folder, name = os.path.split(self.target)
        check_space(folder, self._n_bytes)
        try:
            self._fd, self._temporary = tempfile.mkstemp(prefix=f".{name[:64]}.", suffix=".tmp", dir=folder)
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(self._fd, 0o666 & ~mask)
        except OSError as error:
            self._discard()
            raise storage_error(error, folder) from error
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
        try:
            while parts:
                n = os.writev(self._fd, parts)
                self._written += n
                while parts and n >= len(parts[0]):
                    n -= len(parts.pop(0))
                if n:
                    parts[0] = parts[0][n:]
        except OSError as error:
            raise storage_error(error, self.target) from error
        if self._fsync and self._written - self._begun >= _WRITEBACK_BYTES:
            start_writeback(self._fd, self._begun, self._written - self._begun)
            self._begun = self._written

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.flush()
                if self._fsync:
                    os.fsync(self._fd)
                _appear(self._temporary, self.target, self._force)
                _sync_folder(os.path.dirname(self.target))
        except OSError as os_error:
            raise storage_error(os_error, self.target) from os_error
        finally:
            self._discard()

    def _discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._temporary and os.path.lexists(self._temporary):
            os.unlink(self._temporary)


def _appear(temporary: str, target: str, force: bool) -> None:
    """Gives a complete file its name; without `force` never in the place of another. Raises ExistsError."""
    if force:
        os.replace(temporary, target)
        return
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise ExistsError("the output exists", path=target, hint="add --force to replace it") from None
    except OSError:  # a file system without hard links
        if os.path.lexists(target):
            raise ExistsError("the output exists", path=target) from None
        os.rename(temporary, target)


class AtomicFiles:
    """Several files of one folder that appear under their names together, when the `with` block ends well.

    They are written in a temporary folder beside them, which the `with` statement gives. When one of them cannot
    appear, those that did are taken back, and what they replaced (`force`) is put back.
    """

    def __init__(self, folder: str | os.PathLike[str], *, force: bool = False, n_bytes: int = 0) -> None:
        self.folder = os.path.abspath(folder)
        self._force = force
        self._n_bytes = n_bytes
        self._temporary = ""

    def __enter__(self) -> Path:
        check_space(self.folder, self._n_bytes)
        try:
            self._temporary = tempfile.mkdtemp(prefix=".parts.", suffix=".tmp", dir=self.folder)
        except OSError as error:
            raise storage_error(error, self.folder) from error
        return Path(self._temporary)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        except OSError as os_error:
            raise storage_error(os_error, self.folder) from os_error
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _publish(self) -> None:
        done: list[tuple[str, str | None]] = []
        try:
            for name in sorted(os.listdir(self._temporary)):
                target, old = os.path.join(self.folder, name), None
                if self._force and os.path.lexists(target):
                    old = os.path.join(self._temporary, f"{name}.old")
                    os.rename(target, old)
                    done.append((target, old))
                _appear(os.path.join(self._temporary, name), target, force=False)
                if old is None:
                    done.append((target, None))
            _sync_folder(self.folder)
        except BaseException:
            for target, old in reversed(done):
                if old is not None:
                    os.replace(old, target)
                else:
                    os.unlink(target)
            raise


class AtomicFolder:
    """A folder that appears under its name only when the `with` block ends without an exception.

    With `force` an existing folder is kept: the new files replace those of the same name, and `stale` names
    (glob patterns) that the new ones do not replace are removed, so that no old shard stays beside new ones.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        force: bool = False,
        n_bytes: int = 0,
        stale: tuple[str, ...] = (),
    ) -> None:
        self.target = Path(os.path.abspath(target))
        self._force = force
        self._n_bytes = n_bytes
        self._stale = stale
        self._temporary: Path | None = None

    def __enter__(self) -> Path:
        check_space(self.target.parent, self._n_bytes)
        try:
            self._temporary = Path(
                tempfile.mkdtemp(prefix=f".{self.target.name}.", suffix=".tmp", dir=self.target.parent)
            )
            mask = os.umask(0)
            os.umask(mask)
            self._temporary.chmod(0o777 & ~mask)
        except OSError as error:
            raise storage_error(error, self.target.parent) from error
        return self._temporary

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._temporary is not None
        try:
            if kind is None:
                _sync_folder(str(self._temporary))
                self._publish(self._temporary)
        except OSError as os_error:
            raise storage_error(os_error, self.target) from os_error
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _publish(self, temporary: Path) -> None:
        if not os.path.lexists(self.target):
            os.rename(temporary, self.target)
            return
        if not self._force:
            raise ExistsError("the output exists", path=self.target, hint="add --force to replace it")
        files = [path.relative_to(temporary) for path in temporary.rglob("*") if path.is_file()]
        for name in files:
            (self.target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary / name, self.target / name)
        for pattern in self._stale:
            for path in self.target.glob(pattern):
                if path.relative_to(self.target) not in files:
                    path.unlink()
        _sync_folder(str(self.target))


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
