"""Sequences of fixed length ("windows"), packed with documents by `packing`.

A window has T input tokens and T labels (the next tokens), with document boundaries, and is padded at its end. Each
token of a text is a label once, except the first, which nothing precedes. Masked tokens are ignored as labels, for
example everything in a conversation except the assistant's answers.

Shape suffixes: N windows, T positions, P pieces of documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from aprfmt.errors import RefusedError
from aprfmt.texts.encoding import Int64
from aprfmt.texts.packing import MAX_PADDING, Pieces, pack
from aprfmt.texts.shards import CorpusSplit

IGNORED = -100
"""Label of positions that the loss ignores."""

MIN_ENTROPY = 3.0
"""Minimum entropy of the token histogram in bits. English letters have 4.1, four equally likely tokens 2."""

SHOWN_SHARE, MAX_SHARE, MAX_DROPPED = 0.01, 0.25, 0.9
"""Warning thresholds: fraction of faulty windows, maximum fraction of copies, and of dropped labels."""

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
        sources: number of the first window of each weighted source, and, last, the number of windows.
        is_packed: whether any window contains more than one document.
        documents_each: mean number of pieces of documents in a window.
        padding: share of the positions that are padding.
        n_cuts: pieces that begin inside a document that is longer than a window, or was cut to fill one.
        n_dropped: labels beyond `seq_len` in long conversations, which are not trained on.
    """

    def __init__(self, part: CorpusSplit, seq_len: int, filler: int) -> None:
        """`filler` is the padding id. Raises RefusedError if all labels are masked."""
        if len(part.tokens) < 2:
            raise RefusedError("the data has fewer than two tokens", hint="add text")
        self._tokens, self._begin, self._filler = part.tokens, part.begin, filler
        self._masks = part.masks
        self._masked_before = np.concatenate([[0], (part.masks[:, 1] - part.masks[:, 0]).cumsum()])
        packing = pack(part, seq_len)
        self._pieces, self._first_N = packing.pieces, packing.first_N
        self.seq_len, self.sources = seq_len, packing.sources
        n_pieces, n = len(self._pieces.sizes_P), len(self)
        if not n:
            raise RefusedError(
                f"no document has a token to predict among its first {seq_len + 1}",
                hint="use longer texts, conversations with answers, or a longer --seq-len",
            )
        self._used_N = np.add.reduceat(self._pieces.sizes_P, self._first_N[:-1])
        labels_P = self._labels(self._pieces.starts_P + 1, self._pieces.sizes_P - self._pieces.begins_P)
        self._labels_N = np.add.reduceat(labels_P, self._first_N[:-1])
        starts = part.starts
        self.n_dropped = int(self._labels(starts + 1, part.ends - starts - 1).sum() - labels_P.sum())
        self.n_cuts = int(np.count_nonzero(np.isin(self._pieces.starts_P, starts, invert=True)))
        self.padding = 1 - int(self._used_N.sum()) / (n * seq_len)
        self.is_packed = n_pieces > n
        self.documents_each = (n_pieces + int(np.count_nonzero(self._used_N < seq_len))) / n

    def __len__(self) -> int:
        return len(self._first_N) - 1

    def select(self, count: int | None) -> list[int]:
        """Indices of the windows to evaluate: all, or `count` evenly spaced ones."""
        n = len(self) if count is None else min(count, len(self))
        ids: list[int] = np.linspace(0, len(self) - 1, n).astype(int).tolist()
        return ids

    def n_labels(self, ids: Sequence[int]) -> int:
        """Number of labels in these windows that are not ignored; negative ids are empty windows."""
        return int(self.label_counts(np.array([i for i in ids if i >= 0], np.int64)).sum())

    def label_counts(self, ids: Int64) -> Int64:
        """Number of labels that are not ignored, per window."""
        counts: Int64 = self._labels_N[ids]
        return counts

    def used(self, ids: Int64) -> Int64:
        """Number of positions of each window that are not padding."""
        counts: Int64 = self._used_N[ids]
        return counts

    def rows(self, ids: Sequence[int]) -> WindowRows:
        """The windows with these indices; a negative index gives a row without labels."""
        t = self.seq_len
        tokens = np.full((len(ids), t), self._filler, np.int64)
        labels = np.full((len(ids), t), IGNORED, np.int64)
        lengths: list[list[int]] = []
        for row, i in enumerate(ids):
            at, sizes = 0, list[int]()
            for piece in range(*self._first_N[i : i + 2].tolist()) if i >= 0 else ():
                size = int(self._pieces.sizes_P[piece])
                self._read(piece, tokens[row, at : at + size], labels[row, at : at + size])
                sizes.append(size)
                at += size
            lengths.append([*sizes, t - at] if at < t else sizes)
        return WindowRows(tokens, labels, lengths)

    def pieces(self, i: int) -> Iterator[tuple[int, int, bool]]:
        """Of each piece of a window: position in the stream, positions in the window, whether BOS precedes it."""
        some = slice(*self._first_N[i : i + 2].tolist())
        columns = (getattr(self._pieces, name)[some].tolist() for name in Pieces.__slots__)
        yield from zip(*columns, strict=True)

    def _read(self, piece: int, tokens_T: Int64, labels_T: Int64) -> None:
        """Reads one piece into its positions."""
        start = int(self._pieces.starts_P[piece])
        if self._pieces.begins_P[piece]:
            assert self._begin is not None, "packed with BOS"
            tokens_T[0] = self._begin
            tokens_T, labels_T = tokens_T[1:], labels_T[1:]
        n = len(tokens_T)
        read = self._tokens[start : start + n + 1]
        tokens_T[:], labels_T[:] = read[:-1], read[1:]
        first = np.searchsorted(self._masks[:, 1], start + 1, "right")
        last = np.searchsorted(self._masks[:, 0], start + n + 1)
        for begin, end in (self._masks[first:last] - start - 1).clip(0, n):
            labels_T[begin:end] = IGNORED

    def _labels(self, starts: Int64, counts: Int64) -> Int64:
        """Number of tokens that are not masked among `counts` tokens from each start."""
        return counts - self._masked(starts + counts) + self._masked(starts)

    def _masked(self, places: Int64) -> Int64:
        """Number of masked tokens before each of these positions."""
        if not len(self._masks):
            return np.zeros_like(places)
        n = np.searchsorted(self._masks[:, 0], places)
        beyond = (self._masks[n - 1, 1] - places).clip(0)  # of the last run that begins before the position
        found: Int64 = self._masked_before[n] - np.where(n > 0, beyond, 0)
        return found


