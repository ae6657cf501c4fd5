"""Atomic output: written unnamed or under a temporary name, synced, published in one step or not at all.

An output's name never refers to a half-written file, and the next run into the same folder removes what a killed
process leaves.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Self

from aprfmt.errors import AprError, RefusedError, StorageError, storage_errors
from aprfmt.io.publish import appear, copy_attributes, exists_error, files_below, link_kept_files, remove, sync_folder
from aprfmt.io.source import Buffer, absolute, exists, is_file, is_folder, is_same, watched_paths
from aprfmt.io.switch import Switch
from aprfmt.io.system import exchange, is_mounted, link_unnamed, open_unnamed, path_of_unnamed, start_writeback
from aprfmt.io.temporary import sweep, temporary_beside
from aprfmt.types import PathLike

_WRITEBACK_BYTES = 16 << 20
_STRIDE = 1 << 20
"""Writes end at multiples of this: the kernel then uses large pages; a write across a boundary costs twice as much."""
_MOST_PARTS = 512
_MOST_LINKS = 40
_PARTS = "parts"
_SHARED_PLACE = stat.S_ISVTX | stat.S_IWOTH


def check_target(target: PathLike, sources: Iterable[str], force: bool, *, folder: bool = False) -> None:
    """Refuses an output that is an input, exists (without `force`), is of another kind, or has no parent folder.

    Inputs are the `sources` and every file opened in a `watch_opened` block around the call. `folder` says that the
    output is a folder; a device or a pipe is never replaced.
    """
    name = os.fspath(target)
    parent = os.path.dirname(absolute(name))
    if exists(name):
        if not (is_folder(name) if folder else is_file(name)):
            wanted = "a folder" if folder else "a regular file"
            raise RefusedError(
                f"the output exists and is not {wanted}", path=name, hint="choose another output with -o"
            )
        if any(exists(source) and is_same(name, source) for source in (*sources, *watched_paths())):
            raise RefusedError("the output is the input", path=name, hint="choose another output with -o")
    if not force and exists(name, follow=False):
        raise exists_error(name)
    if not is_folder(parent):
        raise StorageError("the output's folder does not exist", path=parent, hint=f"mkdir -p {parent}")


def inputs_of(paths: Iterable[PathLike], outputs: str | tuple[str, ...]) -> Iterator[str]:
    """The files and folders `paths` with all files below the folders, as sources for `check_target`.

    Names that end as one of `outputs` are earlier outputs, which may be replaced.
    """
    for path in paths:
        yield os.fspath(path)
        for folder, _, names in os.walk(path):
            yield from (os.path.join(folder, name) for name in names if not name.endswith(outputs))


def check_no_inputs_inside(folder: PathLike, sources: Iterable[PathLike]) -> None:
    """Refuses an output folder that contains an input, a link to one, or a folder of inputs.

    For a folder in which many files are written and removed. It may itself be inside a folder of inputs. Missing
    sources are ignored. Raises RefusedError, StorageError.
    """
    if not is_folder(folder):
        return
    with storage_errors(folder):
        own = _chain(folder)[0]
        linked, hard = _links_in(folder)
        for source in filter(exists, sources):
            chain = _chain(source)
            leads_in = own in chain or (is_folder(source) and any(own in link for link in _links_in(source, own)[0]))
            # A link in the output folder to the input, to a folder around it, or to something inside it.
            leads_out = any(link[0] in chain or (chain[0] in link and own not in link) for link in linked)
            if leads_in or leads_out or (hard and not hard.isdisjoint(_files_of(source))):
                raise RefusedError(
                    f"the output folder contains the input {os.fspath(source)}, or one links to the other",
                    path=folder,
                    hint="choose another output with -o, or copy the input elsewhere",
                )


_Inode = tuple[int, int]


def _chain(path: PathLike) -> list[_Inode]:
    """The target of the path and every folder around it."""
    real = Path(os.path.realpath(path))
    return [(info.st_dev, info.st_ino) for info in map(os.stat, (real, *real.parents))]


def _links_in(folder: PathLike, left_out: _Inode | None = None) -> tuple[list[list[_Inode]], set[_Inode]]:
    """The targets of links in a folder, and its files with more than one name."""
    linked, hard = [], set()
    for here, folders, files in os.walk(os.fspath(folder)):
        for name in (*folders, *files):
            path = os.path.join(here, name)
            info = os.lstat(path)
            if (info.st_dev, info.st_ino) == left_out:
                folders.remove(name)
            elif stat.S_ISLNK(info.st_mode):
                linked += [_chain(path)] if exists(path) else []
            elif stat.S_ISREG(info.st_mode) and info.st_nlink > 1:
                hard.add((info.st_dev, info.st_ino))
    return linked, hard


def _files_of(source: PathLike) -> Iterator[_Inode]:
    """The inodes of a file, or of the files of a folder."""
    paths = [os.fspath(source)] if not is_folder(source) else (
        os.path.join(here, name) for here, _, files in os.walk(source) for name in files
    )  # fmt: skip
    for path in paths:
        if exists(path):
            info = os.stat(path)
            yield (info.st_dev, info.st_ino)


def check_space(folder: PathLike, n_bytes: int) -> None:
    """Raises StorageError if less than `n_bytes` bytes are free on `folder`'s disk."""
    with storage_errors(folder):
        free = shutil.disk_usage(folder).free
    if free < n_bytes:
        error = StorageError(
            f"disk full: the output needs {n_bytes} bytes, {free} are free",
            path=folder,
            hint="free some space or write to another disk; nothing was written",
        )
        error.errno = errno.ENOSPC
        raise error


