"""Names of unpublished files and folders, and the cleanup after killed processes."""

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
"""A process that cannot be checked (another machine's, another container's) is assumed dead after this long."""


def temporary_beside(target: str) -> str:
    """A path next to `target` that names the process, signed for this folder.

    Without a secret to sign with, leftovers of a killed process are never removed. Raises OSError.
    """
    folder, name = os.path.split(target)
    label = os.fsencode(name)[:_LABEL_BYTES].decode(errors="ignore")
    signed = f".{label}.{process_name()}-{os.urandom(4).hex()}"
    tag = sign("name", _in_folder(signed, folder)) or os.urandom(8).hex()
    return os.path.join(folder, f"{signed}{tag}.tmp")


def _in_folder(name: str, folder: str) -> bytes:
    return b"%d %s" % (folder_identity(folder), os.fsencode(name))


def temporary_place() -> str:
    """The system's temporary folder. Raises StorageError if none is writable."""
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise StorageError(
            "no writable folder for temporary files found", hint="set TMPDIR to a folder with enough space"
        ) from error


@contextmanager
def scratch_folder(label: str) -> Iterator[str]:
    """A temporary folder for the block; first removes those of killed processes.

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
    """Cleans up after processes that no longer run in the folder: completes their switches, removes the rest.

    Only names signed by this user for this folder are touched. `ours`: outputs (the first 64 bytes of their names) that
    only the caller writes here, so anything of theirs is a leftover. What cannot be read or removed stays. Raises
    RefusedError for a switch of this user that must not be completed.
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
    """Whether it cannot be a trap: in a world-writable folder such as /tmp only the user's own files count."""
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
