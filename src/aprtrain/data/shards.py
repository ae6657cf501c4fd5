"""Token shards on disk: a training and a held-out part, mapped into memory, checked when opened.

A folder holds, for each part, `PART.bin` (token ids, little-endian uint32, documents one behind the other, each
ending with the separator), `PART.docs` (16 bytes a document: where it ends, and the hash of its content) and, for
both, `tokens.json`: counts, the tokenizer's hash, SHA-256 of every file, and the key of what they were made from.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self, TypedDict, cast

import numpy as np
import numpy.typing as npt

from aprfmt.errors import AprError, ChecksumError, CorruptError, NotFoundError, RefusedError, storage_error
from aprfmt.types import Array

HEADER = "tokens.json"
FORMAT = "aprtrain-tokens/1"
PARTS = ("train", "held_out")
_DOCUMENT = np.dtype([("end", "<u8"), ("hash", "<u8")])
_SUFFIXES = (".bin", ".docs")


@dataclass(frozen=True, slots=True)
class Part:
    """The documents of one part.

    Attributes:
        tokens: ids [n_tokens], uint32.
        ends: position behind each document's last token [n_documents], int64, ascending; the last is n_tokens.
        hashes: of the documents' contents [n_documents], uint64.
    """

    tokens: npt.NDArray[np.uint32]
    ends: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]


class PartHeader(TypedDict):
    """What the header says of a part; hashes by file name."""

    documents: int
    tokens: int
    sha256: dict[str, str]


class Header(TypedDict):
    """The header of token shards; `key` is a hash of what they were made from."""

    format: str
    key: str
    tokenizer: str
    separator: int
    held_out_share: float
    held_out_below: int | None
    parts: dict[str, PartHeader]
    documents: dict[str, int]
    files: FilesHeader


class FilesHeader(TypedDict):
    """The files that were read, and what was left out, by reason."""

    read: int
    bytes: int
    skipped: dict[str, int]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Opened shards.

    Attributes:
        train: what the model learns from.
        held_out: what it is measured with; shares no document with `train`.
        separator: the id that ends every document.
        key: hash of sources, tokenizer and split; equal for equal shards.
        header: the whole header.
    """

    train: Part
    held_out: Part
    separator: int
    key: str
    header: Header


class PartWriter:
    """Streams documents of one part into its two files."""

    def __init__(self, folder: Path, part: str) -> None:
        self.n_documents = 0
        self.n_tokens = 0
        self._paths = [folder / f"{part}{suffix}" for suffix in _SUFFIXES]
        self._files: list[BinaryIO] = []
        self._sums = [hashlib.sha256() for _ in _SUFFIXES]

    def __enter__(self) -> Self:
        self._files = [path.open("wb", buffering=1 << 20) for path in self._paths]
        return self

    def add(self, tokens: npt.NDArray[np.uint32], content: int) -> None:
        """Appends a document of ids [n] with the hash of its content."""
        self.n_documents += 1
        self.n_tokens += len(tokens)
        document = np.array([(self.n_tokens, content)], _DOCUMENT)
        for file, total, data in zip(
            self._files, self._sums, (tokens.astype("<u4").tobytes(), document.tobytes()), strict=True
        ):
            file.write(data)
            total.update(data)

    def summary(self) -> PartHeader:
        """What the header says of this part."""
        return {
            "documents": self.n_documents,
            "tokens": self.n_tokens,
            "sha256": {
                path.name: total.hexdigest() for path, total in zip(self._paths, self._sums, strict=True)
            },
        }

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()


def write_header(folder: Path, header: Header) -> None:
    """Writes `tokens.json`."""
    (folder / HEADER).write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")


def read_header(folder: Path) -> Header | None:
    """The header of the shards in `folder`, None where there are none. Raises CorruptError."""
    path = folder / HEADER
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, path) from error
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"not a header of token shards: {error}", path=path) from error
    if (
        not isinstance(header, dict)
        or header.get("format") != FORMAT
        or not Header.__required_keys__ <= set(header)
    ):
        raise CorruptError(f"not a header of token shards ({FORMAT})", path=path)
    return cast(Header, header)


def open_corpus(folder: Path, tokenizer_digest: str) -> Corpus:
    """Opens the shards in `folder`, once every byte of them is checked.

    Raises:
        NotFoundError: there are none.
        ChecksumError, CorruptError: a file differs from what the header says of it.
        RefusedError: they were made with another tokenizer, or a held-out document is in the training part too.
    """
    header = read_header(folder)
    if header is None:
        raise NotFoundError("no token shards", path=folder / HEADER)
    try:
        if header["tokenizer"] != tokenizer_digest:
            raise RefusedError(
                "these token shards were made with another tokenizer",
                path=folder,
                hint="give the text that they were made from",
            )
        parts = {part: _open_part(folder, part, header["parts"][part]) for part in PARTS}
        corpus = Corpus(
            parts["train"], parts["held_out"], int(header["separator"]), str(header["key"]), header
        )
    except AprError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"damaged header of token shards: {error!r}", path=folder / HEADER) from error
    except OSError as error:
        raise storage_error(error, folder) from error
    _check_disjoint(corpus, folder)
    return corpus


def _open_part(folder: Path, part: str, summary: PartHeader) -> Part:
    for name, wanted in summary["sha256"].items():
        with open(folder / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                raise ChecksumError("the file is not the one that tokens.json describes", path=folder / name)
    tokens = _map(folder / f"{part}.bin", np.dtype("<u4"))
    documents = _map(folder / f"{part}.docs", _DOCUMENT)
    ends = documents["end"].astype(np.int64)
    steps = np.diff(ends, prepend=0)
    if len(tokens) != summary["tokens"] or (len(ends) and (steps.min() < 1 or ends[-1] != len(tokens))):
        raise CorruptError("the table of documents does not fit the tokens", path=folder / f"{part}.docs")
    return Part(tokens, ends, documents["hash"])


def _map(path: Path, dtype: npt.DTypeLike) -> Array:
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r")


def _check_disjoint(corpus: Corpus, folder: Path) -> None:
    shared = np.flatnonzero(np.isin(corpus.held_out.hashes, corpus.train.hashes))
    if len(shared):
        raise RefusedError(
            f"{len(shared)} held-out documents are in the training data too, the first is number {shared[0]}: "
            "a score on them would mean nothing",
            path=folder,
            hint="take them out of one side, or leave --eval-data out",
        )
