"""What a writer must do in which order, and processes that are killed while they write.

`check_order` watches one operation: whatever becomes visible was written, then synced, then linked or renamed, then
the folder that holds its name was synced. `killed` runs an operation in a forked process that dies by SIGKILL before or
after one of its calls to the operating system, or at any moment.
"""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import stat
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from writers import WRITERS, Place, contents, restore

from aprfmt.io.sink import AtomicFile
from faults import intercepted

WAYS = ("here", "elsewhere")
"""As this file system does it; as one does that has neither files without a name nor an exchange."""

_FIRST = r"-00001-of-\d{5}\.gguf$|(^|/)config\.json$|manifest"
"""Files without which nobody loads the others."""

_SHOWING = ("link", "rename", "replace", "exchange")


@contextmanager
def on_file_system(way: str) -> Iterator[None]:
    """While the block runs, the file system has what `way`, one of WAYS, says."""

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    with pytest.MonkeyPatch.context() as patch:
        if way == "elsewhere":
            patch.setattr("aprfmt.io.sink.open_unnamed", lambda folder, mode: None)
            patch.setattr("aprfmt.io.sink.exchange", refuse)
        yield


# --- the order ---


class Order:
    """The order of an operation's calls on files below `folder`, checked as they come.

    Attributes:
        faults: what came too early, or never.
        shown: how many names appeared.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: list[str] = []
        self.shown = 0
        # Since each was last synced: inodes that were written to, inodes of folders with a name that came or went.
        self._unsynced: set[int] = set()
        self._unsynced_names: dict[int, str] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Checks the calls of the block."""
        with intercepted(self.folder, self._handle):
            yield
        left = [path for path in self._unsynced_names.values() if not is_temporary(path)]
        self.faults += [f"{path} came or went, and its folder was not synced" for path in left]

    def _handle(self, name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        result = call()
        if name in ("write", "writev"):
            self._unsynced.add(os.fstat(args[0]).st_ino)
        elif name == "open":
            if not isinstance(result, int) and result.writable():
                self._unsynced.add(os.fstat(result.fileno()).st_ino)
            if isinstance(result, int) and args[1] & os.O_CREAT:
                self._names_change(str(args[0]))
        elif name == "mkdir":
            self._names_change(str(args[0]))
        elif name == "fsync":
            inode = os.fstat(args[0]).st_ino
            self._unsynced.discard(inode)
            self._unsynced_names.pop(inode, None)
        elif name in _SHOWING:
            old, new = map(str, args[:2])
            before = self._unsynced_names.get(os.stat(os.path.dirname(old)).st_ino)
            if not is_temporary(new):
                self._comes(new)
            if name != "link":
                self._names_change(old)
            for path in (old, new) if name == "exchange" else (new,):
                self._names_change(path)
                if not is_temporary(path):
                    self._appears(path)
                elif name == "rename" and not is_temporary(old):
                    self._goes(path, before)
        return result

    def _names_change(self, path: str) -> None:
        if ".replaced" not in Path(path).parts:  # nobody needs what was put aside
            self._unsynced_names[os.stat(os.path.dirname(path)).st_ino] = path

    def _comes(self, path: str) -> None:
        """By now what was put aside before must be gone for good, and what came before the last file be there."""
        before = self._unsynced_names.get(os.stat(os.path.dirname(path)).st_ino)
        if before and not is_temporary(before) and (not os.path.lexists(before) or re.search(_FIRST, path)):
            self.faults.append(f"{path} came before {before} was synced")

    def _appears(self, path: str) -> None:
        self.shown += 1
        for place in (Path(path), *Path(path).rglob("*")):
            inode = place.lstat().st_ino
            if inode in self._unsynced:
                self.faults.append(f"{place} appeared before it was synced")
            if place.is_dir() and inode in self._unsynced_names:
                self.faults.append(f"{self._unsynced_names[inode]} appeared before its folder was synced")

    def _goes(self, path: str, before: str | None) -> None:
        """Something is put aside: what comes in its place, and the record of both, must last by now."""
        temporary = next(place for place in Path(path).parents if is_temporary(place.name))
        for place in (temporary, *temporary.rglob("*")):
            inode = place.lstat().st_ino
            if inode in self._unsynced or inode in self._unsynced_names:
                self.faults.append(f"{path} was put aside before {place} was synced")
        if before == str(temporary):
            self.faults.append(f"{path} was put aside before the name {temporary} was synced")


def is_temporary(path: str) -> bool:
    return any(part.startswith(".") and part.endswith(".tmp") for part in Path(path).parts)


@contextmanager
def left_out(kind: str) -> Iterator[None]:
    """While the block runs, no "file" or no "folder" is synced; in a block of `Order.watched`."""
    sync = os.fsync

    def fsync(fd: int) -> None:
        if kind != ("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"):
            sync(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


# --- kills ---


def killed(
    operation: Callable[[], object], folder: Path, way: str, *, call: int = 0, after: bool = False, seconds: float = 0
) -> int:
    """Runs `operation` in a forked process that is killed; gives how many calls it made, 0 where it was killed.

    It dies in the call of that number that concerns something below `folder`, before or `after` it is made; or with
    `seconds` then; or not at all.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            count = _count_or_die(operation, folder, way, call, after)
            os.write(writer, str(count).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        os._exit(1)
    os.close(writer)
    if seconds:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(reader) as answer:
        text = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return int(text or 0) if status == 0 else 0


def _count_or_die(operation: Callable[[], object], folder: Path, way: str, number: int, after: bool) -> int:
    count = 0

    def handle(name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        nonlocal count
        count += 1
        mine = count
        if mine == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call()
        if mine == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    with on_file_system(way), intercepted(folder, handle):
        operation()
    return count


def run_next(folder: Path) -> None:
    """What any later run does: writes a file into each folder that is there; it goes again."""
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir() and not is_temporary(str(path)))):
        with AtomicFile(place / "next") as sink:
            sink.write(b"next")
        (place / "next").unlink()


@dataclass
class Kills:
    """Kills writers of WRITERS, over the folders that `writers.prepare` made in `root`, and looks what is left.

    Attributes:
        counts: of "killed", "finished" before it, "old" and "new" outputs found, "between" both, outputs of which the
            next run found "temporary files".
        faults: every outcome that must not be.
    """

    root: Path
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    _known: dict[tuple[str, str], tuple[int, dict[str, bytes], float]] = field(default_factory=dict)

    def kill_at(self, name: str, way: str, draw: random.Random) -> None:
        """Kills it in some call, before or after that is made."""
        n_calls = self._plain(name, way)[0]
        # The last third is where outputs get their names.
        number = draw.randint(2 * n_calls // 3 if draw.random() < 0.7 else 1, n_calls)
        self._kill(name, way, call=number, after=draw.random() < 0.5)

    def kill_after(self, name: str, way: str, draw: random.Random) -> None:
        """Kills it at some moment."""
        self._kill(name, way, seconds=draw.uniform(0, self._plain(name, way)[2]))

    def _operation(self, name: str) -> Callable[[], object]:
        at = Place(self.root / "in", self.root / "out")
        restore(contents(self.root / "old"), self.root / "old", at.out)
        return lambda: WRITERS[name](at)

    def _plain(self, name: str, way: str) -> tuple[int, dict[str, bytes], float]:
        """Calls, outcome and duration of the writer that nobody kills."""
        if (name, way) not in self._known:
            killed(self._operation(name), self.root, way)  # whatever is read for the first time
            operation, began = self._operation(name), time.monotonic()
            n_calls = killed(operation, self.root, way)
            self._known[name, way] = n_calls, contents(self.root / "out"), time.monotonic() - began
        return self._known[name, way]

    def _kill(self, name: str, way: str, **how: Any) -> None:
        before, complete = contents(self.root / "old"), self._plain(name, way)[1]
        finished = killed(self._operation(name), self.root, way, **how)
        what = f"{name} ({way}), {how}"
        out = self.root / "out"
        found = {path: data for path, data in contents(out).items() if not is_temporary(path)}
        state = "old" if found == before else "new" if found == complete else "between"
        self.counts.update(["finished" if finished else "killed", state])
        self.counts["temporary files"] += bool(left := list(out.rglob("*.tmp")))
        if state == "between":
            self.faults += [f"{what}: {fault}" for fault in mixture(found, before, complete)]
            if not left:
                self.faults.append(f"{what}: neither old nor new, and nothing to complete it")
        run_next(out)
        if contents(out) not in (before, complete):
            self.faults.append(f"{what}: neither old nor new after the next run")
        if left := list(out.rglob("*.tmp")):
            self.faults.append(f"{what}: {left} after the next run")


def mixture(found: dict[str, bytes], old: dict[str, bytes], new: dict[str, bytes]) -> Iterator[str]:
    """What is wrong with a state between `old` and `new`: files of both, or one without which none can be loaded."""
    changed = [name for name in {*old, *new} if old.get(name) != new.get(name)]
    is_old = [name for name in changed if name in found and found[name] == old.get(name)]
    is_new = [name for name in changed if name in found and found[name] == new.get(name)]
    if is_old and is_new:
        yield f"old {is_old} beside new {is_new}"
    for there, whole in ((is_old, old), (is_new, new)):
        for name in there:
            others = [other for other in changed if other in whole and _set_of(other) == _set_of(name)]
            missing = sorted(set(others) - set(there))
            if missing and re.search(_FIRST, name):
                yield f"{name} is there, but not {missing}"


def _set_of(name: str) -> str:
    """What is loaded together: the parts of a split, the files of a folder."""
    return re.sub(r"-\d{5}-of", "", name) if name.endswith(".gguf") else os.path.dirname(name)
