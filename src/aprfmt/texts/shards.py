"""Token shards: documents as token ids on disk, in a training and a held-out part.

For each part a folder of shards contains `PART.bin` (token ids, little-endian uint32, concatenated documents),
`PART.docs` (16 bytes per document: its end, and the hash of its content) and, if tokens are masked, `PART.masks` (16
bytes per masked
run: its start and end); for both parts, `tokens.json`: counts, the sources of a mixture, the tokenizer's hash, SHA-256
of every file, the key of the inputs, and a checksum of its own. The header is checked on opening; token ids are read on
demand.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NotRequired, Self, TypedDict, cast

import numpy as np
import numpy.typing as npt

from aprfmt.errors import AprError, ChecksumError, CorruptError, NotFoundError, RefusedError, storage_error
from aprfmt.io.crc import crc32_of
from aprfmt.io.pipe import FileLayout, Literal, WriteOptions, sha256_of_range, write_file
from aprfmt.io.source import Source
from aprfmt.texts.encoding import HIDDEN, Ids, Int64, hidden_runs
from aprfmt.texts.sources import HEADER

FORMAT = "aprtrain-tokens/1"
PARTS = ("train", "held_out")
_DOCUMENT = np.dtype([("end", "<u8"), ("hash", "<u8")])
_SUFFIXES = (".bin", ".docs", ".masks")


class StoredIds:
    """Token ids of a file, little-endian uint32, read slice by slice.

    They are not mapped: a truncated file raises an error instead of a signal.
    """

    def __init__(self, source: Source) -> None:
        """`source` is closed together with this."""
        self._source = source

    def __len__(self) -> int:
        return self._source.size // 4

    def __getitem__(self, part: slice) -> npt.NDArray[np.uint32]:
        start, stop, _ = part.indices(len(self))
        return np.frombuffer(self._source.read(4 * start, 4 * max(0, stop - start)), "<u4")

    def __del__(self) -> None:
        self._source.close()


@dataclass(frozen=True, slots=True)
class CorpusSplit:
    """The documents of one part.

    Attributes:
        tokens: ids [n_tokens], uint32, to be sliced.
        ends: end position of each document [n_documents], int64, ascending; the last is n_tokens.
        hashes: of the documents' contents [n_documents], uint64.
        masks: start and end position of each masked run [n, 2], int64, ascending. The first token of a document, which
            is never a label, is in none.
        begin: id of BOS, which starts every document; None if the tokenizer adds none.
        sources: number of documents of each weighted source, in order; empty without weights.
    """

    tokens: npt.NDArray[np.uint32] | StoredIds
    ends: Int64
    hashes: npt.NDArray[np.uint64]
    masks: Int64 = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    begin: int | None = None
    sources: tuple[int, ...] = ()

    @property
    def starts(self) -> Int64:
        """Position of each document's first token [n_documents], int64."""
        return np.concatenate([np.zeros(1, np.int64), self.ends])[:-1]

    @property
    def n_masked(self) -> int:
        """Number of masked tokens."""
        return int((self.masks[:, 1] - self.masks[:, 0]).sum())


def part_of(documents: Sequence[Ids], begin: int | None = None) -> CorpusSplit:
    """A part in memory, from the output of an Encoder; `begin` is its BOS, if it adds one."""
    ends = np.cumsum([len(ids) for ids in documents], dtype=np.int64)
    starts = ends - [len(ids) for ids in documents]
    masks = [hidden_runs(ids) + start for ids, start in zip(documents, starts, strict=True)]
    tokens = np.concatenate([np.zeros(0, np.uint32), *documents]) & ~HIDDEN
    runs = np.concatenate([np.zeros((0, 2), np.int64), *masks])
    return CorpusSplit(tokens, ends, np.zeros(len(documents), np.uint64), runs, begin)


class PartHeader(TypedDict):
    """The header's entry of a part; hashes by file name."""

    documents: int
    tokens: int
    sha256: dict[str, str]
    masked: NotRequired[int]


class SourceHeader(TypedDict):
    """The header's entry of one of several sources of the training part, in order."""

    name: str
    weight: str
    documents: int
    tokens: int


