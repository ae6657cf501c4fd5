"""Replaces files of a folder, all or none, if the folder itself cannot be exchanged.

The complete new files are in a temporary folder inside it. First all old files are renamed away, then all new ones are
renamed in; the file without which nobody can load the others goes first and comes last. So the folder never has old and
new files together, and never an incomplete set that loads. A record in the temporary folder, synced before the first
rename, states the plan: the next run completes the switch of a killed process.

The record is signed and contains the identity of both folders and of every file. The next run moves a file only if all
of
that still holds: a record from an archive or in a copy of the folder moves nothing.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Self

from aprfmt.errors import RefusedError
from aprfmt.io.publish import appear, remove, sync_folder
from aprfmt.io.signature import folder_identity, identity, is_signed, sign, why_unsigned
from aprfmt.io.source import exists
from aprfmt.limits import MAX_SWITCH_BYTES

_RECORD = ".switch"
_ASIDE = ".replaced"


@dataclass(slots=True)
class Switch:
    """New files of the folder that contains `temporary`, where they are stored.

    Attributes:
        temporary: path of the temporary folder.
        new: names of the new files with their identities, in the order in which they appear.
        old: names of the files to remove with their identities, in order.
        force: whether new files may replace files that are not in `old`.
        is_recovery: whether another process began it: then only files with matching identities are moved.
        is_begun: whether something was done that is neither complete nor undone.
    """

    temporary: str
    new: dict[str, list[int]]
    old: dict[str, list[int]]
    force: bool
    is_recovery: bool = False
    is_begun: bool = False

    @classmethod
    def plan(cls, temporary: str, new: Iterable[str], stale: Iterable[str], last: str, *, force: bool) -> Self:
        """Plans the switch to the files `new`, which with `force` replace files of the same name; `stale` ones are
        removed.

        `last`: name of the file without which the others cannot be loaded. Raises OSError.
        """
        names = sorted(new, key=lambda name: (name == last, name))
        folder, old = os.path.dirname(temporary), {}
        for name in (*reversed(names), *sorted(set(stale) - set(names))) if force else ():
            with suppress(FileNotFoundError):
                old[name] = identity(os.lstat(os.path.join(folder, name)))
        new_ = {name: identity(os.lstat(os.path.join(temporary, name))) for name in names}
        return cls(temporary, new_, old, force)

    def run(self) -> None:
        """Does it completely or not at all: undoes its steps before an exception leaves. Raises ExistsError, OSError.

        If undoing fails too, the record stays, and the next run completes the switch.
        """
        self._record()
        self.is_begun = True
        try:
            self.forward()
        except BaseException:
            self._back()
            self._forget()
            raise
        self._forget()

    def forward(self) -> None:
        """Does the remaining steps. Raises ExistsError, OSError."""
        firsts = {*list(self.old)[:1], *(self.old.keys() - self.new.keys())}  # of this set, and perhaps of older ones
        for name, known in self.old.items():
            is_placed = name in self.new and not _exists(self._new(name))
            if not is_placed and not _exists(self._aside(name)):
                with suppress(FileNotFoundError):
                    if not self.is_recovery or identity(os.lstat(self._place(name))) == known:
                        _move(self._place(name), self._aside(name))
            if name in firsts:
                self._sync([name])
        self._sync(self.old)
        self._make_folders()
        names = list(self.new)
        for name in names:
            if name == names[-1] != names[0]:
                self._sync(self.new)
            if _exists(self._new(name)) and not self._is_linked(name):
                appear(self._new(name), self._place(name), self.force and not self.is_recovery, keep=True)
        self._sync(self.new)

    def _make_folders(self) -> None:
        """Creates the folders of new files, durably: a file in a lost folder is lost with it."""
        folders = {os.path.dirname(self._place(name)) for name in self.new}
        if missing := [folder for folder in folders if not _exists(folder)]:
            for folder in missing:
                os.makedirs(folder, exist_ok=True)
            self._sync(self.new)

    def check(self) -> None:
        """Raises RefusedError unless every pending new file is the one in the record; OSError."""
        for name in self.pending():
            if identity(os.lstat(self._new(name))) != self.new[name]:
                raise _refused(self.temporary, f"{name} in it was modified")

    def superseded(self) -> set[str]:
        """Names of pending new files whose places others have taken."""
        found = set()
        for name in self.pending():
            with suppress(FileNotFoundError):
                there = identity(os.lstat(self._place(name)))
                if there != self.old.get(name) and not self._is_linked(name):
                    found.add(name)
        return found

    def pending(self) -> set[str]:
        """Names of pending new files."""
        return {name for name in self.new if _exists(self._new(name))}

    def _record(self) -> None:
        place = os.path.dirname(self.temporary)
        folders = [folder_identity(place), folder_identity(self.temporary)]
        values = {"folders": folders, "new": self.new, "old": self.old, "force": self.force}
        body = json.dumps(values).encode()
        data = (sign("switch", body) or "").encode() + b"\n" + body
        fd = os.open(os.path.join(self.temporary, _RECORD), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_folder(self.temporary)
        sync_folder(os.path.dirname(self.temporary))

    def _back(self) -> None:
        """Moves everything back, in reverse order. Raises OSError if that fails."""
        for name in reversed(self.new):
            if not _exists(self._new(name)):
                _move(self._place(name), self._new(name))
            elif self._is_linked(name):
                os.unlink(self._place(name))
        for name in reversed(self.old):
            if _exists(self._aside(name)):
                _move(self._aside(name), self._place(name))
        with suppress(OSError):
            self._sync((*self.new, *self.old))

    def _forget(self) -> None:
        remove(os.path.join(self.temporary, _RECORD))
        self.is_begun = False

    def _sync(self, names: Iterable[str]) -> None:
        folders = {folder for name in names for folder in PurePath(name).parents}
        for folder in sorted(folders, key=lambda folder: (len(folder.parts), folder)):
            with suppress(FileNotFoundError):
                sync_folder(self._place(str(folder)))

    def _is_linked(self, name: str) -> bool:
        """Whether a new file has its final name and still its temporary one."""
        try:
            return os.path.samestat(os.lstat(self._new(name)), os.lstat(self._place(name)))
        except FileNotFoundError:
            return False

    def _place(self, name: str) -> str:
        return os.path.join(os.path.dirname(self.temporary), name)

    def _new(self, name: str) -> str:
        return os.path.join(self.temporary, name)

    def _aside(self, name: str) -> str:
        return os.path.join(self.temporary, _ASIDE, name)


def recover(temporary: str) -> bool:
    """Completes the interrupted switch of another process, if any; returns whether the rest may be removed.

    It may not if the record is another user's, or if others took the places of some of the new files; if they took all
    of them, the switch is out of date. Raises RefusedError for a record that does not match this folder and its files;
    OSError.
    """
    record = os.path.join(temporary, _RECORD)
    try:
        if os.lstat(record).st_uid != os.geteuid():
            return False
        body = _signed_body(record)
    except (FileNotFoundError, NotADirectoryError):  # not begun
        return True
    if body is None:
        if _exists(os.path.join(temporary, _ASIDE)):
            raise _refused(temporary, "its log is damaged")
        return True  # the record is incomplete, so nothing was moved
    values = json.loads(body)
    switch = Switch(temporary, values["new"], values["old"], values["force"], is_recovery=True)
    folder = os.path.realpath(os.path.dirname(temporary))
    inner = os.path.join(folder, os.path.basename(temporary))
    if values["folders"] != [folder_identity(folder), folder_identity(inner)]:
        raise _refused(temporary, "the folder is a copy, or was recreated")
    folders = (folder, inner, os.path.join(inner, _ASIDE))
    if not all(_is_inside(folder, name) for name in (*switch.new, *switch.old) for folder in folders):
        raise _refused(temporary, "a symlink points outside the folder")
    if superseded := switch.superseded():
        return superseded == switch.pending()
    switch.check()
    switch.forward()
    remove(record)
    return True


def check_copy(temporary: str) -> None:
    """Raises RefusedError if `temporary`, whose name is not signed for its folder, contains a switch of this user.

    A record without this user's signature counts for nothing: anybody can have put it into an archive.
    """
    record = os.path.join(temporary, _RECORD)
    with suppress(OSError):
        if os.lstat(record).st_uid != os.geteuid():
            return
        if (reason := why_unsigned()) is not None:
            raise _refused(temporary, reason)
        if _signed_body(record) is not None:
            raise _refused(temporary, "the folder is a copy, or was recreated")


def _signed_body(record: str) -> bytes | None:
    """The record without its signature; None if the signature is not this user's. Raises OSError."""
    fd = os.open(record, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(fd, "rb") as file:
        tag, _, body = file.read(MAX_SWITCH_BYTES).partition(b"\n")
    return body if is_signed("switch", body, tag.decode(errors="replace")) else None


def _refused(temporary: str, why: str) -> RefusedError:
    quoted = shlex.quote(temporary)
    return RefusedError(
        f"cannot complete an interrupted write here: {why}",
        path=temporary,
        hint=f"move the new files out of the folder, or the old ones out of {quoted}/{_ASIDE}; then rm -r {quoted}",
    )


def _is_inside(folder: str, name: str) -> bool:
    """Whether `name` is a file inside `folder` after resolving links, which may have appeared since.

    Neither `folder` nor its parents are links.
    """
    return os.path.commonpath([folder, os.path.realpath(os.path.dirname(os.path.join(folder, name)))]) == folder


def _exists(path: str) -> bool:
    return exists(path, follow=False)


def _move(path: str, to: str) -> None:
    """Renames a file, trying twice, since a rename on a network disk can fail once. Raises OSError."""
    os.makedirs(os.path.dirname(to), exist_ok=True)
    try:
        os.rename(path, to)
    except FileNotFoundError:
        raise
    except OSError:
        os.rename(path, to)
