"""Tokenizes a corpus into token shards, without duplicates, split into training and held-out documents.

The split depends only on the hash of a document's content, so no document is in both parts and the split is stable when
documents are added or removed. Memory: some batches of text, plus about 100 bytes per document for deduplication.
"""

from __future__ import annotations

import hashlib
import shlex
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from aprfmt.errors import ChecksumError, CorruptError, ExistsError, RefusedError, UsageError, storage_errors
from aprfmt.io.sink import AtomicFolder, check_no_inputs_inside, check_target
from aprfmt.io.system import n_processors
from aprfmt.text import plural
from aprfmt.texts.encoding import Encoder, Ids
from aprfmt.texts.records import TEXT_FIELD, Document, Log, Marked, ReadProgress, RecordReader, is_blank
from aprfmt.texts.shards import (
    FORMAT,
    PARTS,
    Corpus,
    PartHeader,
    PartWriter,
    SourceHeader,
    TokenShardHeader,
    open_corpus,
    read_header,
    write_header,
)
from aprfmt.texts.sources import HEADER, SourceFile, check_text_field, list_files, no_documents, short_names
from aprfmt.tokenizer.model import Tokenizer

HELD_OUT = 0.01
"""Default fraction of the documents to hold out."""

_BATCH_CHARS = 1 << 20
_BATCH_DOCUMENTS = 4096
_MOST_THREADS = 8  # that encode batches
_LONG = 1 << 30  # bytes whose comparison with an earlier run takes noticeable time
_HASHES = 1 << 64


class OtherDataError(RefusedError):
    """The data is not that of the run to resume, whose tokens may still be stored."""


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
    """Tokenizes the documents in `paths` into shards in `folder`, or reuses the shards there if nothing has changed.

    At least one document is held out. If `paths` is one folder of token shards, they are opened in place.

    Args:
        paths: files and folders, see `sources.list_files`, or one folder of shards.
        tokenizer: the student's tokenizer.
        folder: output folder of the shards; its parent must exist.
        held_out: fraction of the documents to hold out, above 0 and below 1.
        held_out_paths: evaluate on these files and folders instead of a fraction of `paths`.
        log: called with log lines.
        wanted: required key of the data; other data raises OtherDataError and leaves `folder` unchanged.
        own: the run's folder, excluded if it is inside `paths`.
        weights: sampling weights, one per path; empty: every token counts once.
        text_field: field of a record's text.
        strict: whether an invalid record is an error; otherwise it is skipped and counted.

    Raises:
        UsageError: the data is the run's folder, shards with another split, or has no records for `text_field`.
        NotFoundError, CorruptError, MissingDependencyError: from reading, see `sources`.
        RefusedError: a part without documents.
        OtherDataError: data whose key is not `wanted`.
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
    plan = _CorpusPlan(encoder, files, threshold, skipped, mixed, text_field, strict)
    if plan.n_bytes > _LONG:
        log(f"hashing {plan.n_bytes / 1e9:.1f} GB of data to compare with existing token shards")
    keys = plan.keys()
    if wanted not in (None, *keys):
        raise OtherDataError(
            "the data differs from that of the run to resume",
            hint=shlex.join(["apr", "resume", str(folder.parent), "--data", str(folder)])
            + "\nresumes with the original data; a new run needs another -o",
        )
    if (corpus := reuse(folder, keys, encoder.digest, log)) is not None:
        return corpus
    _write(plan, folder, keys, held_out, log)
    return open_corpus(folder, encoder.digest)


def tokenize(
    paths: Sequence[Path], tokenizer: Tokenizer | None, folder: Path, *, held_out: float, weights: Sequence[Fraction],
    text_field: str, strict: bool, log: Log,
) -> None:  # fmt: skip
    """`prepare` into a folder that a user names, for any number of runs.

    Raises ExistsError if it holds something other than token shards of these data, RefusedError if it is or holds an
    input; else as `prepare`.
    """
    check_target(folder, map(str, paths), force=True, folder=True)
    check_no_inputs_inside(folder, paths)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / HEADER).is_file():
        raise ExistsError("the folder contains files that are not token shards", path=folder)
    if len(paths) == 1 and (paths[0] / HEADER).is_file():
        raise UsageError(
            "the data is already token shards", path=paths[0], hint="leave out -o, or pass the original text"
        )
    old = read_header(folder)
    try:
        prepare(
            paths, tokenizer, folder, held_out=held_out, weights=weights, text_field=text_field, strict=strict, log=log,
            wanted=old and old["key"],
        )  # fmt: skip
    except OtherDataError as error:
        raise ExistsError("the folder contains token shards of other data", path=folder) from error


@dataclass(frozen=True, slots=True)
class _CorpusPlan:
    """The files of each part, and the content hash below which a document is held out (None: by file)."""

    encoder: Encoder
    files: dict[str, list[SourceFile]]
    threshold: int | None
    skipped: Counter[str]
    mixed: tuple[tuple[str, Fraction], ...] = ()
    text_field: str = TEXT_FIELD
    strict: bool = False

    @property
    def n_bytes(self) -> int:
        """Total size of the files."""
        return sum(file.size for files in self.files.values() for file in files)

    def keys(self) -> tuple[str, str]:
        """Hashes of everything that determines the shards: contents and names of files, tokenizer, split.

        The first is for plain texts; the second, for data with conversations, includes the chat template.
        """
        total = hashlib.sha256(f"2 {self.encoder.digest} {self.threshold}\n".encode())
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
            f"the token shards in {folder} are already split: a fraction of {share} is held out",
            hint="use the original text, or leave out --held-out and --eval-data",
        )
    if corpus.header.get("template", encoder.template) != encoder.template:
        log(f"the conversations in {folder} were rendered with a different chat template than the model's")
    return corpus


def reuse(folder: Path, keys: tuple[str, str], digest: str, log: Log) -> Corpus | None:
    """The shards in `folder` if they have the key and the tokenizer's digest that are asked for, and are intact."""
    try:
        header = read_header(folder)
        if header is None or header["key"] != keys["template" in header]:
            return None
        corpus = open_corpus(folder, digest)
    except (ChecksumError, CorruptError) as error:
        log(f"the token shards are damaged and will be rebuilt: {error}")
        return None
    log(f"token shards in {folder} are up to date: {_counts(header)}")
    return corpus


