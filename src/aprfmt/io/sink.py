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


def check_target(target: str | os.PathLike[str], sources: list[str], force: bool) -> None:
    """Refuses an output that is one of the inputs, that exists (without `force`) or whose folder is missing."""
    name = os.fspath(target)
    if os.path.lexists(name):
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
    """A file that appears under its name only when the `with` block ends without an exception."""

    def __init__(self, target: str | os.PathLike[str], *, force: bool = False, n_bytes: int = 0) -> None:
        self.target = os.path.abspath(target)
        self._force = force
        self._n_bytes = n_bytes
        self._fd = -1
        self._temporary = ""

    @property
    def temporary(self) -> str:
        """Path of the unfinished file, for checks before it is published."""
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
        """Appends all of `data`. Raises StorageError."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise storage_error(error, self.target) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._fd)
                self._publish()
        except OSError as os_error:
            raise storage_error(os_error, self.target) from os_error
        finally:
            self._discard()

    def _publish(self) -> None:
        if self._force:
            os.replace(self._temporary, self.target)
        else:
            try:
                os.link(self._temporary, self.target)
            except FileExistsError:
                raise ExistsError(
                    "the output exists", path=self.target, hint="add --force to replace it"
                ) from None
            except OSError:  # a file system without hard links
                if os.path.lexists(self.target):
                    raise ExistsError("the output exists", path=self.target) from None
                os.rename(self._temporary, self.target)
        _sync_folder(os.path.dirname(self.target))

    def _discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._temporary and os.path.lexists(self._temporary):
            os.unlink(self._temporary)


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