class TokenShardHeader(TypedDict):
    """The header of token shards; `key` is a hash of the inputs, `crc32` of the other fields.

    `sources` is present for weighted sources, `template` is the hash of the chat template if one was used, `begin` is
    the id of BOS, which starts every document.
    """

    format: str
    key: str
    tokenizer: str
    separator: int
    held_out_share: float
    held_out_below: int | None
    parts: dict[str, PartHeader]
    documents: dict[str, int]
    files: FilesHeader
    sources: NotRequired[list[SourceHeader]]
    template: NotRequired[str]
    begin: NotRequired[int]
    crc32: NotRequired[str]


_REQUIRED = TokenShardHeader.__annotations__.keys() - {"sources", "template", "begin", "crc32"}


class FilesHeader(TypedDict):
    """The files that were read, and what was skipped, by reason."""

    read: int
    bytes: int
    skipped: dict[str, int]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Opened shards.

    Attributes:
        train: the training part.
        held_out: the evaluation part; shares no document with `train`.
        separator: the id that ends every document.
        key: hash of sources, tokenizer and split; equal for equal shards.
        folder: their folder.
        header: the whole header.
    """

    train: CorpusSplit
    held_out: CorpusSplit
    separator: int
    key: str
    header: TokenShardHeader
    folder: Path

    def files(self) -> list[str]:
        """Names of its files, the header last."""
        return [*(name for part in self.header["parts"].values() for name in part["sha256"]), HEADER]


class PartWriter:
    """Streams the documents of one part into its files."""

    def __init__(self, folder: Path, part: str) -> None:
        self.n_documents = self.n_tokens = self.n_masked = 0
        self._paths = [folder / f"{part}{suffix}" for suffix in _SUFFIXES]
        self._files: list[BinaryIO] = []
        self._sums = [hashlib.sha256() for _ in _SUFFIXES]

    def __enter__(self) -> Self:
        self._files = [path.open("wb", buffering=1 << 20) for path in self._paths]
        return self

    def add(self, tokens: npt.NDArray[np.uint32], content: int) -> None:
        """Appends a document of ids [n], with HIDDEN set for masked ones, and the hash of its content."""
        masks = hidden_runs(tokens)
        runs = (masks + self.n_tokens).astype("<u8").tobytes()
        self.n_masked += int((masks[:, 1] - masks[:, 0]).sum())
        self.n_documents += 1
        self.n_tokens += len(tokens)
        document = np.array([(self.n_tokens, content)], _DOCUMENT)
        written = ((tokens & ~HIDDEN).astype("<u4").tobytes(), document.tobytes(), runs)
        for file, total, data in zip(self._files, self._sums, written, strict=True):
            file.write(data)
            total.update(data)

    def summary(self) -> PartHeader:
        """The header's entry of this part."""
        kept = list(zip(self._paths, self._sums, strict=True))[: 3 if self.n_masked else 2]
        found: PartHeader = {
            "documents": self.n_documents,
            "tokens": self.n_tokens,
            "sha256": {path.name: total.hexdigest() for path, total in kept},
        }
        return {**found, "masked": self.n_masked} if self.n_masked else found

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with ExitStack() as stack:
            for file in self._files:
                stack.callback(file.close)
            for file in self._files if kind is None else ():
                file.flush()
                os.fsync(file.fileno())
        if not self.n_masked:
            self._paths[-1].unlink()


def read_header(folder: Path) -> TokenShardHeader | None:
    """The header of the shards in `folder`, or None. Raises CorruptError."""
    path = folder / HEADER
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, path) from error
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"not a token shard header: {error}", path=path) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT or _REQUIRED - set(header):
        raise CorruptError(f"not a token shard header ({FORMAT})", path=path)
    if header.get("crc32") != _sum_of(header):
        raise ChecksumError("header checksum mismatch", path=path)
    return cast(TokenShardHeader, header)


def write_header(folder: Path, header: TokenShardHeader) -> None:
    """Writes the header of the shards in `folder`, with its checksum."""
    text = json.dumps(header | {"crc32": _sum_of(header)}, indent=2) + "\n"
    write_file(str(folder / HEADER), FileLayout(HEADER, [Literal(text.encode())]), WriteOptions())