def _write(plan: _CorpusPlan, folder: Path, keys: tuple[str, str], held_out: float, log: Log) -> None:
    n_bytes, n_files = plan.n_bytes, sum(map(len, plan.files.values()))
    log(f"tokenizing {plural(n_files, 'file')}, {n_bytes / 1e6:,.1f} MB")
    with AtomicFolder(folder, force=True, n_bytes=n_bytes, last=HEADER) as temporary:
        found = _Reading(plan, plan.threshold, log)
        parts = found.write(temporary)
        if plan.threshold is not None and not parts["held_out"]["documents"] and found.smallest < _HASHES:
            # A small corpus: hold out the document with the smallest hash.
            found = _Reading(plan, found.smallest + 1, log)
            parts = found.write(temporary)
        for part, what in (("train", "training"), ("held_out", "held-out")):
            if not parts[part]["documents"]:
                hint = "add text: at least two different documents, since one is held out"
                if plan.threshold is None:
                    hint = f"add text to --{'eval-data' if part == 'held_out' else 'data'}"
                counts = f"{found.read} read, {found.empty} empty, {found.duplicate} duplicates"
                raise no_documents(f"no {what} documents: {counts}", n_files, found.read, found.skipped, hint)
        header: TokenShardHeader = {
            "format": FORMAT, "key": keys[found.is_chat], "tokenizer": plan.encoder.digest,
            "separator": plan.encoder.separator, "held_out_share": held_out, "held_out_below": found.threshold,
            "parts": parts, "documents": {"read": found.read, "empty": found.empty, "duplicate": found.duplicate},
            "files": {"read": n_files, "bytes": n_bytes, "skipped": dict(+found.skipped)},
        }  # fmt: skip
        if plan.encoder.begin is not None:
            header["begin"] = plan.encoder.begin
        if plan.mixed:
            header["sources"] = found.sources
        if found.is_chat:
            header["template"] = plan.encoder.template
        write_header(temporary, header)
    log(_counts(header))


