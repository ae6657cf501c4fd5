"""A corpus as token shards: text in, duplicates out, held-out documents apart, token ids on disk.

A folder of shards holds, for the training and the held-out part, `PART.bin` (token ids, little-endian uint32,
documents one behind the other), `PART.docs` (16 bytes a document: where it ends, and the hash of its content), where
some tokens are not to be learned `PART.masks` (16 bytes for each run of them: where it begins and ends) and, for both,
`tokens.json`: counts, the sources of a mixture, the tokenizer's hash, SHA-256 of every file, the key of what they were
made from, and a checksum of its own. It is checked when opened; token ids are read when a window is made.

Which part a document belongs to is decided by the hash of its content alone, so no document can be in both, and the
split stays the same when other documents come or go. Memory is one batch of text, and about 100 bytes a document for
finding duplicates.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NotRequired, Self, TypedDict, cast

import numpy as np
import numpy.typing as npt

from aprfmt.errors import (
    AprError,
    ChecksumError,
    CorruptError,
    NotFoundError,
    RefusedError,
    UsageError,
    storage_error,
    storage_errors,
)
from aprfmt.io.crc import crc32_of
from aprfmt.io.pipe import FileLayout, Literal, WriteOptions, sha256_of_range, write_file
from aprfmt.io.sink import AtomicFolder
from aprfmt.io.source import Source
from aprfmt.texts.encoding import HIDDEN, Encoder, Ids, Int64, hidden_runs
from aprfmt.texts.records import TEXT_FIELD, Document, Log, Marked, Reader, ReadProgress
from aprfmt.texts.sources import HEADER, SourceFile, check_text_field, list_files, short_names
from aprfmt.tokenizer.model import Tokenizer

if TYPE_CHECKING:
    pass

FORMAT = "aprtrain-tokens/1"
PARTS = ("train", "held_out")
_DOCUMENT = np.dtype([("end", "<u8"), ("hash", "<u8")])
_SUFFIXES = (".bin", ".docs", ".masks")

HELD_OUT = 0.01
"""Share of the documents that is held out."""

_BATCH_CHARS = 4 << 20
_BATCH_DOCUMENTS = 4096
_LONG = 1 << 30  # bytes whose comparison with an earlier run takes a while
_HASHES = 1 << 64


class StoredIds:
    """Token ids of a file, little-endian uint32, read slice by slice.

    They are not mapped: a file that somebody cuts short is then an error, and no signal.
    """

    def __init__(self, source: Source) -> None:
        """`source` is closed with this."""
        self._source = source

    def __len__(self) -> int:
        return self._source.size // 4

    def __getitem__(self, part: slice) -> npt.NDArray[np.uint32]:
        start, stop, _ = part.indices(len(self))
        return np.frombuffer(self._source.read(4 * start, 4 * max(0, stop - start)), "<u4")

    def __del__(self) -> None:
        self._source.close()


@dataclass(frozen=True, slots=True)
class Part:
    """The documents of one part.

    Attributes:
        tokens: ids [n_tokens], uint32, to be sliced.
        ends: position behind each document's last token [n_documents], int64, ascending; the last is n_tokens.
        hashes: of the documents' contents [n_documents], uint64.
        masks: first and last position, the latter excluded, of each run of tokens that are not to be learned [n, 2],
            int64, ascending. The first token of a document, which nothing predicts, is in none.
    """

    tokens: npt.NDArray[np.uint32] | StoredIds
    ends: Int64
    hashes: npt.NDArray[np.uint64]
    masks: Int64 = field(default_factory=lambda: np.zeros((0, 2), np.int64))

    @property
    def n_masked(self) -> int:
        """Tokens that are not to be learned."""
        return int((self.masks[:, 1] - self.masks[:, 0]).sum())


def part_of(documents: Sequence[Ids]) -> Part:
    """A part in memory, of what an Encoder made."""
    ends = np.cumsum([len(ids) for ids in documents], dtype=np.int64)
    starts = ends - [len(ids) for ids in documents]
    masks = [hidden_runs(ids) + start for ids, start in zip(documents, starts, strict=True)]
    tokens = np.concatenate([np.zeros(0, np.uint32), *documents]) & ~HIDDEN
    return Part(tokens, ends, np.zeros(len(documents), np.uint64), np.concatenate([np.zeros((0, 2), np.int64), *masks]))


class PartHeader(TypedDict):
    """What the header says of a part; hashes by file name."""

    documents: int
    tokens: int
    sha256: dict[str, str]
    masked: NotRequired[int]


class SourceHeader(TypedDict):
    """What the header says of one of several sources of the training part, in their order."""

    name: str
    weight: str
    documents: int
    tokens: int


class Header(TypedDict):
    """The header of token shards; `key` is a hash of what they were made from, `crc32` one of the rest.

    `sources` are there where they have weights, `template` is the hash of the chat template where one was used.
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
    crc32: NotRequired[str]


