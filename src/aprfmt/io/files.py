"""What is at a path. Where `os.path` takes a path that cannot be looked at for an absent one, these raise."""

from __future__ import annotations

import os
import stat

from aprfmt.errors import storage_errors
from aprfmt.types import PathLike


def exists(path: PathLike, *, follow: bool = True) -> bool:
    """Whether there is anything of that name; without `follow` a link counts whatever it points to."""
    return _mode(path, follow) is not None


def is_file(path: PathLike) -> bool:
    """Whether the path is a plain file, or a link to one. Raises StorageError."""
    return stat.S_ISREG(_mode(path) or 0)


def is_folder(path: PathLike) -> bool:
    """Whether the path is a folder, or a link to one. Raises StorageError."""
    return stat.S_ISDIR(_mode(path) or 0)


def is_same(a: PathLike, b: PathLike) -> bool:
    """Whether both paths, which exist, are one file. Raises NotFoundError, StorageError."""
    with storage_errors(a):
        return os.path.samefile(a, b)


def _mode(path: PathLike, follow: bool = True) -> int | None:
    try:
        with storage_errors(path):
            return os.stat(path, follow_symlinks=follow).st_mode
    except (FileNotFoundError, ValueError):  # ValueError: a zero byte in the name
        return None
