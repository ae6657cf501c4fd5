"""Evaluation results, and the text that a model is scored on, for all engines."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from aprfmt.errors import CorruptError, RunError, UsageError
from aprfmt.texts.encoding import Ids
from aprfmt.texts.records import TEXT_FIELD, Chat, Document, Log, Marked, ReadProgress, RecordReader, is_blank
from aprfmt.texts.sequences import check_length
from aprfmt.texts.shards import CorpusSplit, open_corpus, part_of
from aprfmt.texts.sources import HEADER, check_text_field, list_files

SEQ_LEN = 2048
"""Default sequence length, unless a model supports less."""

_DOCUMENTS = 256  # tokenised at a time
_DIVERGED = 700  # nats; e to their power overflows
_ROUNDING = 1e-4  # nats; a KL further below zero is not rounding


class TextEncoder(Protocol):
    """Encodes documents, as `Encoder` does."""

    separator: int
    begin: int | None
    digest: str

    def encode(self, documents: list[Document]) -> list[Ids]:
        """Ids of each document, with begin and end tokens."""

    def render(self, chat: Chat) -> Marked:
        """Renders a conversation."""


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """One of the models of an evaluation; `format` is None if no file was read."""

    file: str
    format: str | None
    architecture: str
    parameters: int


@dataclass(frozen=True, slots=True)
class Evaluation(EvaluatedModel):
    """How well a model predicts text, and how close it is to its teacher.

    Attributes:
        teacher: the model it was compared with; if None, `teacher_ce`, `kl` and `agreement` are None too.
        data: the path of the text, with `documents` documents of `data_tokens` tokens in total.
        left_out: reason -> number of skipped documents.
        device, dtype: device and dtype of the computation.
        windows, seq_len, tokens: number of sequences, their length, and number of predicted tokens.
        ce, perplexity: cross entropy in nats per token, and its exponential.
        accuracy: fraction of tokens that are the model's top-1 prediction.
        teacher_ce: cross entropy of the teacher.
        kl: KL(teacher || model) in nats per token.
        agreement: fraction of positions with the same top-1 token.
        dropped_mass: probability that the teacher assigns to tokens that the model lacks.
        seconds: wall time of the evaluation.
    """

    teacher: EvaluatedModel | None
    data: str
    documents: int
    data_tokens: int
    left_out: dict[str, int]
    device: str
    dtype: str
    seq_len: int
    windows: int
    tokens: int
    ce: float
    perplexity: float
    accuracy: float
    kl: float | None
    agreement: float | None
    teacher_ce: float | None
    dropped_mass: float | None
    seconds: float

    def to_json(self) -> dict[str, object]:
        """The object of `apr eval --json`; `window` and `stride` in tokens, all positions of a window are scored."""
        return asdict(self) | {"window": self.seq_len, "stride": self.seq_len, "scored_from": 0}


@dataclass(frozen=True, slots=True)
class Scores:
    """Means over the labels of the sequences that were read.

    Attributes:
        windows, tokens: number of sequences and labels.
        ce: cross entropy in nats.
        perplexity: e to the power of ce.
        accuracy: fraction of labels that are the model's top-1 token.
        kl: KL(teacher, student) in nats at temperature 1; None without a teacher, like the rest.
        agreement: fraction of positions with the same top-1 token.
        teacher_ce: the teacher's cross entropy in nats.
        dropped_mass: the teacher's probability of tokens that only it has; None if there are none.
    """

    windows: int
    tokens: int
    ce: float
    perplexity: float
    accuracy: float
    kl: float | None = None
    agreement: float | None = None
    teacher_ce: float | None = None
    dropped_mass: float | None = None


@contextmanager
def scoring() -> Iterator[None]:
    """Turns any failure in the block into RunError: without a result, no score."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        reason, hint = str(error) or type(error).__name__, getattr(error, "hint", None)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(error, torch.OutOfMemoryError):
            hint = "process fewer tokens at a time: smaller --micro-tokens, or with apr eval smaller --seq-len"
        raise RunError(f"the evaluation failed, no score: {reason}", hint=hint) from error


def sequence_length(seq_len: int | None, limit: int | None, made_for: Mapping[str, int]) -> int:
    """Sequence length for models with these context lengths.

    Raises RefusedError if it is longer than one of them, UsageError for a limit below one sequence.
    """
    length = seq_len or min(SEQ_LEN, min(made_for.values(), default=SEQ_LEN))
    for who, positions in made_for.items():
        check_length(length, who, positions)
    if limit is not None and limit < length:
        raise UsageError(
            f"--limit {limit} is less than one sequence of {length} tokens",
            hint="raise --limit, or use a smaller --seq-len",
        )
    return length


def check_data(data: Path) -> None:
    """Raises as `list_files` if there are no such data: to call before a model is exported."""
    if not (data / HEADER).is_file():
        list_files([data], Counter())


def read_part(
    data: Path | Sequence[Path], encoder: TextEncoder, skipped: Counter[str], log: Log, text_field: str = TEXT_FIELD
) -> CorpusSplit:
    """The documents of a file or folder, or of several; of token shards, the held-out ones.

    `skipped` counts skipped ones by reason. Raises UsageError if `text_field` is absent.
    """
    paths = [data] if isinstance(data, Path) else [*data]
    is_shards = len(paths) == 1 and (paths[0] / HEADER).is_file()
    files = [] if is_shards else list_files(paths, skipped)
    if text_field != TEXT_FIELD:
        check_text_field(files, text_field)
    if is_shards:
        return open_corpus(paths[0], encoder.digest).held_out
    reader = RecordReader(
        separator=encoder.separator, render=encoder.render, text_field=text_field, skipped=skipped, log=log
    )  # fmt: skip
    progress = ReadProgress(sum(file.size for file in files), log)
    documents = (document for file in files for document in progress.documents(file, reader) if not is_blank(document))
    ids: list[Ids] = []
    while some := list(islice(documents, _DOCUMENTS)):
        with scoring():
            ids += encoder.encode(some)
    if bad := ", ".join(f"{n} {what}" for what, n in (+skipped).items() if not ids):
        raise CorruptError(
            f"no documents; skipped: {bad}", path=paths[0],
            hint=f"a record needs the field {text_field!r} or messages; --text-field sets another field",
        )  # fmt: skip
    return part_of(ids, encoder.begin)


def scores_of(n_windows: int, count: int, sums: list[float], with_teacher: bool, has_dropped: bool) -> Scores:
    """The means of `count` labels, from six sums in the order of Scores. Raises RunError unless they are finite."""
    if not count:
        raise RunError("no score: the texts contain no token to predict", hint="use longer held-out texts")
    ce, accuracy, kl, agreement, teacher_ce, dropped = (value / count for value in sums)
    if not all(map(math.isfinite, (ce, kl, teacher_ce))):
        raise RunError(
            f"the evaluation is not finite: cross entropy {ce}, KL {kl}, the teacher's cross entropy {teacher_ce}",
            hint="the weights are damaged, or token ids of the data exceed the head's rows",
        )
    if ce > _DIVERGED:
        raise RunError(
            f"the cross entropy is {ce:.0f} nats: the model has diverged, no score",
            hint="in a training run: restart with a lower --lr or --clip 1",
        )
    if kl < -_ROUNDING:
        raise RunError(f"the KL to the teacher is {kl:g} nats, which is impossible: no score")
    mass = dropped if has_dropped else None
    compared = (max(kl, 0.0), agreement, teacher_ce, mass) if with_teacher else ()
    return Scores(n_windows, count, ce, math.exp(ce), accuracy, *compared)