_REQUIRED = Header.__annotations__.keys() - {"sources", "template", "crc32"}


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
        folder: where they are.
        header: the whole header.
    """

    train: Part
    held_out: Part
    separator: int
    key: str
    header: Header
    folder: Path

    def files(self) -> list[str]:
        """Names of its files, the header last."""
        return [*(name for part in self.header["parts"].values() for name in part["sha256"]), HEADER]


class PartWriter:
    """Streams documents of one part into its two files."""

    def __init__(self, folder: Path, part: str) -> None:
        self.n_documents = self.n_tokens = self.n_masked = 0
        self._paths = [folder / f"{part}{suffix}" for suffix in _SUFFIXES]
        self._files: list[BinaryIO] = []
        self._sums = [hashlib.sha256() for _ in _SUFFIXES]

    def __enter__(self) -> Self:
        self._files = [path.open("wb", buffering=1 << 20) for path in self._paths]
        return self

    def add(self, tokens: npt.NDArray[np.uint32], content: int) -> None:
        """Appends a document of ids [n], some of them HIDDEN, with the hash of its content."""
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
        """What the header says of this part."""
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
    if not isinstance(header, dict) or header.get("format") != FORMAT or _REQUIRED - set(header):
        raise CorruptError(f"not a header of token shards ({FORMAT})", path=path)
    if header.get("crc32") != _sum_of(header):
        raise ChecksumError("the header's checksum is wrong", path=path)
    return cast(Header, header)


def _sum_of(header: Mapping[str, object]) -> str:
    rest = {key: value for key, value in header.items() if key != "crc32"}
    return f"{crc32_of(json.dumps(rest, sort_keys=True).encode()):08x}"


def open_corpus(folder: Path, tokenizer_digest: str, *, is_checked: bool = False) -> Corpus:
    """Opens the shards in `folder`, once every byte of them is checked, or `is_checked` by another process.

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
        parts = {part: _open_part(folder, part, header["parts"][part], is_checked) for part in PARTS}
        corpus = Corpus(parts["train"], parts["held_out"], int(header["separator"]), str(header["key"]), header, folder)
    except AprError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"damaged header of token shards: {error!r}", path=folder / HEADER) from error
    except OSError as error:
        raise storage_error(error, folder) from error
    shared = np.flatnonzero(np.isin(corpus.held_out.hashes, corpus.train.hashes))
    if len(shared):
        raise RefusedError(
            f"{len(shared)} held-out documents are in the training data too, the first is number {shared[0]}: "
            "a score on them would mean nothing",
            path=folder,
            hint="take them out of one side, or leave --eval-data out",
        )
    return corpus


def _open_part(folder: Path, part: str, summary: PartHeader, is_checked: bool) -> Part:
    names = [f"{part}{suffix}" for suffix in _SUFFIXES][: 3 if summary.get("masked") else 2]
    if set(summary["sha256"]) != set(names):
        raise CorruptError(f"the header of token shards has no hashes of {part}", path=folder / HEADER)
    with ExitStack() as stack:
        ids, *tables = (stack.enter_context(Source.open(folder / name)) for name in names)
        for source in (ids, *tables) if not is_checked else ():
            if sha256_of_range(source, 0, source.size) != summary["sha256"][Path(source.path).name]:
                raise ChecksumError("the file is not the one that tokens.json describes", path=source.path)
        documents = np.frombuffer(tables[0].read(0, tables[0].size), _DOCUMENT)
        runs = tables[1].read(0, tables[1].size) if len(tables) > 1 else b""
        for table in tables:
            table.close()
        stack.pop_all()
    tokens, ends = StoredIds(ids), documents["end"].astype(np.int64)
    steps = np.diff(ends, prepend=0)
    if len(tokens) != summary["tokens"] or (len(ends) and (steps.min() < 1 or ends[-1] != len(tokens))):
        raise CorruptError("the table of documents does not fit the tokens", path=folder / f"{part}.docs")
    found = Part(tokens, ends, documents["hash"], np.frombuffer(runs, "<u8").astype(np.int64).reshape(-1, 2))
    edges = np.concatenate([[0], found.masks.ravel(), [len(tokens)]])
    starts = np.searchsorted(found.masks[:, 0], ends - steps, "right") - 1
    inside = (starts >= 0) & (found.masks[starts, 1] > ends - steps) if len(found.masks) else np.zeros(1, bool)
    if (np.diff(edges) < 0).any() or inside.any() or found.n_masked != summary.get("masked", 0):
        raise CorruptError("the table of masks does not fit the tokens", path=folder / f"{part}.masks")
    return found


