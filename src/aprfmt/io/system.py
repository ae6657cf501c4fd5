"""Operating system functions beyond the standard library, and process identities. Everything degrades gracefully."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from zlib import crc32

_SYNC_FILE_RANGE_WRITE = 2  # <fcntl.h> of Linux
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h> of glibc
_LARGEST_PIECE = 32 << 20  # glibc's maximum
_KEPT_BYTES = 256 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>
_NO_UNNAMED = (errno.EISDIR, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT)


def n_processors() -> int:
    """Number of processors that this process may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_writeback(fd: int, offset: int, n_bytes: int) -> None:
    """Starts writing this part of a file to the disk, without waiting (Linux).

    The disk then works in parallel, so the fsync at the end has little left to do.
    """
    call = _function("sync_file_range")
    if call is not None:
        call(fd, offset, n_bytes, _SYNC_FILE_RANGE_WRITE)


def is_locked(folder: str | os.PathLike[str]) -> bool | None:
    """Whether a process holds a lock (flock) on `folder`; None if the disk knows no locks. Takes it for a moment."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


# --- names of files ---


def open_unnamed(folder: str, mode: int) -> int | None:
    """A new unnamed file, open for reading and writing, which disappears when closed; None if unsupported.

    `link_unnamed` gives it a name. Raises OSError.
    """
    flag = getattr(os, "O_TMPFILE", 0)
    if not flag or not os.path.exists("/proc/self/fd"):
        return None
    try:
        return os.open(folder, flag | os.O_RDWR, mode)
    except OSError as error:
        if error.errno in _NO_UNNAMED:
            return None
        raise


def link_unnamed(fd: int, path: str) -> None:
    """Gives a file of `open_unnamed` a name. Raises FileExistsError, OSError."""
    # With a src_dir_fd, which an absolute path does not need, the link in /proc is followed.
    os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)


def path_of_unnamed(fd: int) -> str:
    """A path by which this process, and others of its user, can open a file of `open_unnamed`."""
    return f"/proc/{os.readlink('/proc/self')}/fd/{fd}"


def exchange(a: str, b: str) -> None:
    """Exchanges the names of two folders atomically. Raises OSError, also if unsupported."""
    call = _function("renameat2")
    code = errno.ENOSYS
    if call is not None:
        import ctypes

        if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), a, None, b)


def is_mounted(folder: str) -> bool:
    """Whether `folder`, a path without links, is or contains a mount point."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            points = [_unescaped(line.split()[4]) for line in file]
    except (OSError, IndexError):
        return os.path.ismount(folder)
    inside = os.path.join(folder, "")
    return any(os.path.join(point, "").startswith(inside) for point in points)


def _unescaped(field: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field))


# --- processes ---


def process_name() -> str:
    """A globally unique name of this process: host, boot and container, pid, start time.

    `is_running` tells whether it still runs.
    """
    return f"{_host()}{_boot()}-{os.getpid()}-{_start_of(os.getpid()) or 0}"


PROCESS_NAME = r"[0-9a-f]{16}-[0-9]{1,10}-[0-9]{1,20}"
"""Regular expression for the result of `process_name`."""


def is_running(name: str) -> bool | None:
    """Whether the process of that name runs; None if it belongs to another machine, container or boot."""
    place, pid, start = name.split("-")
    if place != _host() + _boot():
        return None
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's, whose start time may be hidden
        pass
    return _start_of(int(pid)) in (int(start), None)


def is_earlier_boot(name: str, last_change: float) -> bool:
    """Whether the process of that name ran on this machine before its last boot, judging by its last change, in s."""
    return name.startswith(_host()) and last_change < time.time() - _uptime()


def _uptime() -> float:
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.time() if clock is None else time.clock_gettime(clock)


@cache
def _host() -> str:
    return f"{crc32(os.uname().nodename.encode()):08x}"


@cache
def _boot() -> str:
    """Identity of this boot and container: process ids are unique within one container."""
    text = b""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", "rb") as file:
        text = file.read()
    with suppress(OSError):
        text += os.readlink("/proc/self/ns/pid").encode()
    return f"{crc32(text):08x}"


def _start_of(pid: int) -> int | None:
    """Start time of a process, in ticks since boot; 0 if it has ended, None if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return 0 if fields[0] in b"ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


# --- memory ---


@cache
def keep_freed_memory() -> None:
    """Makes the allocator keep freed memory for reuse (glibc), from now on.

    Buffers of a MiB are allocated thousands of times; returning each to the kernel and faulting its pages in again
    takes as long as copying it.
    """
    call = _function("mallopt")
    if call is not None:
        call(_M_MMAP_THRESHOLD, _LARGEST_PIECE)
        call(_M_TRIM_THRESHOLD, _KEPT_BYTES)


@cache
def _function(name: str) -> Callable[..., object] | None:
    """A function of the C library; None if missing."""
    import ctypes

    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError, TypeError):
        return None
    if name == "sync_file_range":
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    if name == "renameat2":
        function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return function  # type: ignore[no-any-return]
