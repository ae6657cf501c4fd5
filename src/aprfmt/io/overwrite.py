"""Overwrites a few bytes of a file in place: for header edits in front of gigabytes that stay."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings

from aprfmt.errors import storage_errors
from aprfmt.io.source import Buffer
from aprfmt.types import PathLike


def overwrite(path: PathLike, offset: int, data: Buffer) -> None:
    """Writes `data` at byte `offset` of the file `path` and waits until it is on the disk.

    If this process is killed, the old or the new bytes remain: a separate process in its own session, which ignores
    signals, does the write. The same holds for a power cut if the range lies in one disk sector. Raises StorageError.
    """
    with storage_errors(path):
        fd = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        try:
            number = _written_apart(fd, offset, memoryview(data)) if hasattr(os, "fork") else _write(fd, offset, data)
        finally:
            os.close(fd)
        if number:
            raise OSError(number, os.strerror(number))


def _written_apart(fd: int, offset: int, data: memoryview) -> int:
    sys.stdout.flush()
    with warnings.catch_warnings():
        # The child of a threaded process may not touch locks of other threads; this one makes system calls only.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        number = errno.EIO
        try:
            os.setsid()
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            number = _write(fd, offset, data)
        finally:
            os._exit(number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _write(fd: int, offset: int, data: Buffer) -> int:
    """The errno, 0 for success."""
    view = memoryview(data)
    try:
        while view:
            n = os.pwrite(fd, view, offset)
            offset, view = offset + n, view[n:]
        os.fsync(fd)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
