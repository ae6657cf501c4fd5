"""Resolves `--data`: which files of a folder to read, in which order, with which sampling weight."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

from aprfmt.errors import NotFoundError, RefusedError, UsageError, storage_error

HEADER = "tokens.json"
"""A folder with this file contains token shards."""

MAX_SOURCE_BYTES = 1 << 20
"""Skip larger files in a source tree: they are data or generated."""

_LANGUAGES = (
    "adb ads asm bash bat c cc cfg cjs clj cmake coffee cpp cs css cu cuh cxx d dart el elm erl ex exs f "
    "f90 fs go gradle graphql groovy h hh hpp hs html hxx ini java jl js jsx kt kts less lisp lua m "
    "markdown md mjs ml mli mm nim nix pas php pl pm proto ps1 pxd py pyi pyx r rb rs rst s sass scala "
    "scm scss sh sol sql sv swift tcl tex tf toml ts tsx txt v vb vhd vim vue yaml yml zig zsh "
)
SOURCE_SUFFIXES = frozenset(f".{name}" for name in _LANGUAGES.split())
"""Suffixes of source code and prose in a folder; other files are skipped and counted."""

_KINDS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".bin": "tokens",
    ".csv": "csv", ".tsv": "tsv",
}  # fmt: skip
COMPRESSED = (".gz", ".zst", ".xz")
"""Compression suffixes, appended to that of a text or record file."""

_PROSE = re.compile(r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|dataset_infos?|\.)", re.I)
"""Names of files that document the others."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read documents from.

    Attributes:
        path: path of the file.
        name: path relative to the given folder, with forward slashes.
        kind: text, source, tokens or a record format.
        source: index of the `--data` path that it belongs to.
    """

    path: Path
    name: str
    kind: str
    source: int = 0

    @property
    def size(self) -> int:
        """Bytes."""
        return self.path.stat().st_size


def split_weights(texts: Sequence[str]) -> tuple[list[Path], list[Fraction]]:
    """Parses `PATH` or `PATH:WEIGHT`; all have a weight, or none.

    If a file with the whole name exists, it is the path. Raises UsageError.
    """
    paths, weights = [], []
    for text in texts:
        path, colon, number = text.rpartition(":")
        is_weight = colon and re.fullmatch(r"\d+(\.\d*)?|\.\d+", number) and not os.path.exists(text)
        paths.append(Path(path if is_weight else text))
        weights += [Fraction(number)] if is_weight else []
    double = [str(path) for path, n in Counter(paths).items() if n > 1]
    if double:
        raise UsageError(f"--data {double[0]} is given twice", hint="to sample it more often, increase its weight")
    if weights and len(weights) < len(paths):
        raise UsageError(
            "set a weight for every --data, or for none",
            hint=" ".join(f"--data {path}:{Fraction(1, len(paths)).__float__():.2g}" for path in paths),
        )
    if not all(weights):
        unused = paths[weights.index(Fraction(0))]
        raise UsageError(f"--data {unused}: its weight must be above 0", hint="set a weight, or leave out the path")
    if len(weights) == 1:
        raise UsageError(f"--data {paths[0]}: a weight requires several --data", hint=f"--data {paths[0]}")
    return paths, [weight / sum(weights) for weight in weights]


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest distinct suffixes of the paths; of a data set of the hub org/name and what is below."""
    parts = [_parts(path.absolute()) for path in paths]
    n = next((n for n in range(1, 64) if len({each[-n:] for each in parts}) == len(parts)), 64)
    return ["/".join(each[-n:]) for each in parts]


def _parts(path: Path) -> tuple[str, ...]:
    """The parts of a path; a data set of the hub is a single part."""
    parts = path.parts
    at = next((i for i, part in enumerate(parts) if part.startswith("datasets--")), None)
    return parts if at is None else ("/".join(parts[at].split("--")[1:]), *parts[at + 3 :])


