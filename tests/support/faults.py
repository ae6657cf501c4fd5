"""Calls to the operating system that fail: each one an operation makes, in turn.

`Faults` counts the calls that concern files below one folder, in any thread, and raises an OSError in the one whose
number it was told. Files of the interpreter, of libraries and of other folders do not count.
"""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Function of `os` -> what it fails with.
_CALLS = {
    "open": errno.EACCES,
    "stat": errno.EACCES,
    "lstat": errno.EACCES,
    "scandir": errno.EACCES,
    "listdir": errno.EACCES,
    "statvfs": errno.EIO,
    "mkdir": errno.ENOSPC,
    "chmod": errno.EPERM,
    "fchmod": errno.EPERM,
    "fstat": errno.EIO,
    "pread": errno.EIO,
    "preadv": errno.EIO,
    "write": errno.ENOSPC,
    "writev": errno.ENOSPC,
    "fsync": errno.EIO,
    "close": errno.EIO,
    "link": errno.EMLINK,
    "rename": errno.EACCES,
    "replace": errno.EACCES,
    "unlink": errno.EIO,
    "rmdir": errno.EIO,
}
REMOVALS = ("unlink", "rmdir")
"""Calls that clean up; where one of them fails, what it would have removed may stay."""


class Faults:
    """Fails the `number`-th call that concerns a file below `folder`; 0 fails none. `calls` names all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = os.path.realpath(folder)
        self.number = 0
        self.calls: list[str] = []
        self._lock = threading.Lock()

    @property
    def failed(self) -> str:
        """The name of the call that failed, "" where none did."""
        return self.calls[self.number - 1] if 0 < self.number <= len(self.calls) else ""

    @contextmanager
    def armed(self, number: int) -> Iterator[None]:
        """Counts, and fails the call of that number, while the block runs."""
        self.number, self.calls = number, []
        with pytest.MonkeyPatch.context() as patch:
            for name, code in _CALLS.items():
                patch.setattr(os, name, self._wrapped(name, getattr(os, name), code))
            patch.setattr(mmap, "mmap", self._wrapped("mmap", mmap.mmap, errno.ENOMEM))
            opens = self._wrapped("open", builtins.open, errno.EACCES)
            patch.setattr(builtins, "open", opens)
            patch.setattr(io, "open", opens)
            yield

    def _wrapped(self, name: str, call: Callable[..., Any], code: int) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            fails = self._concerns(args, kwargs) and self._count(name)
            if fails and name != "close":
                raise OSError(code, os.strerror(code), *([args[0]] if not isinstance(args[0], int) else []))
            result = call(*args, **kwargs)
            if fails:  # the kernel has closed it all the same
                raise OSError(code, os.strerror(code))
            return result

        return wrapped

    def _count(self, name: str) -> bool:
        with self._lock:
            self.calls.append(name)
            return len(self.calls) == self.number

    def _concerns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        place = args[0] if args else kwargs.get("path", "")
        if isinstance(place, int):
            try:
                path = os.readlink(f"/proc/self/fd/{place}")
            except OSError:
                return False
        else:
            path = os.fsdecode(place)
            folder = kwargs.get("dir_fd")
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}") if folder is not None else "", path)
        return os.path.abspath(path).startswith(self.folder)