class DocumentSpan(NamedTuple):
    """A piece of a document in a window, up to its last label.

    Attributes:
        places_P: positions in the window that have a label.
        labels_P: the labels.
        ids: the input up to the last label; its labelled positions are places_P minus `start`.
        start: its first position in the window.
    """

    places_P: Int64
    labels_P: Int64
    ids: list[int]
    start: int

    @property
    def prompt(self) -> list[int]:
        """A prompt whose log-probabilities cover the piece: the input and the last label."""
        return [*self.ids, int(self.labels_P[-1])]


def pieces_of(rows: WindowRows, row: int) -> Iterator[DocumentSpan]:
    """The pieces of a window that contain labels."""
    start = 0
    for length in rows.lengths[row]:
        labelled = np.flatnonzero(rows.labels_NT[row, start : start + length] >= 0)
        if len(labelled):
            ids = rows.tokens_NT[row, start : start + int(labelled[-1]) + 1].tolist()
            yield DocumentSpan(labelled + start, rows.labels_NT[row, labelled + start], ids, start)
        start += length


def check_length(seq_len: int, who: str, positions: int | None) -> None:
    """Refuses sequences longer than the model's context length: its predictions are random there."""
    if positions is not None and seq_len > positions:
        raise RefusedError(
            f"sequence length {seq_len} exceeds the context length {positions} of the {who}",
            hint=f"use --seq-len {positions} or less",
        )


def check_windows(windows: Windows, log: Callable[[str], None] = lambda line: None) -> None:
    """Refuses unusable training data, citing the first example; warns about minor faults.

    Checks the windows once, since every epoch has the same; very large data is sampled evenly.

    Raises:
        RefusedError: more than MAX_SHARE of the windows are copies, or have the input of another one and a different
            last label; more than MAX_DROPPED of the labels are beyond a window; the data is nearly constant.
    """
    t, n = windows.seq_len, len(windows)
    if windows.n_dropped:
        n_labels = windows.n_dropped + int(windows.label_counts(np.arange(n)).sum())
        words = f"{windows.n_dropped:,} of {n_labels:,} labels are beyond the first {t} tokens of their conversation"
        hint = "use a longer --seq-len, or shorter prompts"
        if windows.n_dropped > MAX_DROPPED * n_labels:
            raise RefusedError(words, hint=hint)
        log(f"{words} and are not trained on; {hint}")
    if windows.padding > MAX_PADDING and n > 1:
        log(f"{windows.padding:.1%} of the positions are padding: few documents fit together into {t} tokens")
    ids = np.unique(np.linspace(0, n - 1, max(1, min(n, _LOOK_AT // t))).astype(np.int64))
    _check_entropy(windows, ids)
    if n > 1:
        _check_repeats(windows, ids, log)


def _judge(share: float, words: str, hint: str, log: Callable[[str], None]) -> None:
    if share > MAX_SHARE:
        raise RefusedError(words, hint=hint)
    if share > SHOWN_SHARE:
        log(f"{share:.1%}: {words}")


def _check_entropy(windows: Windows, ids: Int64) -> None:
    histogram = np.zeros(0, np.int64)
    for some in _in_turns(windows, ids):
        rows = windows.rows(some.tolist())
        is_used = np.arange(windows.seq_len) < windows.used(some)[:, None]
        counted = np.bincount(rows.tokens_NT[is_used], minlength=len(histogram))
        counted[: len(histogram)] += histogram
        histogram = counted
    shares = histogram[histogram > 0] / histogram.sum()
    bits = float(-(shares * np.log2(shares)).sum())
    if bits < MIN_ENTROPY:
        most = int(np.argmax(histogram))
        raise RefusedError(
            f"the data is nearly constant: {bits:.2f} bits per token, id {most} is {shares.max():.0%} of all tokens",
            hint=f"normal text has more than {MIN_ENTROPY:g} bits; check the data",
        )


def _check_repeats(windows: Windows, ids: Int64, log: Callable[[str], None]) -> None:
    odd = np.random.default_rng(0).integers(1, 1 << 63, windows.seq_len + 1, np.uint64) * np.uint64(2) + np.uint64(1)
    inputs, wholes = [], []
    for some in _in_turns(windows, ids):
        rows = windows.rows(some.tolist())
        inputs.append((rows.tokens_NT.astype(np.uint64) * odd[:-1]).sum(1))
        wholes.append(inputs[-1] + rows.labels_NT[:, -1].astype(np.uint64) * odd[-1])
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
