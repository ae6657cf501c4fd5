"""Packs a stream of tokens into sequences of fixed length ("windows").

A window has T input tokens and T labels (the next tokens), with document boundaries. Window k covers the tokens
[k T, k T + T] of the stream, so each token is a label exactly once; the last window is padded. The first token of a
document is ignored as a label, since nothing precedes it. So are masked tokens, for example everything in a
conversation except the assistant's answers.

Shape suffixes: N windows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aprfmt.errors import RefusedError
from aprfmt.texts.encoding import Int64
from aprfmt.texts.shards import CorpusSplit

IGNORED = -100
"""Label of positions that the loss ignores."""

MIN_ENTROPY = 3.0
"""Minimum entropy of the token histogram in bits. English letters have 4.1, four equally likely tokens 2."""

SHOWN_SHARE, MAX_SHARE, MAX_EMPTY = 0.01, 0.25, 0.9
"""Shares of windows: with faults, to warn about; copies, at most; without labels, at most."""

_LOOK_AT = 50_000_000  # tokens to check, sampled evenly
_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class WindowRows:
    """A batch of windows.

    Attributes:
        tokens_NT: ids, int64.
        labels_NT: the next ids, int64, or IGNORED.
        lengths: lengths of the packed document pieces in each row, in order; they add up to T.
    """

    tokens_NT: Int64
    labels_NT: Int64
    lengths: list[list[int]]


class Windows:
    """All windows of one part, numbered from 0.

    Attributes:
        seq_len: T.
        is_packed: whether any window contains more than one document.
        documents_each: mean number of pieces of documents in a window.
    """

    def __init__(self, part: CorpusSplit, seq_len: int, filler: int) -> None:
        """`filler` is the id for padding. Raises RefusedError if there is nothing to learn."""
        if len(part.tokens) < 2:
            raise RefusedError("the data have fewer than two tokens", hint="add text")
        self._tokens = part.tokens
        self._borders = part.ends
        self._masks = part.masks
        self._masked_before = np.concatenate([[0], (part.masks[:, 1] - part.masks[:, 0]).cumsum()])
        self._filler = filler
        self._n = -(-(len(part.tokens) - 1) // seq_len)
        self.seq_len = seq_len
        inner = int(np.count_nonzero(part.ends % seq_len))
        self.is_packed = inner > 0
        self.documents_each = 1 + inner / self._n

    def __len__(self) -> int:
        return self._n

    def select(self, count: int | None) -> list[int]:
        """Indices of the windows to evaluate: all, or `count` evenly spaced ones."""
        n = len(self) if count is None else min(count, len(self))
        ids: list[int] = np.linspace(0, len(self) - 1, n).astype(int).tolist()
        return ids

    def n_labels(self, ids: Sequence[int]) -> int:
        """Number of labels in these windows that are not ignored; negative ids are empty windows."""
        return int(self.label_counts(np.array([i for i in ids if i >= 0], np.int64)).sum())

    def rows(self, ids: Sequence[int]) -> WindowRows:
        """The windows with these indices; a negative index gives a row without labels."""
        t = self.seq_len
        both = np.full((len(ids), t + 1), self._filler, np.int64)
        labels = np.full((len(ids), t), IGNORED, np.int64)
        lengths = []
        for row, i in enumerate(ids):
            if i < 0:
                lengths.append([t])
                continue
            start = i * t
            piece = self._tokens[start : start + t + 1]
            both[row, : len(piece)] = piece
            labels[row, : len(piece) - 1] = piece[1:]
            # Where documents begin in the window, the end of the stream included.
            first, last = np.searchsorted(self._borders, [start, start + t], side="right")
            borders = self._borders[first:last] - start
            labels[row, borders - 1] = IGNORED
            first = np.searchsorted(self._masks[:, 1], start + 1, "right")
            last = np.searchsorted(self._masks[:, 0], start + t + 1)
            for begin, end in (self._masks[first:last] - start - 1).clip(0, t):
                labels[row, begin:end] = IGNORED
            lengths.append(np.diff(borders[borders < t], prepend=0, append=t).tolist())
        return WindowRows(both[:, :t], labels, lengths)

    def tokens(self, ids: Int64) -> npt.NDArray[np.uint32]:
        """The T + 1 tokens of full windows, [N, T + 1]; the last window, which may be shorter, must be read alone."""
        return np.stack([self._tokens[i * self.seq_len : (i + 1) * self.seq_len + 1] for i in ids.tolist()])

    def label_counts(self, ids: Int64) -> Int64:
        """Number of labels that are not ignored, per window."""
        starts = ids * self.seq_len
        ends = np.minimum(starts + self.seq_len, len(self._tokens) - 1)  # the last label's position
        borders = np.searchsorted(self._borders, ends, "right") - np.searchsorted(self._borders, starts, "right")
        counts: Int64 = ends - starts - borders - self._masked(ends + 1) + self._masked(starts + 1)
        return counts

    def _masked(self, places: Int64) -> Int64:
        """Number of masked tokens before each of these positions."""
        if not len(self._masks):
            return np.zeros_like(places)
        n = np.searchsorted(self._masks[:, 0], places)
        beyond = (self._masks[n - 1, 1] - places).clip(0)  # of the last run that begins before the place
        found: Int64 = self._masked_before[n] - np.where(n > 0, beyond, 0)
        return found


class DocumentSpan(NamedTuple):
    """A piece of a document in a window, as far as its labels go.

    Attributes:
        places_P: positions in the window that have a label.
        labels_P: the labels.
        ids: what is read up to the last of them; the places in it that have a label are places_P minus `start`.
        start: where it begins in the window.
    """

    places_P: Int64
    labels_P: Int64
    ids: list[int]
    start: int

    @property
    def prompt(self) -> list[int]:
        """The tokens whose log-probabilities say all of it: those that are read, and the last label."""
        return [*self.ids, int(self.labels_P[-1])]


def pieces_of(rows: WindowRows, row: int) -> Iterator[DocumentSpan]:
    """The pieces of one window in which there is something to predict."""
    start = 0
    for length in rows.lengths[row]:
        labelled = np.flatnonzero(rows.labels_NT[row, start : start + length] >= 0)
        if len(labelled):
            ids = rows.tokens_NT[row, start : start + int(labelled[-1]) + 1].tolist()
            yield DocumentSpan(labelled + start, rows.labels_NT[row, labelled + start], ids, start)
        start += length


def check_length(seq_len: int, who: str, positions: int | None) -> None:
    """Refuses sequences longer than a model's context length: its predictions are random there."""
    if positions is not None and seq_len > positions:
        raise RefusedError(
            f"sequence length {seq_len} exceeds the context length {positions} of the {who}",
            hint=f"use --seq-len {positions} or less",
        )


