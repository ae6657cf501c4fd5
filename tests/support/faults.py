"""Calls to the operating system that fail, or in which the process dies: each one that an operation makes, in turn.

`Faults` counts the calls that concern files below one folder, in any thread, and raises an OSError in the one whose
number it was told. Files of the interpreter, of libraries and of other folders do not count. `intercepted` is what it
is made of, and others that watch the calls.
"""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from turns import PARTS, in_turn, turn

from aprfmt.io import sink

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
    "pwrite": errno.ENOSPC,
    "ftruncate": errno.EIO,
    "write": errno.ENOSPC,
    "writev": errno.ENOSPC,
    "fsync": errno.EIO,
    "close": errno.EIO,
    "link": errno.EMLINK,
    "rename": errno.EACCES,
    "replace": errno.EACCES,
    "unlink": errno.EIO,
    "rmdir": errno.EIO,
    "chown": errno.EPERM,
    "utime": errno.EPERM,
    "readlink": errno.EACCES,
    "listxattr": errno.EIO,
    "getxattr": errno.EIO,
    "setxattr": errno.EPERM,
}
_OTHER_CALLS = {"mmap": errno.ENOMEM, "exchange": errno.EXDEV}
_TWO_PATHS = ("link", "rename", "replace", "exchange")
_DISK = ("pread", "preadv", "pwrite", "write", "writev", "fsync")
_FRAMES = 4
_readlink = os.readlink

Handler = Callable[[str, tuple[Any, ...], Callable[[], Any]], Any]
"""Called in place of a call with its name, its arguments (no path relative to a descriptor), and what makes it."""


@contextmanager
def intercepted(folder: Path, handle: Handler) -> Iterator[None]:
    """While the block runs, `handle` gets every call that concerns something below `folder`, from any thread."""
    below = os.path.realpath(folder)

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if _concerns(below, name, args, kwargs):
                return handle(name, _whole(args, kwargs), lambda: call(*args, **kwargs))
            return call(*args, **kwargs)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for name in _CALLS:
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        patch.setattr(mmap, "mmap", wrapped("mmap", mmap.mmap))
        patch.setattr(sink, "exchange", wrapped("exchange", vars(sink)["exchange"]))
        opens = wrapped("open", builtins.open)
        patch.setattr(builtins, "open", opens)
        patch.setattr(io, "open", opens)
        yield


class Faults:
    """The calls that concern files below `folder`: their names, where they come from, and which of them fails.

    Attributes:
        calls: name of each call of the last run.
        sites: where each came from in a run without a failure: its name and the innermost lines of the package.
        failed: name of the call that failed, "" where none did.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = os.path.realpath(folder)
        self.calls: list[str] = []
        self.sites: list[tuple[object, ...]] = []
        self.failed = ""
        self._number = 0
        self._stays = False
        self._lock = threading.Lock()

    def points(self, *, every: bool, disk: bool) -> list[int]:
        """Numbers of calls of the last run: by turns the first and the last of each site, or `every` one.

        `disk` leaves out all but those that read or write data.
        """
        numbers = [i for i, name in enumerate(self.calls, 1) if name in _DISK or not disk]
        if every:
            return numbers
        first = {self.sites[i - 1]: i for i in reversed(numbers)}
        last = {self.sites[i - 1]: i for i in numbers}
        ends = sorted({*first.values(), *last.values()})
        return in_turn(ends, lambda number: number == ends[0], turn(), of=PARTS)

    @contextmanager
    def armed(self, number: int, *, stays: bool = False) -> Iterator[None]:
        """Fails the call of that number (0: none) while the block runs; `stays`: all later reads and writes too."""
        self.calls, self.sites, self.failed = [], [], ""
        self._number, self._stays = number, stays
        with intercepted(Path(self.folder), self._handle):
            yield

    def _handle(self, name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        fails = self._count(name)
        code = _CALLS.get(name) or _OTHER_CALLS[name]
        if fails and name != "close":
            raise OSError(code, os.strerror(code), *(() if isinstance(args[0], int) else args[:1]))
        result = call()
        if fails:  # the kernel has closed it all the same
            raise OSError(code, os.strerror(code))
        return result

    def _count(self, name: str) -> bool:
        with self._lock:
            self.calls.append(name)
            if not self._number:
                self.sites.append((name, *_lines()))
            fails = len(self.calls) == self._number
            self.failed = name if fails else self.failed
            return fails or (self._stays and bool(self.failed) and name in _DISK)


def _concerns(below: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    places = args[:2] if name in _TWO_PATHS else args[:1]
    folder = kwargs.get("dir_fd")
    for place in places or (kwargs.get("path", ""),):
        if isinstance(place, int):
            path = _path_of(place)
        else:
            path = os.path.join("" if folder is None else _path_of(folder), os.fsdecode(place))
        if os.path.abspath(path).startswith(below):
            return True
    return False


def _whole(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments with a path that is relative to `dir_fd` in full."""
    folder = kwargs.get("dir_fd")
    if folder is None or not args or isinstance(args[0], int):
        return args
    return (os.path.join(_path_of(folder), os.fspath(args[0])), *args[1:])


def _path_of(fd: int) -> str:
    try:
        return _readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "/"


def _lines() -> Iterator[tuple[str, int]]:
    frame, found = sys._getframe(3), 0
    while frame is not None and found < _FRAMES:
        if f"{os.sep}src{os.sep}apr" in frame.f_code.co_filename:
            found += 1
            yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
