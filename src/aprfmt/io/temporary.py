"""Files and folders that are not yet or never published: their names, and the end of those of killed processes."""

from __future__ import annotations

import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aprfmt.errors import storage_errors
from aprfmt.io.publish import remove
from aprfmt.io.switch import recover
from aprfmt.io.system import PROCESS_NAME, is_earlier_boot, is_running, process_name
from aprfmt.types import PathLike

_LABEL_BYTES = 64
_NAME = re.compile(rf"\.(?P<label>.*)\.(?P<process>{PROCESS_NAME})-[0-9a-f]{{8}}\.tmp", re.DOTALL)
_ABANDONED_S = 24 * 3600
"""A process that cannot be asked for (another machine's, another container's) is taken to be gone after so long."""


def temporary_beside(target: str) -> str:
    """A path beside `target` that tells which process works there."""
    folder, name = os.path.split(target)
    label = os.fsencode(name)[:_LABEL_BYTES].decode(errors="ignore")
    return os.path.join(folder, f".{label}.{process_name()}-{os.urandom(4).hex()}.tmp")


@contextmanager
def scratch_folder(label: str) -> Iterator[str]:
    """A folder for the block among the system's temporary files, where those of killed processes are removed first.

    Raises StorageError.
    """
    place = tempfile.gettempdir()
    sweep(place)
    folder = temporary_beside(os.path.join(place, f"apr-{label}"))
    with storage_errors(folder):
        os.mkdir(folder, 0o700)
    try:
        yield folder
    finally:
        remove(folder)


def sweep(folder: PathLike, ours: re.Pattern[str] | None = None) -> None:
    """Ends what processes that no longer run began in the folder: completes their switches, removes the rest.

    `ours`: outputs (the first 64 bytes of their names) that nobody but the caller writes here, so that whatever
    belongs to them is left over. What cannot be read or removed stays.
    """
    with suppress(OSError):
        for name in os.listdir(folder):
            found = name.endswith(".tmp") and _NAME.fullmatch(name)
            if not found:
                continue
            path = os.path.join(folder, name)
            with suppress(OSError):
                is_ours = ours is not None and ours.fullmatch(found["label"])
                if (is_ours or _is_abandoned(path, found["process"])) and _is_trusted(path) and recover(path):
                    remove(path)


def _is_trusted(path: str) -> bool:
    """Whether nobody laid this as a trap: in a folder that all may write to, such as /tmp, only one's own counts."""
    is_shared = os.stat(os.path.dirname(path)).st_mode & stat.S_IWOTH
    return not is_shared or os.lstat(path).st_uid == os.geteuid()


def _is_abandoned(path: str, process: str) -> bool:
    runs = is_running(process)
    if runs is not None:
        return not runs
    last = max(os.lstat(each).st_ctime for each in (path, *_paths_below(path)))
    return is_earlier_boot(process, last) or last < time.time() - _ABANDONED_S


def _paths_below(folder: str) -> Iterator[str]:
    for place, folders, names in os.walk(folder):
        yield from (os.path.join(place, name) for name in (*folders, *names))
