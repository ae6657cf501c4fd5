"""Windows of a token stream: T tokens and the T tokens behind each of them, with the borders of documents.

Window k holds the tokens [k T, k T + T] of the stream, so each token is a label once and none is lost; the last
window is filled up. A label that begins a new document is ignored: nothing before it tells what it will be.

Shape suffixes: N windows, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aprfmt.errors import RefusedError
from aprtrain.data.shards import Part
from aprtrain.loss.objective import IGNORED

MIN_ENTROPY = 3.0
"""Bits of the histogram of tokens. English by letters has 4.1, four letters at random have 2."""

MAX_SHARE = 0.01
"""Of windows that repeat another one."""

_LOOK_AT = 50_000_000  # tokens that the check reads, spread evenly
_AT_ONCE = 1 << 22

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Some windows side by side.

    Attributes:
        tokens_NT: ids, int64.
        labels_NT: the next ids, int64, IGNORED where there is none to learn.
        lengths: of the documents' pieces in each row, in order; they add up to T.
    """

    tokens_NT: Int64
    labels_NT: Int64
    lengths: list[list[int]]


class Windows:
    """All windows of one part, numbered from 0.

    Attributes:
        seq_len: T.
        is_packed: whether some window holds pieces of more than one document.
        documents_each: mean number of pieces of documents in a window.
    """

    def __init__(self, part: Part, seq_len: int, filler: int) -> None:
        """`filler` is the id behind the end of the stream. Raises RefusedError (nothing to learn)."""
        if len(part.tokens) < 2:
            raise RefusedError("the data hold fewer than two tokens", hint="give more text")
        self._tokens = part.tokens
        self._borders = part.ends
        self._filler = filler
        self._n = -(-(len(part.tokens) - 1) // seq_len)
        self.seq_len = seq_len
        inner = int(np.count_nonzero(part.ends % seq_len))
        self.is_packed = inner > 0
        self.documents_each = 1 + inner / self._n

    def __len__(self) -> int:
        return self._n

    def select(self, count: int | None) -> list[int]:
        """The windows that an evaluation reads: all, or an even selection of `count`."""
        n = len(self) if count is None else min(count, len(self))
        ids: list[int] = np.linspace(0, len(self) - 1, n).astype(int).tolist()
        return ids

    def n_labels(self, ids: Sequence[int]) -> int:
        """How many labels of these windows count; negative ids are empty windows."""
        return int(self.label_counts(np.array([i for i in ids if i >= 0], np.int64)).sum())

    def rows(self, ids: Sequence[int]) -> Rows:
        """The windows of these numbers; a negative one gives a row without labels."""
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
            lengths.append(np.diff(borders[borders < t], prepend=0, append=t).tolist())
        return Rows(both[:, :t], labels, lengths)

    def tokens(self, ids: Int64) -> npt.NDArray[np.uint32]:
        """The T + 1 tokens of whole windows [N, T + 1]; of the last one, alone, what there is."""
        return np.stack([self._tokens[i * self.seq_len : (i + 1) * self.seq_len + 1] for i in ids.tolist()])

    def label_counts(self, ids: Int64) -> Int64:
        """How many labels count, of each window."""
        starts = ids * self.seq_len
        ends = np.minimum(starts + self.seq_len, len(self._tokens) - 1)  # the last label's position
        borders = np.searchsorted(self._borders, ends, "right") - np.searchsorted(
            self._borders, starts, "right"
        )
        counts: Int64 = ends - starts - borders
        return counts


def check_windows(windows: Windows) -> None:
    """Refuses data that nothing can be learned from, with the first example.

    Looked at once, as every epoch has the same windows; of very large data at an even selection.

    Raises:
        RefusedError: windows without a label, a nearly constant stream, windows that repeat, or that have the same
            input and different last labels.
    """
    counts = windows.label_counts(np.arange(len(windows)))
    if not counts.all():
        raise RefusedError(
            f"window {int(np.argmin(counts))} of {len(windows)} has nothing to predict: every token in it begins "
            "a document",
            hint="give longer documents",
        )
    n_full = len(windows) - 1  # the last one may be filled up
    n_seen = max(1, min(n_full, _LOOK_AT // windows.seq_len))
    ids = np.unique(np.linspace(0, max(0, n_full - 1), n_seen).astype(np.int64))
    _check_entropy(windows, ids)
    if n_full > 1:
        _check_repeats(windows, ids)


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
            f"the data are nearly constant: {bits:.2f} bits a token, id {most} is {shares.max():.0%} of them",
            hint=f"text has more than {MIN_ENTROPY:g}; look at what was read",
        )


def _check_repeats(windows: Windows, ids: Int64) -> None:
    factors = np.random.default_rng(0).integers(1, 1 << 63, windows.seq_len + 1, np.uint64) * np.uint64(
        2
    ) + np.uint64(1)
    inputs, wholes = [], []
    for some in _in_turns(windows, ids):
        products = windows.tokens(some).astype(np.uint64) * factors
        inputs.append(products[:, :-1].sum(1))
        wholes.append(inputs[-1] + products[:, -1])
    seen, first, number = np.unique(np.concatenate(wholes), return_index=True, return_inverse=True)
    copies = len(ids) - len(seen)
    if copies > MAX_SHARE * len(ids):
        late = next(i for i in range(len(ids)) if first[number[i]] != i)
        raise RefusedError(
            f"{copies} of {len(ids)} windows are copies; the first is window {ids[late]}, a copy of window "
            f"{ids[first[number[late]]]}",
            hint="remove copies from the data, or give more of it",
        )
    distinct = np.sort(np.concatenate(inputs)[first])
    clashes = int(np.count_nonzero(distinct[1:] == distinct[:-1]))
    if clashes > MAX_SHARE * len(ids):
        value = distinct[1:][distinct[1:] == distinct[:-1]][0]
        pair = ids[np.flatnonzero(np.concatenate(inputs) == value)]
        raise RefusedError(
            f"{clashes} of {len(ids)} windows have another one's input and a different last label, such as windows "
            f"{pair[0]} and {pair[-1]}: no model can learn both",
            hint="use a longer --seq-len, or look at what was read",
        )


def _in_turns(windows: Windows, ids: Int64) -> list[Int64]:
    each = max(1, _AT_ONCE // (windows.seq_len + 1))
    return [ids[start : start + each] for start in range(0, len(ids), each)]
