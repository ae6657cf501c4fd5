"""Power loss, replayed: what a writer did is recorded, and every state that a disk may be in afterwards is made.

`Tape.recorded` notes each call that changes a file or a folder below one folder. A crash comes before an fsync or at
the end. By then an operation lasts when something that it touched was synced after it. Any subset of the others may be
on the disk: names in any combination that the operations before allow, data whole, in part, as zeros, or not at all. A
rename and an exchange are atomic. File systems with a journal choose fewer states than these.

`Crashes` judges each state as a reader finds it, then lets the next run recover and judges again.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from publications import is_temporary, mixture, on_file_system

from aprfmt.errors import AprError
from aprfmt.io import overwrite, signature
from aprfmt.io.temporary import sweep
from faults import intercepted

_SECTOR = 512

Contents = dict[str, bytes]


class Event(NamedTuple):
    """A change: `kind` is data, cut, sync, link, unlink, rename or exchange; `inodes` are all that it touches.

    Attributes:
        names: (folder's inode, name, inode there before) of each name that changes.
        inodes: folders, or the file, whose sync makes it last.
        offset, data: of a write; `offset` is the new size of a cut.
    """

    kind: str
    inodes: tuple[int, ...]
    names: tuple[tuple[int, str, int], ...] = ()
    offset: int = 0
    data: bytes = b""


@dataclass
class Tape:
    """What was done below `folder`, from the state `files` (content by inode) and `folders` (inodes by name)."""

    folder: Path
    files: dict[int, bytes] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    times: dict[int, int] = field(default_factory=dict)
    _now: dict[int, bytes] = field(default_factory=dict)
    _held: dict[int, int] = field(default_factory=dict)
    _streams: set[int] = field(default_factory=set)  # written to by buffered files, whose calls nobody sees
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the block; fails where the tape does not give what is there at the end."""
        self._walk(self.folder)
        self._now = dict(self.files)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(overwrite, "_written_apart", overwrite._write)  # a child's calls cannot be seen
            with intercepted(self.folder, self._handle):
                yield
        self._see_streams()
        for fd in self._held.values():
            os.close(fd)
        state = State(self, len(self.events))
        tree = state.tree(range(len(self.events)))
        assert {path: state.whole(inode) for path, inode in tree.items() if path[-1] != "/"} == contents(self.folder)

    @property
    def root(self) -> int:
        """Inode of the folder."""
        return next(iter(self.folders))

    def _walk(self, folder: Path) -> None:
        entries = self.folders.setdefault(self._keep(str(folder)), {})
        for path in folder.iterdir():
            entries[path.name] = self._keep(str(path))
            if path.is_dir():
                self._walk(path)
            else:
                self.files[entries[path.name]] = path.read_bytes()
                self.times[entries[path.name]] = path.stat().st_mtime_ns

    def _keep(self, path: str) -> int:
        """The inode at `path`, whose number no other file gets from now on."""
        inode = os.lstat(path).st_ino if not path.startswith("/proc/") else os.stat(path).st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_PATH)
        return inode

    def _handle(self, name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        record = getattr(self, f"_{name}", None)
        if record is None:
            return call()
        with self._lock:
            self._see_streams()
            return record(call, *args)

    def _see_streams(self) -> None:
        for inode in self._streams:
            with open(f"/proc/self/fd/{self._held[inode]}", "rb") as file:
                data = file.read()
            if data != self._now[inode]:
                self._note_cut(inode, 0)
                self._note_data(inode, 0, data)

    def _note_data(self, inode: int, offset: int, data: bytes) -> None:
        self.events.append(Event("data", (inode,), offset=offset, data=data))
        self._now[inode] = _laid(self._now[inode], offset, data)

    def _note_cut(self, inode: int, size: int) -> None:
        self.events.append(Event("cut", (inode,), offset=size))
        self._now[inode] = _cut(self._now[inode], size)

    def _note(self, kind: str, *names: tuple[int, str, int]) -> None:
        self.events.append(Event(kind, tuple(dict.fromkeys(folder for folder, _, _ in names)), names))

    def _time(self, path: str | int) -> None:
        info = os.stat(path)
        self.times[info.st_ino] = info.st_mtime_ns

    def _at(self, path: Any) -> tuple[int, str]:
        folder, name = os.path.split(os.fspath(path))
        return os.stat(folder).st_ino, name

    def _open(self, call: Callable[[], Any], path: Any, mode: Any = "r", *rest: Any) -> Any:
        if isinstance(path, int):
            return call()
        was_there = os.path.lexists(path)
        result = call()
        if not isinstance(result, int) and not result.writable():
            return result
        fd = result if isinstance(result, int) else result.fileno()
        is_unnamed = isinstance(result, int) and mode & os.O_TMPFILE == os.O_TMPFILE
        if isinstance(result, int) and not is_unnamed and not mode & os.O_CREAT:
            return result
        inode = self._keep(f"/proc/self/fd/{fd}")
        if inode not in self._now:
            self._now[inode] = self.files[inode] = b""
            if not is_unnamed:
                self._note("link", (*self._at(path), inode))
        elif was_there and os.fstat(fd).st_size < len(self._now[inode]):
            self._note_cut(inode, os.fstat(fd).st_size)
        if not isinstance(result, int):
            self._streams.add(inode)
        return result

    def _mkdir(self, call: Callable[[], Any], path: Any, *rest: Any) -> None:
        call()
        inode = self._keep(os.fspath(path))
        self.folders[inode] = {}
        self._note("link", (*self._at(path), inode))

    def _write(self, call: Callable[[], int], fd: int, data: Any) -> int:
        return self._writev(call, fd, [data])

    def _writev(self, call: Callable[[], int], fd: int, parts: Iterable[Any]) -> int:
        n = call()
        data = b"".join(bytes(memoryview(part).cast("B")) for part in parts)[:n]
        self._note_data(os.fstat(fd).st_ino, os.lseek(fd, 0, os.SEEK_CUR) - n, data)
        return n

    def _pwrite(self, call: Callable[[], int], fd: int, data: Any, offset: int) -> int:
        n = call()
        self._note_data(os.fstat(fd).st_ino, offset, bytes(memoryview(data).cast("B"))[:n])
        return n

    def _ftruncate(self, call: Callable[[], None], fd: int, size: int) -> None:
        call()
        self._note_cut(os.fstat(fd).st_ino, size)

    def _fsync(self, call: Callable[[], None], fd: int) -> None:
        call()
        self._time(fd)
        self.events.append(Event("sync", (os.fstat(fd).st_ino,)))

    def _link(self, call: Callable[[], None], path: Any, to: Any, *rest: Any) -> None:
        inode = self._keep(os.fspath(path))
        call()
        self._time(os.fspath(to))
        self._note("link", (*self._at(to), inode))

    def _rename(self, call: Callable[[], None], path: Any, to: Any) -> None:
        old, inode = self._at(path), self._keep(os.fspath(path))
        call()
        self._note("rename", (*old, inode), (*self._at(to), inode))

    _replace = _rename

    def _exchange(self, call: Callable[[], None], a: str, b: str) -> None:
        inodes = self._keep(a), self._keep(b)
        call()
        self._note("exchange", (*self._at(a), inodes[0]), (*self._at(b), inodes[1]))

    def _unlink(self, call: Callable[[], None], path: Any, *rest: Any) -> None:
        name, inode = self._at(path), self._keep(os.fspath(path))
        call()
        self._note("unlink", (*name, inode))

    _rmdir = _unlink


def _laid(content: bytes, offset: int, data: bytes) -> bytes:
    return content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]


