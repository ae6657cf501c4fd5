"""Files and folders that are not yet or never published: their names, and the end of those of killed processes."""

from __future__ import annotations

import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aprfmt.errors import StorageError, storage_errors
from aprfmt.io.publish import remove
from aprfmt.io.signature import folder_identity, is_signed, sign
from aprfmt.io.switch import check_copy, recover
from aprfmt.io.system import PROCESS_NAME, is_earlier_boot, is_mounted, is_running, process_name
from aprfmt.types import PathLike

_LABEL_BYTES = 64
_NAME = re.compile(
    rf"(?P<signed>\.(?P<label>.*)\.(?P<process>{PROCESS_NAME})-[0-9a-f]{{8}})(?P<tag>[0-9a-f]{{16}})\.tmp", re.DOTALL
)
_ABANDONED_S = 24 * 3600
"""A process that cannot be asked for (another machine's, another container's) is taken to be gone after so long."""


def temporary_beside(target: str) -> str:
    """A path beside `target` that tells which process works there, signed for this folder.

    Without a secret to sign with, nobody removes what a killed process leaves. Raises OSError.
    """
    folder, name = os.path.split(target)
    label = os.fsencode(name)[:_LABEL_BYTES].decode(errors="ignore")
    signed = f".{label}.{process_name()}-{os.urandom(4).hex()}"
    tag = sign("name", _in_folder(signed, folder)) or os.urandom(8).hex()
    return os.path.join(folder, f"{signed}{tag}.tmp")


def _in_folder(name: str, folder: str) -> bytes:
    return b"%d %s" % (folder_identity(folder), os.fsencode(name))


def temporary_place() -> str:
    """The folder of the system's temporary files. Raises StorageError where none can be written to."""
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise StorageError(
            "no writable folder for temporary files found", hint="set TMPDIR to a folder with enough space"
        ) from error


@contextmanager
def scratch_folder(label: str) -> Iterator[str]:
    """A folder for the block among the system's temporary files, where those of killed processes are removed first.

    Raises StorageError.
    """
    place = temporary_place()
    sweep(place)
    with storage_errors(place):
        folder = temporary_beside(os.path.join(place, f"apr-{label}"))
        os.mkdir(folder, 0o700)
    try:
        yield folder
    finally:
        remove(folder)


def sweep(folder: PathLike, ours: re.Pattern[str] | None = None) -> None:
    """Ends what processes that no longer run began in the folder: completes their switches, removes the rest.

    Only what carries a signature of this user for this folder is touched. `ours`: outputs (the first 64 bytes of their
    names) that nobody but the caller writes here, so that whatever belongs to them is left over. What cannot be read
    or removed stays. Raises RefusedError for a switch of this user that must not be completed.
    """
    with suppress(OSError):
        for name in os.listdir(folder):
            found = name.endswith(".tmp") and _NAME.fullmatch(name)
            if not found:
                continue
            path = os.path.join(folder, name)
            with suppress(OSError):
                is_ours = ours is not None and ours.fullmatch(found["label"])
                if (is_ours or _is_abandoned(path, found["process"])) and _is_trusted(path):
                    if not is_signed("name", _in_folder(found["signed"], os.fspath(folder)), found["tag"]):
                        check_copy(path)
                    elif not is_mounted(os.path.realpath(path)) and recover(path):
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
