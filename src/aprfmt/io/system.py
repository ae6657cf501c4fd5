"""What the operating system offers beyond the standard library: hints, without which all works, slower."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

_SYNC_FILE_RANGE_WRITE = 2  # <fcntl.h> of Linux
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h> of glibc
_LARGEST_PIECE = 32 << 20  # glibc takes no more
_KEPT_BYTES = 256 << 20


def n_processors() -> int:
    """Processors that this process may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_writeback(fd: int, offset: int, n_bytes: int) -> None:
    """Lets the kernel begin to write this part of a file to the disk, and does not wait for it (Linux).

    The disk then works while more is made, so that the fsync at the end finds little left to do.
    """
    call = _function("sync_file_range")
    if call is not None:
        call(fd, offset, n_bytes, _SYNC_FILE_RANGE_WRITE)


@cache
def keep_freed_memory() -> None:
    """Lets the allocator of this process keep freed pieces for the next ones (glibc), from now on.

    Pieces of a MiB come and go thousands of times; to give each back to the kernel and to fault its pages in anew
    takes as long as to copy it.
    """
    call = _function("mallopt")
    if call is not None:
        call(_M_MMAP_THRESHOLD, _LARGEST_PIECE)
        call(_M_TRIM_THRESHOLD, _KEPT_BYTES)


@cache
def _function(name: str) -> Callable[..., object] | None:
    """A function of the C library; None where it has none of that name."""
    import ctypes

    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    if name == "sync_file_range":
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function  # type: ignore[no-any-return]
