"""File names that a model package may create in a user's folder.

A package names the files that it restores, and anybody may have written it. `findings` judges such names. Some are
never
written: paths out of the folder, control characters, our own temporary names. Others need the user's permission: names
that other programs act on, and names that some file system confuses with another.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from aprfmt.errors import RefusedError
from aprfmt.limits import MAX_FILE_NAME_BYTES, MAX_PATH_CHARS, MAX_PATH_PARTS
from aprfmt.text import CONTROLS, first_few
from aprfmt.types import PathLike

ALLOW = "--allow-names"
"""The option that permits risky names."""

HARMLESS_HIDDEN = (".gitattributes", ".gitignore", ".gitkeep", ".keep")
"""Hidden files of ordinary repositories. Git takes no commands from them: a filter or driver named by .gitattributes
must be defined in the user's own configuration.
"""

_ACTED_ON = {
    "pytest.ini": "pytest reads options and plugins from it",
    "tox.ini": "pytest and tox read options and commands from it",
    "desktop.ini": "Windows reads it when the folder is opened",
    "autorun.inf": "Windows runs it when the disk is opened",
}
_RUN = {
    "sitecustomize": "Python runs it when it starts",
    "usercustomize": "Python runs it when it starts",
    "conftest": "pytest runs it",
}
"""Python modules, as folder, source, bytecode or library: conftest.cpython-312.pyc."""

_ACTED_ON_ENDINGS = dict.fromkeys(
    (".lnk", ".scf", ".url", ".desktop", ".library-ms", ".searchconnector-ms"),
    "file managers act on it when showing or opening it",
)
_DEVICES = frozenset(
    (
        *("con", "prn", "aux", "nul", "conin$", "conout$", "clock$"),
        *(f"{port}{n}" for port in ("com", "lpt") for n in "0123456789¹²³"),
    )
)
_SHORT = re.compile(r"[^.]{1,6}~\d+(\.[^.]{0,3})?")
"""An 8.3 name of NTFS and FAT: GIT~1 is .git."""

_TEMPORARY = re.compile(r"\..*\.tmp|\.switch|\.replaced", re.DOTALL)
"""Names that io.temporary and io.switch give to incomplete files."""

_CONTROLS = re.compile(f"[{CONTROLS}]")


class NameFinding(NamedTuple):
    """A problem of a name; `is_final` if no option permits it."""

    name: str
    reason: str
    is_final: bool

    def __str__(self) -> str:
        return f"{self.name!r} ({self.reason})"


def is_plain(name: str) -> bool:
    """Whether the name is a relative path of plain parts that stays inside its folder on every system."""
    return not any(part in ("", ".", "..") for part in name.split("/")) and not set(name) & set("\\\0")


def findings(names: Iterable[str], kept: Iterable[str] = ()) -> list[NameFinding]:
    """Problems of the relative paths `names`, which will be in one folder.

    At most one finding per name. Of names that collide the first is right; `kept` precede all others and are not
    judged.
    """
    names = list(names)
    places = {folded(name): name for name in kept}
    heads = _heads_of_repositories({*places, *map(folded, names)})
    folders = {folder: name for place, name in places.items() for folder in _folders(place)}
    found = []
    for name in names:
        place = folded(name)
        other = places.get(place) or folders.get(place) or next(filter(None, map(places.get, _folders(place))), None)
        if (reason := _unsafe(name)) is not None:
            found.append(NameFinding(name, reason, is_final=True))
        elif (reason := _acted_on(name)) is not None:
            found.append(NameFinding(name, reason, is_final=False))
        elif place in heads:
            found.append(NameFinding(name, "git treats its folder as a repository", is_final=False))
        elif other is not None:
            found.append(NameFinding(name, f"some file systems read it as {other!r}", is_final=False))
        else:
            places[place] = name
            folders |= dict.fromkeys(_folders(place), name)
    return found


def check(names: Iterable[str], path: PathLike, *, allowed: bool) -> None:
    """Raises RefusedError, about the model at `path`, if files must not get these names."""
    found = [finding for finding in findings(names) if finding.is_final or not allowed]
    if found:
        may = all(not finding.is_final for finding in found)
        raise RefusedError(
            f"the model would write {first_few(found)}",
            path=path,
            hint=f"{ALLOW} allows such names; inspect the files before other programs read them"
            if may
            else "no option allows it: such names indicate an attack or damage",
        )


def folded(name: str) -> str:
    """A normal form: equal for all spellings that some file system treats as one name.

    NTFS and APFS ignore case, HFS+ and APFS the form of accents, HFS+ invisible characters, Windows trailing dots and
    spaces.
    """
    if not name.isascii():
        name = "".join(c for c in unicodedata.normalize("NFD", name) if unicodedata.category(c) != "Cf")
        name = unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())
    return "/".join(part.rstrip(". ") or part for part in name.casefold().split("/"))


def _folders(place: str) -> Iterator[str]:
    parts = place.split("/")
    return ("/".join(parts[:n]) for n in range(1, len(parts)))


def _heads_of_repositories(places: Collection[str]) -> set[str]:
    """The `HEAD` of each folder that git takes for a repository, whose `config` can name commands to run.

    Git requires `HEAD`, and `objects` and `refs` in the same folder or where `commondir` points.
    """
    every = {*places, *(folder for place in places for folder in _folders(place))}
    heads = (place for place in places if place.rpartition("/")[2] == "head")
    return {
        head
        for head in heads
        if (around := head.removesuffix("head")) + "commondir" in every
        or {f"{around}objects", f"{around}refs"} <= every
    }


def _unsafe(name: str) -> str | None:
    """Why no file may ever have the name."""
    places = folded(name).split("/")
    if not is_plain(name) or not all(part.strip(". ") for part in places):
        return "not a plain relative path"
    if _CONTROLS.search(name):
        return "it contains control characters"
    if len(name) > MAX_PATH_CHARS or name.count("/") >= MAX_PATH_PARTS:
        return "the path is too long"
    parts = name.split("/")
    if any(len(part.encode()) > MAX_FILE_NAME_BYTES for part in parts):
        return "the name is too long"
    if any(map(_TEMPORARY.fullmatch, places)):
        return "apr uses such names for unfinished outputs"
    return None


def _acted_on(name: str) -> str | None:
    """Why a file of this name may have side effects on some system."""
    place = folded(name)
    parts = place.split("/")
    for part, own in zip(parts, name.split("/"), strict=True):
        if part.startswith(".") and not (own in HARMLESS_HIDDEN and name.endswith(own)):
            return "other programs read hidden files"
        if part.partition(".")[0].rstrip() in _DEVICES:
            return "Windows reads it as a device"
        if ":" in part:
            return "Windows reads the part after the colon as a stream"
        if own != own.rstrip(". "):
            return "Windows drops dots and spaces at the end"
        if _SHORT.fullmatch(part):
            return "Windows reads it as the short form of another name"
    modules = (_RUN.get(part.partition(".")[0]) for part in parts)
    endings = (reason for ending, reason in _ACTED_ON_ENDINGS.items() if parts[-1].endswith(ending))
    return _ACTED_ON.get(parts[-1]) or next(filter(None, (*modules, *endings)), None)
