"""Training text out of files: plain text, JSON lines, Parquet, token shards, folders of source code.

A document is a string, or an array of token ids [n] (uint32) where the file holds tokens. The order of files and
documents depends on names and contents alone. Memory stays within one document and one block of a file.
"""

from __future__ import annotations

import codecs
import importlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from aprfmt.errors import (
    AprError,
    CorruptError,
    LimitError,
    MissingDependencyError,
    NotFoundError,
    RefusedError,
    UsageError,
    storage_error,
)

Document = str | npt.NDArray[np.uint32]

HEADER = "tokens.json"
"""A folder with it holds token shards."""

MAX_SOURCE_BYTES = 1 << 20
"""Longer files of a source tree are data or generated."""

MAX_LINE_BYTES = 256 << 20
"""A line of a JSON lines file."""

_PIECE = 1 << 16  # characters; text files are cut into documents of about this length
_BLOCK = 1 << 20  # tokens read at a time, and the longest document of a token shard
_TEXT_FIELD = "text"

_LANGUAGES = (
    "adb ads asm bash bat c cc cfg cjs clj cmake coffee cpp cs css cu cuh cxx d dart el elm erl ex exs f "
    "f90 fs go gradle graphql groovy h hh hpp hs html hxx ini java jl js jsx kt kts less lisp lua m "
    "markdown md mjs ml mli mm nim nix pas php pl pm proto ps1 pxd py pyi pyx r rb rs rst s sass scala "
    "scm scss sh sol sql sv swift tcl tex tf toml ts tsx txt v vb vhd vim vue yaml yml zig zsh "
)
SOURCE_SUFFIXES = frozenset(f".{name}" for name in _LANGUAGES.split())
"""What counts as source code or prose in a folder; other files are counted and left out."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that documents come from.

    Attributes:
        path: where it is.
        name: relative to the folder that was given, with forward slashes.
        kind: a key of the table of readers.
    """

    path: Path
    name: str
    kind: str

    @property
    def size(self) -> int:
        """Bytes."""
        return self.path.stat().st_size


def list_files(paths: Sequence[Path], skipped: Counter[str], own: Path | None = None) -> list[SourceFile]:
    """The files behind `paths`, in an order that depends on names alone.

    A folder with JSON lines, Parquet or token shards in it is a data folder: those are read. Any other one is a
    source tree: text files of known suffixes up to 1 MiB (.txt of any size), without hidden names and links. A file
    that is named itself is read whatever its size.

    Args:
        paths: files and folders.
        skipped: counts what is left out, by reason.
        own: a folder that is left out of trees.

    Raises:
        NotFoundError: a path does not exist.
        UsageError: a path is `own`, or the folder of another run.
        StorageError: a folder cannot be listed.
    """
    found: list[SourceFile] = []
    for path in paths:
        if path.is_file():
            found.append(SourceFile(path, path.name, _SUFFIXES.get(path.suffix.lower(), "text")))
        elif own is not None and path.is_dir() and own.is_dir() and path.samefile(own):
            raise UsageError(f"{path} cannot be the data and the output", hint="name another folder with -o")
        elif (path / "tokens" / HEADER).is_file():
            raise UsageError(
                "the folder of a run is not text", path=path, hint=f"name its token shards: {path / 'tokens'}"
            )
        elif path.is_dir():
            found += _data_files(path, skipped) or _tree(path, skipped, own)
        else:
            raise NotFoundError("no such file or folder of data", path=path, hint="check --data and --eval-data")
    return found


def read_documents(file: SourceFile, separator: int, skipped: Counter[str]) -> Iterator[Document]:
    """The documents of one file.

    Args:
        file: an entry of `list_files`.
        separator: the token id that ends documents in token shards.
        skipped: counts source files that hold no text.

    Raises:
        CorruptError: no UTF-8, no JSON, no `text` field, a shard of broken length.
        MissingDependencyError: a Parquet file without pyarrow.
        StorageError: the file cannot be read.
    """
    try:
        if file.kind == "source":
            yield from _source(file.path, skipped)
        elif file.kind == "tokens":
            yield from _tokens(file.path, separator)
        else:
            yield from _READERS[file.kind](file.path)
    except UnicodeDecodeError as error:
        raise CorruptError(
            f"not UTF-8 text: {error.reason}", path=file.path, hint="give text, .jsonl, .parquet or .bin shards"
        ) from error
    except OSError as error:
        raise storage_error(error, file.path) from error


def _data_files(folder: Path, skipped: Counter[str]) -> list[SourceFile]:
    try:
        entries = {entry.name: entry.is_file() for entry in os.scandir(folder) if entry.name[0] != "."}
    except OSError as error:
        _unreadable(error)
    names = sorted(name for name, is_file in entries.items() if is_file)
    kinds = {name: _SUFFIXES[suffix] for name in names if (suffix := Path(name).suffix.lower()) in _SUFFIXES}
    if kinds:
        skipped["files and folders beside the data files"] += len(entries) - len(kinds)
    return [SourceFile(folder / name, name, kind) for name, kind in kinds.items()]