def check_windows(windows: Windows, log: Callable[[str], None] = lambda line: None) -> None:
    """Refuses data that cannot be learned from, naming the first example; warns about minor faults.

    Checks the windows once, since every epoch has the same; very large data are sampled evenly.

    Raises:
        RefusedError: more than MAX_SHARE of the windows are copies, or have the input of another one and a different
            last label; more than MAX_EMPTY have no labels; the stream is nearly constant.
    """
    counts = windows.label_counts(np.arange(len(windows)))
    empty = int(np.count_nonzero(counts == 0))
    words = (
        f"{empty} of {len(windows)} sequences have nothing to predict, such as sequence "
        f"{int(np.argmin(counts))}: every label is masked or starts a document"
    )
    _judge(empty / len(windows), words, "use longer documents or answers, or a longer --seq-len", log, MAX_EMPTY)
    n_full = len(windows) - 1  # the last one may be padded
    n_seen = max(1, min(n_full, _LOOK_AT // windows.seq_len))
    ids = np.unique(np.linspace(0, max(0, n_full - 1), n_seen).astype(np.int64))
    _check_entropy(windows, ids)
    if n_full > 1:
        _check_repeats(windows, ids, log)


def _judge(share: float, words: str, hint: str, log: Callable[[str], None], most: float = MAX_SHARE) -> None:
    if share > most:
        raise RefusedError(words, hint=hint)
    if share > SHOWN_SHARE:
        log(f"{share:.1%}: {words}")


def _check_entropy(windows: Windows, ids: Int64) -> None:
    histogram = np.zeros(0, np.int64)
    for some in _in_turns(windows, ids):
        counted = np.bincount(windows.tokens(some).ravel(), minlength=len(histogram))
        counted[: len(histogram)] += histogram
        histogram = counted
    shares = histogram[histogram > 0] / histogram.sum()
    bits = float(-(shares * np.log2(shares)).sum())
    if bits < MIN_ENTROPY:
        most = int(np.argmax(histogram))
        raise RefusedError(
            f"the data are nearly constant: {bits:.2f} bits per token, id {most} is {shares.max():.0%} of all tokens",
            hint=f"normal text has more than {MIN_ENTROPY:g} bits; check the data",
        )


def _check_repeats(windows: Windows, ids: Int64, log: Callable[[str], None]) -> None:
    factors = np.random.default_rng(0).integers(1, 1 << 63, windows.seq_len + 1, np.uint64) * np.uint64(2) + np.uint64(
        1
    )
    inputs, wholes = [], []
    for some in _in_turns(windows, ids):
        products = windows.tokens(some).astype(np.uint64) * factors
        inputs.append(products[:, :-1].sum(1))
        wholes.append(inputs[-1] + products[:, -1])
    seen, first, number = np.unique(np.concatenate(wholes), return_index=True, return_inverse=True)
    copies = len(ids) - len(seen)
    if copies:
        late = int(np.flatnonzero(first[number] != np.arange(len(ids)))[0])
        words = (
            f"{copies} of {len(ids)} sequences are duplicates; the first is sequence {ids[late]}, a copy of sequence "
            f"{ids[first[number[late]]]}"
        )
        _judge(copies / len(ids), words, "deduplicate the data, or add more", log)
    distinct = np.sort(np.concatenate(inputs)[first])
    clashes = int(np.count_nonzero(distinct[1:] == distinct[:-1]))
    if clashes:
        value = distinct[1:][distinct[1:] == distinct[:-1]][0]
        pair = ids[np.flatnonzero(np.concatenate(inputs) == value)]
        words = (
            f"{clashes} of {len(ids)} sequences have the same input as another but a different last label, "
            f"such as sequences {pair[0]} and {pair[-1]}: no model can learn both"
        )
        _judge(clashes / len(ids), words, "use a longer --seq-len, or check the data", log)


def _in_turns(windows: Windows, ids: Int64) -> list[Int64]:
    each = max(1, _AT_ONCE // (windows.seq_len + 1))
    return [ids[start : start + each] for start in range(0, len(ids), each)]