def _cut(content: bytes, size: int) -> bytes:
    return content[:size].ljust(size, b"\0")


def contents(folder: Path) -> Contents:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class State:
    """What may be on the disk when the power fails before event `end` of the tape."""

    def __init__(self, tape: Tape, end: int) -> None:
        self._tape, self._end = tape, end
        synced: set[int] = set()
        lasts = set()
        for number in reversed(range(end)):
            event = tape.events[number]
            if event.kind == "sync":
                synced.update(event.inodes)
            elif synced.intersection(event.inodes):
                lasts.add(number)
        self._lasting = lasts
        names = [i for i in range(end) if tape.events[i].names]
        self.pending = [i for i in names if i not in lasts]
        self._loose = {e.inodes[0] for i, e in enumerate(tape.events[:end]) if _is_data(e) and i not in lasts}

    def tree(self, chosen: Iterable[int]) -> dict[str, int]:
        """Inodes of files by path, folders by path with a slash behind, where of what is pending the `chosen` came.

        Raises KeyError for events of which one needs another that did not come.
        """
        events, taken = self._tape.events, self._lasting.union(chosen)
        folders = {inode: dict(entries) for inode, entries in self._tape.folders.items()}
        for number in sorted(taken):
            if number >= self._end or not events[number].names:
                continue
            kind, names = events[number].kind, events[number].names
            if kind == "link":
                folder, name, inode = names[0]
                if name in folders[folder]:
                    raise KeyError(name)
                folders[folder][name] = inode
                continue
            if any(folders[folder][name] != inode for folder, name, inode in names[: 1 + (kind == "exchange")]):
                raise KeyError(names)
            (folder, name, inode), (to, new, other) = names[0], names[-1]
            if kind == "exchange":
                folders[folder][name], folders[to][new] = other, inode
                continue
            del folders[folder][name]
            if kind == "rename":
                folders[to][new] = inode
        return dict(self._paths(folders, self._tape.root, ""))

    def _paths(self, folders: dict[int, dict[str, int]], inode: int, before: str) -> Iterator[tuple[str, int]]:
        for name, inner in folders[inode].items():
            if inner in folders:
                yield f"{before}{name}/", inner
                yield from self._paths(folders, inner, f"{before}{name}/")
            else:
                yield before + name, inner

    def is_loose(self, tree: dict[str, int]) -> bool:
        """Whether data of some file of the tree may be lost."""
        return not self._loose.isdisjoint(tree.values())

    def whole(self, inode: int) -> bytes:
        """A file as it was written."""
        return self._content(inode, range(self._end))

    def versions(self, inode: int) -> list[bytes]:
        """What a file may hold, as it was written first."""
        whole = self.whole(inode)
        if inode not in self._loose:
            return [whole]
        old = self._content(inode, sorted(self._lasting))
        parts = [old, bytes(len(whole)), whole[: len(whole) // 2]]
        if old:  # written in place, sector by sector
            length = max(len(old), len(whole))
            pairs = [(old[i : i + _SECTOR], whole[i : i + _SECTOR]) for i in range(0, length, _SECTOR)]
            changed = [i for i, (a, b) in enumerate(pairs) if a != b]
            for part in (changed[: len(changed) // 2], changed[len(changed) // 2 :], changed[::2]):
                parts.append(b"".join(b if i in part else a for i, (a, b) in enumerate(pairs)))
            parts.remove(bytes(len(whole)))
            parts.remove(whole[: len(whole) // 2])
        return [whole, *parts]

    def _content(self, inode: int, numbers: Iterable[int]) -> bytes:
        content = self._tape.files[inode]
        for number in numbers:
            event = self._tape.events[number]
            if _is_data(event) and event.inodes == (inode,):
                if event.kind == "cut":
                    content = _cut(content, event.offset)
                else:
                    content = _laid(content, event.offset, event.data)
        return content


def _is_data(event: Event) -> bool:
    return event.kind in ("data", "cut")


Judge = Callable[[Contents, bool], Iterator[str]]
"""Takes what a reader finds, without temporary files, and whether the next run has recovered; gives what is wrong."""


def old_or_new(old: Contents, new: Contents) -> Judge:
    """Only `old` or `new` after the recovery; before it perhaps what nobody can load."""

    def judge(found: Contents, is_recovered: bool) -> Iterator[str]:
        if found in (old, new):
            return
        if is_recovered:
            names = {*old, *new, *found}
            yield f"neither old nor new: {sorted(n for n in names if found.get(n) not in (old.get(n), new.get(n)))}"
        for name, data in found.items():
            if data not in (old.get(name), new.get(name)):
                yield f"{name} is torn, or of somebody else"
        yield from mixture(found, old, new)

    return judge


@dataclass
class Crashes:
    """Makes states of a tape in `folder`, and judges them.

    Attributes:
        until_fault: whether the first fault is enough.
        count: states that were judged.
        faults: every outcome that must not be.
    """

    tape: Tape
    judge: Judge
    folder: Path
    until_fault: bool = False
    count: int = 0
    faults: list[str] = field(default_factory=list)
    _pool: dict[tuple[int, bytes], Path] = field(default_factory=dict)
    _inodes: dict[int, int] = field(default_factory=dict)
    _seen: set[object] = field(default_factory=set)

    def try_points(self, draw: random.Random, most: int, exhaustive: int) -> None:
        """Judges at most about `most` states: all of a point with up to `exhaustive` of them, else a sample."""
        events = self.tape.events
        points = [i for i, event in enumerate(events) if event.kind == "sync"]
        share = max(1, most // (len(points) + 1))
        for end in (*points, len(events)):
            self._try(State(self.tape, end), end, draw, share, exhaustive)

    def _try(self, state: State, end: int, draw: random.Random, share: int, exhaustive: int) -> None:
        subsets = list(_subsets(state.pending, draw, exhaustive))
        if len(subsets) > exhaustive:
            subsets = [subsets[0], subsets[1], *draw.sample(subsets[2:], min(share, len(subsets) - 2))]
        for chosen in subsets:
            if self.until_fault and self.faults:
                return
            try:
                tree = state.tree(chosen)
            except KeyError:
                continue
            for pick in range(6 if state.is_loose(tree) else 1):
                versions = {inode: state.versions(inode) for path, inode in tree.items() if not path.endswith("/")}
                picked = {inode: all_[min(pick, len(all_) - 1)] for inode, all_ in versions.items()}
                key = frozenset((path, inode, hash(picked.get(inode))) for path, inode in tree.items())
                if key not in self._seen:
                    self._seen.add(key)
                    self._judge(tree, picked, f"before event {end} of {len(self.tape.events)}, with {chosen}, {pick}")

    def _judge(self, tree: dict[str, int], picked: dict[int, bytes], where: str) -> None:
        self.count += 1
        files = {path: picked[inode] for path, inode in tree.items() if not path.endswith("/")}
        found = {path: data for path, data in files.items() if not is_temporary(path)}
        self.faults += [f"{where}: {fault}" for fault in self.judge(found, False)]
        if any(map(is_temporary, tree)):
            self._make(tree, picked)
            try:
                with self._rebooted():
                    self._recover()
            except AprError as error:
                self.faults.append(f"{where}: the next run says {error}")
            found = contents(self.folder)
            if left := [str(path) for path in self.folder.rglob("*.tmp")]:
                self.faults.append(f"{where}: {left} after the next run")
        self.faults += [f"{where}: {fault}, after the next run" for fault in self.judge(found, True)]

    def _recover(self) -> None:
        """What every later run does first in each folder that it writes into."""
        for place in (self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())):
            if not is_temporary(str(place)) and place.is_dir():
                sweep(place)

    def _make(self, tree: dict[str, int], picked: dict[int, bytes]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self._inodes = {self.folder.stat().st_ino: self.tape.root}
        for path, inode in tree.items():
            place = self.folder / path
            if path.endswith("/"):
                place.mkdir()
                self._inodes[place.stat().st_ino] = inode
            else:
                source = self._pooled(inode, picked[inode])
                self._inodes[source.stat().st_ino] = inode
                os.link(source, place)

    def _pooled(self, inode: int, data: bytes) -> Path:
        if (inode, data) not in self._pool:
            path = self.folder.with_name(f"{self.folder.name}-pool") / str(len(self._pool))
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            os.utime(path, ns=(0, self.tape.times.get(inode, 0)))
            self._pool[inode, data] = path
        return self._pool[inode, data]

    @contextmanager
    def _rebooted(self) -> Iterator[None]:
        """Nobody runs that wrote anything; a file is known by the inode that it had on the tape."""
        known = signature.identity

        def identity(info: os.stat_result) -> list[int]:
            inode, *rest = known(info)
            return [self._inodes.get(inode, -inode), *rest]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd: None)
            patch.setattr("aprfmt.io.temporary.is_running", lambda process: False)
            patch.setattr("aprfmt.io.signature.identity", identity)
            patch.setattr("aprfmt.io.switch.identity", identity)
            yield


def _subsets(pending: list[int], draw: random.Random, exhaustive: int) -> Iterator[tuple[int, ...]]:
    """All of what is pending, nothing of it, then every subset, or where they are too many a choice of them."""
    yield tuple(pending)
    yield ()
    if 1 << len(pending) <= exhaustive:
        for size in range(1, len(pending)):
            yield from itertools.combinations(pending, size)
        return
    for i in range(len(pending)):
        yield tuple(pending[:i])
        yield tuple(pending[:i] + pending[i + 1 :])
    for _ in range(exhaustive):
        # Most subsets of a long list are not possible: those near its beginning or its end are.
        gone = set(draw.sample(pending, draw.randint(1, min(4, len(pending)))))
        upto = draw.choice(pending)
        yield tuple(i for i in pending if i <= upto and i not in gone)


def crash(
    operation: Callable[[], object], folder: Path, way: str, *, most: int, exhaustive: int, seed: str,
    judge: Callable[[Contents, Contents], Judge] = old_or_new, until_fault: bool = False,
) -> Crashes:  # fmt: skip
    """Records `operation`, which writes below `folder` on a file system of the `way`, and judges its crashes.

    The last word has the state in which the operation has returned: nothing of its output may be lost then.
    """
    old = contents(folder)
    tape = Tape(folder)
    with on_file_system(way), tape.recorded():
        operation()
    new = contents(folder)
    crashes = Crashes(tape, judge(old, new), folder.with_name(f"{folder.name}-after"), until_fault)
    crashes.try_points(random.Random(seed), most, exhaustive)
    n_before = len(tape.events)
    finished = Crashes(tape, judge(new, new), crashes.folder, until_fault, _pool=crashes._pool)
    finished._try(State(tape, n_before), n_before, random.Random(seed), most, exhaustive)
    crashes.count += finished.count
    crashes.faults += [f"returned, {fault}" for fault in finished.faults]
    return crashes