def _tree(folder: Path, skipped: Counter[str], own: Path | None) -> list[SourceFile]:
    found, own = [], own and own.resolve()
    for place, folders, names in os.walk(folder, onerror=_unreadable):
        skipped["hidden folders"] += sum(name.startswith(".") for name in folders)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and Path(place, name).resolve() != own)
        skipped["links and devices"] += sum(os.path.islink(os.path.join(place, name)) for name in folders)
        for name in sorted(names):
            path = Path(place, name)
            if reason := _why_not(path):
                skipped[reason] += 1
            else:
                found.append(SourceFile(path, path.relative_to(folder).as_posix(), "source"))
    return found


def _unreadable(error: OSError) -> NoReturn:
    """A folder that cannot be listed is not passed over, as os.walk would."""
    raise storage_error(error, error.filename) from error


def _why_not(path: Path) -> str | None:
    if path.name.startswith("."):
        return "hidden files"
    if path.is_symlink() or not path.is_file():
        return "links and devices"
    if path.suffix.lower() not in SOURCE_SUFFIXES:
        return "files that are not source code"
    is_long = path.stat().st_size > MAX_SOURCE_BYTES
    return "files above 1 MiB" if is_long and path.suffix.lower() != ".txt" else None


def _source(path: Path, skipped: Counter[str]) -> Iterator[str]:
    if not _is_text(path):
        skipped["files that are not UTF-8 text"] += 1
    elif path.stat().st_size > MAX_SOURCE_BYTES:
        yield from _text(path)
    else:
        yield path.read_bytes().decode("utf-8-sig")


def _is_text(path: Path) -> bool:
    """Whether a file is UTF-8 without zero bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        try:
            while block := file.read(MAX_SOURCE_BYTES):
                decoder.decode(block)
                if b"\0" in block:
                    return False
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def _text(path: Path) -> Iterator[str]:
    """Pieces that end at a blank line where there is one."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        piece: list[str] = []
        size = 0
        while line := file.readline(_PIECE):
            if "\0" in line:
                raise CorruptError("not a text file: it holds zero bytes", path=path)
            piece.append(line)
            size += len(line)
            if size >= _PIECE and (not line.strip() or size >= 4 * _PIECE):
                yield "".join(piece)
                piece, size = [], 0
        if piece:
            yield "".join(piece)


def _jsonl(path: Path) -> Iterator[str]:
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            if len(line) == MAX_LINE_BYTES:
                raise LimitError(f"line {number} is longer than {MAX_LINE_BYTES} bytes", path=path)
            if line.strip():
                yield _record(line, path, number)


def _record(line: bytes, path: Path, number: int) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"line {number} is not JSON: {error}", path=path, hint="name it .txt if it is plain text"
        ) from error
    text = value.get(_TEXT_FIELD) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise CorruptError(
            f"line {number} has no string under {_TEXT_FIELD!r}",
            path=path,
            hint=f'each line must be an object such as {{"{_TEXT_FIELD}": "..."}}',
        )
    return _without_halves(text)


def _without_halves(text: str) -> str:
    r"""JSON can spell half of a surrogate pair, as of an emoji that was cut: `\ud83d`. No tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _parquet(path: Path) -> Iterator[str]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingDependencyError(
            "reading Parquet needs pyarrow", path=path, hint="pip install pyarrow, or give .jsonl"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            if _TEXT_FIELD not in file.schema_arrow.names:
                raise RefusedError(f"no column {_TEXT_FIELD!r} among {', '.join(file.schema_arrow.names)}", path=path)
            for batch in file.iter_batches(batch_size=256, columns=[_TEXT_FIELD]):
                yield from (text for text in batch.column(0).to_pylist() if isinstance(text, str))
    except AprError:
        raise
    except ValueError as error:  # pyarrow's ArrowInvalid, at the beginning or in the middle
        raise CorruptError(f"not a complete Parquet file: {error}", path=path) from error


def _tokens(path: Path, separator: int) -> Iterator[Document]:
    """Documents of a shard of little-endian uint32, without the separators between them."""
    size = path.stat().st_size
    if size % 4:
        raise CorruptError(f"{size} bytes are not a whole number of uint32 token ids", path=path)
    rest = np.empty(0, np.uint32)
    with open(path, "rb") as file:
        while block := file.read(4 * _BLOCK):
            tokens = np.concatenate([rest, np.frombuffer(block, "<u4")])
            start = 0
            for end in np.flatnonzero(tokens == separator).tolist():
                yield tokens[start:end]
                start = end + 1
            rest = tokens[start:]
            if len(rest) >= _BLOCK:
                yield rest
                rest = rest[:0]
    if len(rest):
        yield rest


_READERS: dict[str, Callable[[Path], Iterator[Document]]] = {"text": _text, "jsonl": _jsonl, "parquet": _parquet}
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".bin": "tokens"}