def _resolve_links(path: str) -> str:
    """Resolves `path`; the target may not exist. Raises OSError, RefusedError for links that are a trap.

    As in kernels that protect links: in a world-writable folder such as /tmp only the user's own links are followed.
    """
    for _ in range(_MOST_LINKS):
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            return path
        if not stat.S_ISLNK(info.st_mode):
            return path
        folder = os.path.dirname(path)
        place = os.stat(folder)
        if place.st_mode & _SHARED_PLACE == _SHARED_PLACE and info.st_uid not in (os.geteuid(), place.st_uid):
            raise RefusedError(
                "the output is another user's symlink in a world-writable folder",
                path=path,
                hint="choose another output with -o",
            )
        path = os.path.join(folder, os.readlink(path))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def stale_names(place: str, patterns: Collection[str]) -> Iterator[str]:
    """Files of the folder that match one of `patterns`, relative to it. Raises OSError, StorageError."""
    for pattern in patterns:
        inner, pattern = os.path.split(pattern)
        folder = os.path.join(place, inner)
        for name in os.listdir(folder) if is_folder(folder) else ():
            if fnmatchcase(name, pattern):
                yield os.path.join(inner, name)


class AtomicFile:
    """A file that appears under its name only when the `with` block ends without an exception.

    With `force` the new file inherits permissions, owner and extended attributes of the old one; a link is kept and the
    file behind it replaced. Without `fsync` the file may be empty after a power cut. With `is_private` it has the mode
    0600, whatever it replaces. Errors name the target, never the temporary file.
    """

    def __init__(
        self, target: PathLike, *, force: bool = False, n_bytes: int = 0, fsync: bool = True, is_private: bool = False
    ) -> None:
        self.target = absolute(target)
        self._is_private = is_private
        self._force = force
        self._n_bytes = n_bytes
        self._fsync = fsync
        self._fd = -1
        self._place = self.target  # with links resolved
        self._name = ""  # the temporary name; none if unnamed files are supported
        self._held: list[memoryview] = []
        self._held_bytes = 0
        self._written = 0
        self._begun = 0  # bytes whose writeback was started

    @property
    def temporary(self) -> str:
        """A path that opens the unfinished file, for checks before publication; call `flush` first."""
        return self._name or path_of_unnamed(self._fd)

    def __enter__(self) -> Self:
        with storage_errors(self.target):
            if self._force:
                self._place = _resolve_links(self.target)
        folder = os.path.dirname(self._place)
        sweep(folder)
        check_space(folder, self._n_bytes)
        with storage_errors(folder):
            is_replaced = self._force and is_file(self._place)
            # The permissions of any new file, by the umask; none for others until those of the old file are copied.
            mode = 0o600 if is_replaced or self._is_private else 0o666
            fd = open_unnamed(folder, mode)
            if fd is None:
                name = temporary_beside(self._place)
                fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
                self._name = name
            self._fd = fd
            try:
                if is_replaced and not self._is_private:
                    copy_attributes(self._place, fd)
            except BaseException:
                self._discard()
                raise
        return self

    def write(self, data: Buffer) -> None:
        """Appends all of `data`, which must not be modified until the file is complete. Raises StorageError."""
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: _STRIDE - (self._written + self._held_bytes) % _STRIDE]
            self._held.append(part)
            self._held_bytes += len(part)
            view = view[len(part) :]
            if (self._written + self._held_bytes) % _STRIDE == 0 or len(self._held) == _MOST_PARTS:
                self.flush()

    def patch(self, offset: int, data: bytes) -> None:
        """Replaces bytes that were already written. Raises StorageError."""
        self.flush()
        with storage_errors(self.target):
            while data:
                n = os.pwrite(self._fd, data, offset)
                offset, data = offset + n, data[n:]

    def flush(self) -> None:
        """Writes the buffered bytes and starts their writeback."""
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
                    self._publish()
                    sync_folder(os.path.dirname(self._place))
            elif isinstance(error, AprError) and error.path == self.temporary:
                error.path = self.target
        finally:
            self._discard()

    def _publish(self) -> None:
        if self._name:
            self._close()  # network disks report failed writes only here
        else:
            try:
                link_unnamed(self._fd, self._place)
            except FileExistsError:
                if not self._force:
                    raise exists_error(self.target) from None
            else:
                return
            self._name = temporary_beside(self._place)
            link_unnamed(self._fd, self._name)
        appear(self._name, self._place, self._force)

    def _discard(self) -> None:
        with suppress(OSError):
            self._close()
        if self._name:
            remove(self._name)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class AtomicFolder:
    """Files that appear under their names in the folder `target` together, when the `with` block succeeds.

    They are written into a temporary folder, which the `with` statement returns. Errors name the target. There are
    three cases:

        no such folder    the temporary folder gets its name
        `force`           new files replace those of the same name, files that match `stale` (glob patterns) and are not
                          replaced are removed, so that no old shard remains, and everything else is kept: it is
                          hard-linked into the temporary folder, and the two folders are exchanged
        `shared`          the folder exists and is not ours: a `Switch` moves the files into it, replacing others and
                          stale ones with `force` only

    A folder that cannot be exchanged (unsupported by the file system, a mount point, or this process's working
    directory) is treated as shared. `last` is the file that is removed first and appears last in a switch: without it
    the others cannot be loaded.
    """

    def __init__(
        self,
        target: PathLike,
        *,
        force: bool = False,
        n_bytes: int = 0,
        stale: Collection[str] = (),
        last: str = "",
        shared: bool = False,
    ) -> None:
        self.target = absolute(target)
        self._force = force
        self._n_bytes = n_bytes
        self._stale = stale
        self._last = last
        self._shared = shared
        self._place = self.target  # with links resolved
        self._temporary = ""
        self._is_needed = False  # by the next run, which completes what could neither be done nor undone

    def __enter__(self) -> Path:
        with storage_errors(self.target):
            if self._force or self._shared:
                self._place = os.path.realpath(_resolve_links(self.target))
            is_there = exists(self._place, follow=False)
            parent = os.path.dirname(self._place)
            # Nothing is written next to a shared folder: its parent may belong to somebody else.
            inside = self._shared or (is_there and self._force and not self._can_be_exchanged())
        for folder in (self._place, *(() if inside else (parent,))):
            sweep(folder)
        check_space(self._place if inside else parent, self._n_bytes)
        with storage_errors(self._place if inside else parent):
            self._make(inside=inside)
            if is_there and self._force and not inside:
                try:
                    # Set it now, so that the files created inside inherit it.
                    keeps_owner = copy_attributes(self._place, self._temporary)
                except BaseException:
                    remove(self._temporary)
                    raise
                if not keeps_owner:
                    remove(self._temporary)
                    self._make(inside=True)
        return Path(self._temporary)

    def _make(self, *, inside: bool) -> None:
        temporary = temporary_beside(os.path.join(self._place, _PARTS) if inside else self._place)
        os.mkdir(temporary)
        self._temporary = temporary

    def _can_be_exchanged(self) -> bool:
        """Whether an existing folder may be replaced by another. Raises OSError if it is not writable."""
        if not os.access(self._place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not os.access(os.path.dirname(self._place), os.W_OK | os.X_OK) or is_mounted(self._place):
            return False
        with suppress(OSError):
            # A process that works in it, such as the shell, would stay in the old one.
            return os.path.commonpath([self._place, os.getcwd()]) != self._place
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with storage_errors(self.target):
                    self._publish()
            elif isinstance(error, AprError):
                self._rename_in(error)
        finally:
            if not self._is_needed:
                remove(self._temporary)

    def _rename_in(self, error: AprError) -> None:
        if error.path and error.path.startswith(self._temporary):
            error.path = self.target + error.path.removeprefix(self._temporary)

    def _publish(self) -> None:
        new = sorted(files_below(self._temporary))
        for folder, _, _ in os.walk(self._temporary):
            sync_folder(folder)
        if not exists(self._place, follow=False):
            os.rename(self._temporary, self._place)
            sync_folder(os.path.dirname(self._place))
            return
        if not (self._force or self._shared):
            raise exists_error(self.target)
        stale = set(stale_names(self._place, self._stale)) - set(new)
        if self._force:
            for name in new:
                self._take_over(name)
        if os.path.dirname(self._temporary) != self._place:
            if self._exchange({*new, *stale}):
                return
            inside = temporary_beside(os.path.join(self._place, _PARTS))
            os.rename(self._temporary, inside)
            self._temporary = inside
            sync_folder(self._place)  # before the record is: it is valid for this place only
        switch = Switch.plan(self._temporary, new, stale, self._last, force=self._force)
        try:
            switch.run()
        except AprError as error:
            self._rename_in(error)
            raise
        finally:
            self._is_needed = switch.is_begun

    def _take_over(self, name: str) -> None:
        """Gives a new file the attributes of the file it replaces."""
        old = os.path.join(self._place, name)
        try:
            mode = os.lstat(old).st_mode
        except FileNotFoundError:
            return
        except NotADirectoryError:
            mode = stat.S_IFDIR
        if stat.S_ISDIR(mode):
            raise StorageError(
                f"{name} cannot be written: another file or folder has its name",
                path=self.target,
                hint="choose another folder with -o, or move it away",
            )
        if stat.S_ISREG(mode):
            copy_attributes(old, os.path.join(self._temporary, name))

    def _exchange(self, gone: Collection[str]) -> bool:
        """Exchanges the folders, the new one filled with kept files; returns whether that was possible."""
        try:
            link_kept_files(self._place, self._temporary, gone)
            exchange(self._temporary, self._place)
        except OSError:
            return False
        try:
            sync_folder(os.path.dirname(self._place))
        except BaseException:
            exchange(self._temporary, self._place)
            raise
        with suppress(OSError):  # files that somebody added meanwhile
            link_kept_files(self._temporary, self._place, {*gone, *files_below(self._place)})
        return True
