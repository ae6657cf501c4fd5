"""Summarizes training data before training: documents, tokens, loss masks, lengths."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from aprfmt.texts.encoding import HIDDEN, Encoder
from aprfmt.texts.records import TEXT_FIELD, Document, Log, Marked, ReadProgress, RecordReader, is_blank
from aprfmt.texts.shards import TokenShardHeader, read_header
from aprfmt.texts.sources import HEADER, check_text_field, list_files, no_documents, short_names
from aprfmt.types import construct

_COUNTS = ("documents", "tokens", "learned")
_DOCUMENTS = 256  # tokenised at a time
_EXAMPLE_CHARS = 4000

SAMPLE_CHARS = 4 << 20
"""Bytes per source that an estimate reads."""


@dataclass(slots=True)
class DataSource:
    """One of the data paths.

    Attributes:
        name, weight: of the path, None without a weight.
        files, bytes: that are read.
        documents, tokens, learned: counts, and how many of the tokens are trained on.
    """

    name: str
    weight: float | None
    files: int
    bytes: int
    documents: int = 0
    tokens: int = 0
    learned: int = 0


class DataSourceJson(TypedDict):
    """A DataSource; of a plan, `passes` is how often the run reads it."""

    name: str
    weight: float | None
    files: int
    bytes: int
    documents: int
    tokens: int
    learned: int
    passes: NotRequired[float | None]


class DataJson(TypedDict):
    """A DataReport; of a plan, `passes` is how often the run reads the data, `lasts` whether they suffice."""

    data: list[str]
    text_field: str
    sources: list[DataSourceJson]
    documents: int
    tokens: int
    learned: int
    lengths: dict[str, int]
    left_out: dict[str, int]
    example: list[tuple[str, bool]]
    estimated: bool
    passes: NotRequired[float | None]
    lasts: NotRequired[bool]


@dataclass(slots=True)
class DataReport:
    """Summary of training data, tokenized with a model's tokenizer.

    Attributes:
        data: the paths.
        text_field: field of a record's text.
        sources: one entry per path; for token shards, the sources of their mixture.
        documents, tokens, learned: totals; `learned` counts the tokens that the loss mask includes.
        lengths: quantiles of document length in tokens: "least", "tenth", "median", "nine_tenths", "most".
        left_out: number of skipped files and records, by reason.
        example: the start of the first document, in pieces, each with whether it is trained on.
        estimated: whether the counts are extrapolated from the start of large data.
    """

    data: list[str]
    text_field: str = "text"
    sources: list[DataSource] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    learned: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    example: list[tuple[str, bool]] = field(default_factory=list)
    estimated: bool = False

    def to_json(self) -> DataJson:
        """The object of `apr data --json`."""
        return construct(DataJson, asdict(self))


def summarise(
    paths: Sequence[Path],
    weights: Sequence[Fraction],
    encoder: Encoder,
    *,
    text_field: str = TEXT_FIELD,
    strict: bool = False,
    own: Path | None = None,
    sample: int | None = None,
    log: Log = lambda line: None,
) -> DataReport:
    """Implements `aprfmt.api.data`; `sample` stops in each source after that many characters and extrapolates.

    Raises as `prepare` does, RefusedError without a document; duplicates are not detected.
    """
    report = DataReport([str(path) for path in paths], text_field=text_field)
    header = read_header(paths[0]) if len(paths) == 1 and (paths[0] / HEADER).is_file() else None
    if header is not None:
        return _of_shards(report, header)
    skipped: Counter[str] = Counter()
    files = list_files(paths, skipped, own)
    if text_field != TEXT_FIELD:
        check_text_field(files, text_field)
    reader = RecordReader(
        separator=encoder.separator, render=encoder.render, text_field=text_field, strict=strict, skipped=skipped,
        log=log,
    )  # fmt: skip
    progress = ReadProgress(sum(file.size for file in files), log)
    lengths: list[int] = []
    names = short_names(paths)
    for number in range(len(paths)):
        here = [file for file in files if file.source == number]
        n_bytes = sum(file.size for file in here)
        source = DataSource(names[number], float(weights[number]) if weights else None, len(here), n_bytes)
        report.sources.append(source)
        texts, before = (document for file in here for document in progress.documents(file, reader)), progress.done
        if _add(source, texts, encoder, lengths, report, sample or sys.maxsize, skipped):
            report.estimated, n_read = True, max(1, progress.done - before)
            progress.done = before + n_bytes
            for name in _COUNTS:
                setattr(source, name, round(getattr(source, name) * n_bytes / n_read))
    for name in _COUNTS:
        setattr(report, name, sum(getattr(source, name) for source in report.sources))
    if not report.documents:
        n_read = skipped["empty documents"]
        raise no_documents(f"no training documents: {n_read} read", len(files), n_read, skipped, "add text")
    report.left_out = dict(+skipped)
    if lengths:
        named = zip(("least", "tenth", "median", "nine_tenths", "most"), (0, 10, 50, 90, 100), strict=True)
        report.lengths = {name: int(np.percentile(lengths, q, method="nearest")) for name, q in named}
    return report


def _of_shards(report: DataReport, header: TokenShardHeader) -> DataReport:
    for source in header.get("sources", []):
        counts = source["documents"], source["tokens"], source["tokens"]
        report.sources.append(DataSource(source["name"], float(Fraction(source["weight"])), 0, 0, *counts))
    train = header["parts"]["train"]
    report.documents, report.tokens = train["documents"], train["tokens"]
    report.learned = report.tokens - train.get("masked", 0)
    report.left_out = header["files"]["skipped"]
    return report


def _add(
    source: DataSource,
    texts: Iterator[Document],
    encoder: Encoder,
    lengths: list[int],
    report: DataReport,
    most: int,
    skipped: Counter[str],
) -> bool:
    """Counts documents up to `most` bytes of text; returns whether there are more."""
    n_read, batch = 0, list[Document]()
    for document in texts:
        if is_blank(document):
            skipped["empty documents"] += 1
            continue
        batch.append(document)
        n_read += len(document.encode()) if isinstance(document, str) else len(document)
        if not report.example and not isinstance(document, np.ndarray):
            report.example = _example(document)
        if len(batch) == _DOCUMENTS:
            lengths += _count(source, encoder, batch)
        if n_read >= most:
            break
    lengths += _count(source, encoder, batch)
    return n_read >= most and next(texts, None) is not None


def _count(source: DataSource, encoder: Encoder, batch: list[Document]) -> list[int]:
    """Counts the documents of a batch and clears it; returns their lengths in tokens."""
    encoded = encoder.encode(batch) if batch else []
    batch.clear()
    source.documents += len(encoded)
    source.tokens += sum(map(len, encoded))
    source.learned += sum(int(np.count_nonzero(ids < HIDDEN)) for ids in encoded)
    return [len(ids) for ids in encoded]


def _example(document: str | Marked) -> list[tuple[str, bool]]:
    """The start of a document in pieces, with whether each is trained on."""
    if isinstance(document, str):
        return [(document[:_EXAMPLE_CHARS], True)]
    edges = [0, *(place for span in document.learned for place in span), len(document.text)]
    pieces, left = [], _EXAMPLE_CHARS
    for number, (begin, end) in enumerate(pairwise(edges)):
        if begin < end and left > 0:
            pieces.append((document.text[begin : min(end, begin + left)], number % 2 == 1))
            left -= end - begin
    return pieces