# --- making them ---


def prepare(
    paths: Sequence[Path],
    tokenizer: Tokenizer | None,
    folder: Path,
    *,
    held_out: float = HELD_OUT,
    held_out_paths: Sequence[Path] = (),
    log: Log = lambda line: None,
    wanted: str | None = None,
    own: Path | None = None,
    weights: Sequence[Fraction] = (),
    text_field: str = TEXT_FIELD,
    strict: bool = False,
) -> Corpus:
    """Token shards of the documents in `paths`, made in `folder`, or taken from there when nothing has changed.

    At least one document is held out. Shards that an earlier run made are opened where they are.

    Args:
        paths: files and folders, see `sources.list_files`, or one folder of shards.
        tokenizer: the student's.
        folder: where the shards go; its parent exists.
        held_out: share of the documents to hold out, above 0 and below 1.
        held_out_paths: files and folders to measure with instead of a share of `paths`.
        log: takes lines for the user.
        wanted: the key of the only data that will do; what is in `folder` stays when `paths` hold others.
        own: a folder inside `paths` that is not data: that of the run.
        weights: shares of the training tokens, one for each of `paths`; none: every token counts once.
        text_field: where a record's text is.
        strict: whether a bad record is an error; otherwise it is counted and left out.

    Raises:
        UsageError: the data are the run's own folder, shards that were split otherwise, or no records for `text_field`.
        NotFoundError, CorruptError, MissingDependencyError: from reading, see `sources`.
        RefusedError: no documents in a part, or the same document in both; not the data that are wanted.
        StorageError: the disk is full or read-only.
    """
    encoder = Encoder(tokenizer)
    if len(paths) == 1 and (paths[0] / HEADER).is_file():
        return _open_shards(paths[0], encoder, held_out, held_out_paths, log)
    skipped: Counter[str] = Counter()
    files = {"train": list_files(paths, skipped, own), "held_out": list_files(held_out_paths, skipped, own)}
    if text_field != TEXT_FIELD:
        check_text_field([*files["train"], *files["held_out"]], text_field)
    mixed = tuple(zip(short_names(paths), weights, strict=True)) if weights else ()
    threshold = None if held_out_paths else int(held_out * _HASHES)
    plan = _Plan(encoder, files, threshold, skipped, mixed, text_field, strict)
    if plan.n_bytes > _LONG:
        log(f"checking whether {plan.n_bytes / 1e9:.1f} GB of data are what an earlier run read")
    keys = plan.keys()
    if wanted not in (None, *keys):
        raise RefusedError(
            "the data differ from those of the run to resume",
            hint=f"--data {folder} continues with what it read; start a new run with another -o",
        )
    if (corpus := _reuse(folder, keys, encoder, log)) is not None:
        return corpus
    _write(plan, folder, keys, held_out, log)
    return open_corpus(folder, encoder.digest)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What goes where: files by part, and below which content hash a document is held out (None: by file)."""

    encoder: Encoder
    files: dict[str, list[SourceFile]]
    threshold: int | None
    skipped: Counter[str]
    mixed: tuple[tuple[str, Fraction], ...] = ()
    text_field: str = TEXT_FIELD
    strict: bool = False

    @property
    def n_bytes(self) -> int:
        """Of all files."""
        return sum(file.size for files in self.files.values() for file in files)

    def keys(self) -> tuple[str, str]:
        """Hashes of everything that decides the shards: contents and names of files, tokenizer, split.

        The first one is of texts alone; the second one, of data with conversations, goes by their template too.
        """
        total = hashlib.sha256(f"1 {self.encoder.digest} {self.threshold}\n".encode())
        for part, files in self.files.items():
            for file in files:
                name = file.name.encode("utf-8", "surrogateescape").hex()
                with storage_errors(file.path), open(file.path, "rb") as opened:
                    digest = hashlib.file_digest(opened, "sha256").hexdigest()
                total.update(f"{part} {file.kind} {name} {digest}\n".encode())
                if self.mixed and part == "train":
                    total.update(f"{file.source} {self.mixed[file.source][1]}\n".encode())
        if self.text_field != TEXT_FIELD:
            total.update(f"field {self.text_field}\n".encode())
        texts = total.hexdigest()
        total.update(f"conversations {self.encoder.template}\n".encode())
        return texts, total.hexdigest()


def _open_shards(folder: Path, encoder: Encoder, held_out: float, held_out_paths: Sequence[Path], log: Log) -> Corpus:
    corpus = open_corpus(folder, encoder.digest)
    share = corpus.header.get("held_out_share")
    if held_out_paths or held_out not in (HELD_OUT, share):
        raise UsageError(
            f"{folder} holds token shards, which are split already: a share of {share} is held out",
            hint="give the text that they were made from, or drop the options about held-out data",
        )
    if corpus.header.get("template", encoder.template) != encoder.template:
        log(f"the conversations in {folder} were written by another chat template than the model's own")
    return corpus


def _reuse(folder: Path, keys: tuple[str, str], encoder: Encoder, log: Log) -> Corpus | None:
    try:
        header = read_header(folder)
        if header is None or header["key"] != keys["template" in header]:
            return None
        corpus = open_corpus(folder, encoder.digest)
    except (ChecksumError, CorruptError) as error:
        log(f"the token shards are damaged and will be rebuilt: {error}")
        return None
    log(f"token shards in {folder} are up to date: {_counts(header)}")
    return corpus


def _write(plan: _Plan, folder: Path, keys: tuple[str, str], held_out: float, log: Log) -> None:
    n_bytes, n_files = plan.n_bytes, sum(map(len, plan.files.values()))
    log(f"reading {n_files} files, {n_bytes / 1e6:,.1f} MB, as token ids")
    with AtomicFolder(folder, force=True, n_bytes=n_bytes, last=HEADER) as temporary:
        found = _Reading(plan, plan.threshold, log)
        parts = found.write(temporary)
        if plan.threshold is not None and not parts["held_out"]["documents"] and found.smallest < _HASHES:
            # A small corpus: the one document with the smallest hash.
            found = _Reading(plan, found.smallest + 1, log)
            parts = found.write(temporary)
        left_out = "".join(f", {n} {what}" for what, n in (+found.skipped).items())
        for part, what in (("train", "training"), ("held_out", "held-out")):
            if not parts[part]["documents"]:
                raise RefusedError(
                    f"no {what} documents: {found.read} read, {found.empty} empty, {found.duplicate} copies"
                    + (f"; left out{left_out[1:]}" if left_out else ""),
                    hint="give more text: at least two different documents, since one is held out"
                    + ("; --text-field names where a record's text is" if found.skipped and not found.read else ""),
                )
        header: Header = {
            "format": FORMAT,
            "key": keys[found.is_chat],
            "tokenizer": plan.encoder.digest,
            "separator": plan.encoder.separator,
            "held_out_share": held_out,
            "held_out_below": found.threshold,
            "parts": parts,
            "documents": {"read": found.read, "empty": found.empty, "duplicate": found.duplicate},
            "files": {"read": n_files, "bytes": n_bytes, "skipped": dict(+found.skipped)},
        }
        if plan.mixed:
            header["sources"] = found.sources
        if found.is_chat:
            header["template"] = plan.encoder.template
        header["crc32"] = _sum_of(header)
        text = json.dumps(header, indent=2) + "\n"
        write_file(str(temporary / HEADER), FileLayout(HEADER, [Literal(text.encode())]), WriteOptions())
    log(_counts(header))


_Batch = list[tuple[SourceFile, str, int, Document]]
_Encoded = tuple[SourceFile, str, int, Ids]


class _Reading:
    """One reading of all documents: which are kept, and in which part.

    Attributes:
        threshold: below which content hash a document is held out; None: by file.
        skipped: what was left out, by reason.
        read, empty, duplicate: counts of documents.
        smallest: the least content hash of all.
        sources: what each of several gave to train on.
        is_chat: whether some documents are conversations.
    """

    def __init__(self, plan: _Plan, threshold: int | None, log: Log) -> None:
        self._plan = plan
        self._progress = ReadProgress(plan.n_bytes, log)
        self._reader = Reader(
            separator=plan.encoder.separator, render=plan.encoder.render, text_field=plan.text_field,
            strict=plan.strict, skipped=Counter(plan.skipped), log=log,
        )  # fmt: skip
        self.skipped = self._reader.skipped
        self.is_chat = False
        self.sources: list[SourceHeader] = [
            {"name": name, "weight": str(weight), "documents": 0, "tokens": 0} for name, weight in plan.mixed
        ]
        self._seen: dict[str, set[int]] = {part: set() for part in PARTS}
        self.threshold = threshold
        self.read = self.empty = self.duplicate = 0
        self.smallest = _HASHES

    def write(self, folder: Path) -> dict[str, PartHeader]:
        """Writes the shards; what the header says of them."""
        with ExitStack() as stack, storage_errors(folder):
            writers = {part: stack.enter_context(PartWriter(folder, part)) for part in PARTS}
            for file, part, content, ids in self._encode():
                writers[part].add(ids, content)
                if self.sources and part == "train":
                    self.sources[file.source]["documents"] += 1
                    self.sources[file.source]["tokens"] += len(ids)
        return {part: writer.summary() for part, writer in writers.items()}

    def _encode(self) -> Iterator[_Encoded]:
        """Every document; one batch is encoded while the next one is read."""

        def encode(batch: _Batch) -> list[_Encoded]:
            ids = self._plan.encoder.encode([document for *_, document in batch])
            return [(file, part, content, one) for (file, part, content, _), one in zip(batch, ids, strict=True)]

        with ThreadPoolExecutor(1) as pool:
            running: Future[list[_Encoded]] | None = None
            for batch in self._batches():
                following = pool.submit(encode, batch)
                if running is not None:
                    yield from running.result()
                running = following
            if running is not None:
                yield from running.result()

    def _batches(self) -> Iterator[_Batch]:
        batch: _Batch = []
        size = 0
        for item in self._select():
            batch.append(item)
            size += len(item[-1])
            if size >= _BATCH_CHARS or len(batch) == _BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _select(self) -> Iterator[tuple[SourceFile, str, int, Document]]:
        """(file, part, content hash, document) without empty documents and copies."""
        for side, files in self._plan.files.items():
            for file in files:
                for document in self._progress.documents(file, self._reader):
                    self.read += 1
                    self.is_chat |= isinstance(document, Marked)
                    if len(document) == 0 or (isinstance(document, str) and not document.strip()):
                        self.empty += 1
                        continue
                    content = content_hash(document)
                    self.smallest = min(self.smallest, content)
                    below = self.threshold is not None and content < self.threshold
                    part = "held_out" if below else side
                    # The same text may be learned in other places; all of it goes into one part.
                    learned = hash((content, *document.learned)) if isinstance(document, Marked) else content
                    if learned in self._seen[part]:
                        self.duplicate += 1
                        continue
                    self._seen[part].add(learned)
                    yield file, part, content, document


def content_hash(document: Document) -> int:
    """64 bits of BLAKE2b over the text's UTF-8, whatever is learned of it, or over the ids' bytes."""
    text = document.text if isinstance(document, Marked) else document
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text.tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _counts(header: Header) -> str:
    train, held_out = header["parts"]["train"], header["parts"]["held_out"]
    documents = header["documents"]
    left_out = "".join(f", {n} {what}" for what, n in header["files"]["skipped"].items())
    masked = train.get("masked", 0)
    learned = f" ({1 - masked / train['tokens']:.0%} of them answers)" if masked else ""
    return (
        f"{train['tokens']:,} tokens{learned} in {train['documents']:,} documents to train on, "
        f"{held_out['tokens']:,} in {held_out['documents']:,} held out; left out: {documents['duplicate']} copies, "
        f"{documents['empty']} empty documents{left_out}"
    )