_Batch = list[tuple[SourceFile, str, int, Document]]
_Encoded = tuple[SourceFile, str, int, Ids]


class _Reading:
    """One pass over all documents: which are kept, and in which part.

    Attributes:
        threshold: hold out documents with a smaller content hash; None: by file.
        skipped: number of skipped files and records, by reason.
        read, empty, duplicate: counts of documents.
        smallest: the smallest content hash.
        sources: the training documents and tokens of each source.
        is_chat: whether some documents are conversations.
    """

    def __init__(self, plan: _CorpusPlan, threshold: int | None, log: Log) -> None:
        self._plan = plan
        self._progress = ReadProgress(plan.n_bytes, log)
        self._reader = RecordReader(
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
        """Writes the shards; returns the entries of the header."""
        with ExitStack() as stack, storage_errors(folder):
            writers = {part: stack.enter_context(PartWriter(folder, part)) for part in PARTS}
            for file, part, content, ids in self._encode():
                writers[part].add(ids, content)
                if self.sources and part == "train":
                    self.sources[file.source]["documents"] += 1
                    self.sources[file.source]["tokens"] += len(ids)
        return {part: writer.summary() for part, writer in writers.items()}

    def _encode(self) -> Iterator[_Encoded]:
        """Every document, in order; batches are encoded while others are read.

        The tokenizers library uses all cores for a batch; several at a time keep them busy while Python takes the ids.
        """

        def encode(batch: _Batch) -> list[_Encoded]:
            ids = self._plan.encoder.encode([document for *_, document in batch])
            return [(file, part, content, one) for (file, part, content, _), one in zip(batch, ids, strict=True)]

        n = min(_MOST_THREADS, n_processors())
        with ThreadPoolExecutor(n) as pool:
            running: deque[Future[list[_Encoded]]] = deque()
            for batch in self._batches():
                running.append(pool.submit(encode, batch))
                if len(running) > n:
                    yield from running.popleft().result()
            while running:
                yield from running.popleft().result()

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
        """(file, part, content hash, document) without empty documents and duplicates."""
        for side, files in self._plan.files.items():
            for file in files:
                for document in self._progress.documents(file, self._reader):
                    self.read += 1
                    self.is_chat |= isinstance(document, Marked)
                    if is_blank(document):
                        self.empty += 1
                        continue
                    content = content_hash(document)
                    self.smallest = min(self.smallest, content)
                    below = self.threshold is not None and content < self.threshold
                    part = "held_out" if below else side
                    # The same text may have another loss mask; all copies go into one part.
                    learned = hash((content, *document.learned)) if isinstance(document, Marked) else content
                    if learned in self._seen[part]:
                        self.duplicate += 1
                        continue
                    self._seen[part].add(learned)
                    yield file, part, content, document


def content_hash(document: Document) -> int:
    """64 bits of BLAKE2b over the text's UTF-8, whatever the loss mask, or over the ids' bytes."""
    text = document.text if isinstance(document, Marked) else document
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text.tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _counts(header: TokenShardHeader) -> str:
    train, held_out = header["parts"]["train"], header["parts"]["held_out"]
    documents = header["documents"]
    skipped = [plural(documents["duplicate"], "duplicate")] if documents["duplicate"] else []
    skipped += [plural(documents["empty"], "empty document")] if documents["empty"] else []
    skipped += [f"{n} {what}" for what, n in header["files"]["skipped"].items()]
    masked = train.get("masked", 0)
    learned = f" ({1 - masked / train['tokens']:.0%} in answers)" if masked else ""
    return (
        f"{plural(train['tokens'], 'token')}{learned} in {plural(train['documents'], 'training document')}, "
        f"{held_out['tokens']:,} in {plural(held_out['documents'], 'held-out document')}"
        + (f"; skipped: {', '.join(skipped)}" if skipped else "")
    )
