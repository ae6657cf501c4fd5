"""The steps of a publication: link or rename, sync the folder, remove; and the attributes that an output inherits."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress

from aprfmt.errors import ExistsError
from aprfmt.io.source import exists
from aprfmt.types import PathLike

_MOST_LEVELS = 100
"""Depth limit of subfolders that are moved over: os.walk and shutil.rmtree recurse."""


def files_below(folder: str) -> Iterator[str]:
    """Every file below the folder, relative to it. Raises OSError where a glob would skip a folder."""
    for place, folders, names in os.walk(folder, onerror=_refuse):
        for name in _files_of(place, folders, names):
            yield os.path.relpath(os.path.join(place, name), folder)


def _files_of(place: str, folders: list[str], names: list[str]) -> Iterator[str]:
    """The files in a step of os.walk; links to folders count as files."""
    yield from names
    yield from (name for name in folders if os.path.islink(os.path.join(place, name)))


def _refuse(error: OSError) -> None:
    raise error


def remove(temporary: str) -> None:
    """Removes a temporary file or folder that may be gone already.

    Tries twice, since a removal on a network disk can fail once. What cannot be removed stays: the outcome of the write
    matters more than a stray file.
    """
    for try_ in range(2):
        try:
            if stat.S_ISDIR(os.lstat(temporary).st_mode):
                if try_:  # folders of an output may be read-only
                    _make_writable(temporary)
                shutil.rmtree(temporary)
            else:
                os.unlink(temporary)
        except FileNotFoundError:
            return
        except OSError:
            continue
        return


def _make_writable(folder: str) -> None:
    for place, _, _ in os.walk(folder):
        with suppress(OSError):
            os.chmod(place, stat.S_IRWXU)


def sync_folder(folder: str) -> None:
    """Makes new names in the folder survive a power cut."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder with write but no read permission
        return
    try:
        os.fsync(fd)
    finally:
        with suppress(OSError):
            os.close(fd)


def appear(temporary: str, target: str, force: bool, *, keep: bool = False) -> None:
    """Gives a complete file its name; without `force` it never replaces another. Raises ExistsError, OSError.

    `keep` keeps the temporary name if the file can have both: it is removed once the new name is durable.
    """
    if force:
        os.replace(temporary, target)
        return
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise exists_error(target) from None
    except OSError:  # a file system without hard links
        if exists(target, follow=False):
            raise exists_error(target) from None
        os.rename(temporary, target)
    else:
        if not keep:
            remove(temporary)


def exists_error(path: PathLike) -> ExistsError:
    """The refusal to replace what is there."""
    return ExistsError("the output exists", path=path, hint="add --force to replace it")


# --- what an output takes over from what it replaces ---


def copy_attributes(old: str, new: str | int) -> bool:
    """Copies mode, owner, group, ACL and other extended attributes of `old` to `new` (a path or a descriptor).

    Returns whether owner and group were copied, which the system may refuse; the mode then grants no one new access.
    Raises OSError.
    """
    then, now = os.stat(old), os.stat(new)
    mode = stat.S_IMODE(then.st_mode)
    keeps_group = then.st_gid == now.st_gid or _give(new, -1, then.st_gid)
    keeps_owner = then.st_uid == now.st_uid or _give(new, then.st_uid, -1)
    if not keeps_group:
        mode = mode & ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3
    if not (keeps_owner and keeps_group):
        mode &= ~(stat.S_ISUID | stat.S_ISGID)
    if sys.platform == "linux":
        with suppress(OSError):
            for name in os.listxattr(old):
                with suppress(OSError):
                    os.setxattr(new, name, os.getxattr(old, name))
    if stat.S_IMODE(os.stat(new).st_mode) != mode:
        os.chmod(new, mode)
    return keeps_owner and keeps_group


def _give(path: str | int, owner: int, group: int) -> bool:
    try:
        os.chown(path, owner, group)
    except PermissionError:
        return False
    return True


def link_kept_files(old: str, new: str, gone: Collection[str]) -> None:
    """Hard-links everything in the folder `old` into `new`, except the files named in `gone`.

    Subfolders are created with their modes, owners and times; `new` itself gets those of `old`. Raises OSError, also if
    that would change an owner, and FileExistsError for names that `new` already has.
    """
    for place, folders, names in os.walk(old, onerror=_refuse):
        inner = os.path.relpath(place, old)
        if inner.count(os.sep) > _MOST_LEVELS:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        here = os.path.normpath(os.path.join(new, inner))
        os.makedirs(here, exist_ok=True)
        for name in _files_of(place, folders, names):
            if os.path.normpath(os.path.join(inner, name)) not in gone:
                os.link(os.path.join(place, name), os.path.join(here, name), follow_symlinks=False)
    for place, _, _ in os.walk(old, topdown=False, onerror=_refuse):
        here = os.path.normpath(os.path.join(new, os.path.relpath(place, old)))
        if not copy_attributes(place, here):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        info = os.stat(place)
        os.utime(here, ns=(info.st_atime_ns, info.st_mtime_ns))
        sync_folder(here)