def _sum_of(header: Mapping[str, object]) -> str:
    rest = {key: value for key, value in header.items() if key != "crc32"}
    return f"{crc32_of(json.dumps(rest, sort_keys=True).encode()):08x}"


def open_corpus(folder: Path, tokenizer_digest: str, *, skip_checksums: bool = False) -> Corpus:
    """Opens and verifies the shards in `folder`; `skip_checksums` if another process has compared the digests.

    Raises:
        NotFoundError: the folder has no shards.
        ChecksumError, CorruptError: a file contradicts the header.
        RefusedError: another tokenizer, or a held-out document that is in the training part too.
    """
    header = read_header(folder)
    if header is None:
        raise NotFoundError("no token shards found", path=folder / HEADER)
    try:
        if header["tokenizer"] != tokenizer_digest:
            raise RefusedError(
                "these token shards were made with a different tokenizer", path=folder, hint="use the original text"
            )
        parts = {part: _open_part(folder, part, header, skip_checksums) for part in PARTS}
        corpus = Corpus(parts["train"], parts["held_out"], int(header["separator"]), str(header["key"]), header, folder)
    except AprError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"damaged token shard header: {error!r}", path=folder / HEADER) from error
    except OSError as error:
        raise storage_error(error, folder) from error
    shared = np.flatnonzero(np.isin(corpus.held_out.hashes, corpus.train.hashes))
    if len(shared):
        raise RefusedError(
            f"{len(shared)} held-out documents are also in the training data, first: number {shared[0]}; "
            "their loss would be meaningless",
            path=folder,
            hint="remove them from one side, or leave out --eval-data",
        )
    return corpus


def _open_part(folder: Path, part: str, header: TokenShardHeader, skip_checksums: bool) -> CorpusSplit:
    summary = header["parts"][part]
    names = [f"{part}{suffix}" for suffix in _SUFFIXES][: 3 if summary.get("masked") else 2]
    if set(summary["sha256"]) != set(names):
        raise CorruptError(f"the token shard header lacks the hashes of {part}", path=folder / HEADER)
    with ExitStack() as stack:
        ids, *tables = (stack.enter_context(Source.open(folder / name)) for name in names)
        for source in (ids, *tables) if not skip_checksums else ():
            if sha256_of_range(source, 0, source.size) != summary["sha256"][Path(source.path).name]:
                raise ChecksumError("the file does not match tokens.json", path=source.path)
        documents = np.frombuffer(tables[0].read(0, tables[0].size), _DOCUMENT)
        runs = tables[1].read(0, tables[1].size) if len(tables) > 1 else b""
        for table in tables:
            table.close()
        stack.pop_all()
    tokens, ends = StoredIds(ids), documents["end"].astype(np.int64)
    steps = np.diff(ends, prepend=0)
    if len(tokens) != summary["tokens"] or (len(ends) and (steps.min() < 1 or ends[-1] != len(tokens))):
        raise CorruptError("the document table does not match the tokens", path=folder / f"{part}.docs")
    sources = tuple(source["documents"] for source in header.get("sources", ())) if part == PARTS[0] else ()
    if sources and sum(sources) != len(ends):
        raise CorruptError("the documents of the sources do not add up", path=folder / HEADER)
    masks = np.frombuffer(runs, "<u8").astype(np.int64).reshape(-1, 2)
    found = CorpusSplit(tokens, ends, documents["hash"], masks, header.get("begin"), sources)
    edges = np.concatenate([[0], found.masks.ravel(), [len(tokens)]])
    starts = np.searchsorted(found.masks[:, 0], ends - steps, "right") - 1
    inside = (starts >= 0) & (found.masks[starts, 1] > ends - steps) if len(found.masks) else np.zeros(1, bool)
    if (np.diff(edges) < 0).any() or inside.any() or found.n_masked != summary.get("masked", 0):
        raise CorruptError("the mask table does not match the tokens", path=folder / f"{part}.masks")
    return found