def list_files(paths: Sequence[Path], skipped: Counter[str], own: Path | None = None) -> list[SourceFile]:
    """The files in `paths`, in an order that depends only on names.

    A folder with record files (JSON lines, Parquet, csv) or token shards at its top level is a data folder: those are
    read, also in subfolders. So is one with more of them below than other readable files, not counting READMEs and
    licenses. Any other folder is a source tree: text files with known suffixes up to 1 MiB (.txt of any size). Hidden
    names and links are skipped in both. A file in `paths` is read whatever its size.

    Args:
        paths: files and folders.
        skipped: counts skipped files, by reason.
        own: a folder to skip in trees.

    Raises:
        NotFoundError: a path does not exist.
        UsageError: a path is `own`, or the folder of another run, or token shards combined with other paths.
        StorageError: a folder cannot be listed.
    """
    found: list[SourceFile] = []
    for number, path in enumerate(paths):
        if path.is_file():
            found.append(SourceFile(path, path.name, _kind_of(path) or "text", number))
        elif own is not None and path.is_dir() and own.is_dir() and path.samefile(own):
            raise UsageError(f"{path} cannot be both data and output", hint="choose another folder with -o")
        elif (path / "tokens" / HEADER).is_file():
            raise UsageError(
                "this is the folder of a training run, not data",
                path=path,
                hint=f"use its token shards: {path / 'tokens'}",
            )
        elif (path / HEADER).is_file():
            raise UsageError(
                "token shards cannot be combined with other data", path=path, hint="use the original text instead"
            )
        elif path.is_dir():
            found += _folder(path, number, skipped, own)
        else:
            raise NotFoundError("no such file or folder", path=path, hint="check the path of the data")
    return found


def check_text_field(files: Iterable[SourceFile], text_field: str) -> None:
    """Raises UsageError if none of the files contains records."""
    if all(file.kind in ("text", "source", "tokens") for file in files):
        raise UsageError(
            f"--text-field {text_field} applies to jsonl, csv and parquet data; none found",
            hint="leave out --text-field",
        )


def _kind_of(path: Path) -> str | None:
    """Data format by file name; None for source code, prose and other files."""
    *rest, last = ["", *(suffix.lower() for suffix in path.suffixes)]
    if last not in COMPRESSED:
        return _KINDS.get(last)
    kind = "text" if rest[-1] in ("", ".txt") else _KINDS.get(rest[-1])
    return kind if kind not in ("parquet", "tokens") else None


def _folder(folder: Path, number: int, skipped: Counter[str], own: Path | None) -> list[SourceFile]:
    walked: Counter[str] = Counter()
    data, sources = [], []
    for path in _walk(folder, walked, own):
        name = path.relative_to(folder).as_posix()
        if (kind := _kind_of(path)) and path.suffix.lower() != ".json":  # most of those configure something
            data.append(SourceFile(path, name, kind, number))
        elif reason := _why_not(path):
            walked[reason] += 1
        else:
            sources.append(SourceFile(path, name, "source", number))
    own_text = sum(not _PROSE.match(file.path.name) for file in sources)
    is_data = any("/" not in file.name for file in data) or len(data) > own_text
    if is_data:
        walked = Counter({"files next to the data files": len(sources) + sum(walked.values())})
    elif data:
        walked["data files in a tree of source code"] = len(data)
    skipped.update(walked)
    return data if is_data else sources


def _walk(folder: Path, skipped: Counter[str], own: Path | None) -> list[Path]:
    found, own = [], own and own.resolve()
    for place, folders, names in os.walk(folder, onerror=_unreadable):
        skipped["hidden folders"] += sum(name.startswith(".") for name in folders)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and Path(place, name).resolve() != own)
        skipped["symlinks and devices"] += sum(os.path.islink(os.path.join(place, name)) for name in folders)
        for name in sorted(names):
            path = Path(place, name)
            if name.startswith("."):
                skipped["hidden files"] += 1
            elif not path.is_file() or (path.is_symlink() and not _is_cached(path)):
                skipped["symlinks and devices"] += 1
            else:
                found.append(path)
    return found


def _is_cached(path: Path) -> bool:
    """Whether a link points into the blobs of the Hugging Face cache."""
    return Path(os.path.realpath(path)).parent.name == "blobs"


def _unreadable(error: OSError) -> NoReturn:
    """Raises for a folder that cannot be listed; os.walk would skip it silently."""
    raise storage_error(error, error.filename) from error


def _why_not(path: Path) -> str | None:
    if path.suffix.lower() not in SOURCE_SUFFIXES:
        return "files that are not source code"
    is_long = path.stat().st_size > MAX_SOURCE_BYTES
    return "files over 1 MiB" if is_long and path.suffix.lower() != ".txt" else None


def no_documents(reason: str, n_files: int, n_read: int, skipped: Mapping[str, int], hint: str) -> RefusedError:
    """The error for data without documents: what was skipped, and what is read."""
    left_out = ", ".join(f"{n} {what}" for what, n in skipped.items() if n)
    if not n_files:
        hint = "pass text, jsonl, csv, parquet or source files, or folders of them; .json files by their paths"
    elif left_out and not n_read:
        hint += "; set the field of a record's text with --text-field"
    return RefusedError(reason + (f"; skipped {left_out}" if left_out else ""), hint=hint)
