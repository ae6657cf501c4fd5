"""From a stream of tokens to batches: windows, the order in which they are seen, and the rows of a step.

A window is T tokens and the T tokens behind each of them, with the borders of documents. Window k holds the tokens
[k T, k T + T] of the stream, so each token is a label once and none is lost; the last window is filled up. A label
that begins a new document is ignored: nothing before it tells what it will be. So is one that the data say is not to
be learned, as of a conversation whatever the assistant does not say.

Window number `i` of an epoch is a function of (seed, epoch, i), so the place in the data is one integer: how many
windows the run has taken. A step takes the same windows whatever the number of processes; each one gets a stretch.

Shape suffixes: N windows or rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from aprfmt.errors import RefusedError, UsageError
from aprtrain.data.corpus import Corpus, Part
from aprtrain.loss import IGNORED

if TYPE_CHECKING:  # windows are read without torch too
    import torch
    from torch import Tensor

    from aprtrain.network.attention import Documents

MIN_ENTROPY = 3.0
"""Bits of the histogram of tokens. English by letters has 4.1, four letters at random have 2."""

SHOWN_SHARE, MAX_SHARE, MAX_EMPTY = 0.01, 0.25, 0.9
"""Of windows: what is said, how many may repeat another one, how many may have nothing to learn."""

_NEARLY_ALL = 7 / 8
_LOOK_AT = 50_000_000  # tokens that the check reads, spread evenly
_AT_ONCE = 1 << 22

_ROUNDS = 6
_MASK = (1 << 64) - 1

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
            first = np.searchsorted(self._masks[:, 1], start + 1, "right")
            last = np.searchsorted(self._masks[:, 0], start + t + 1)
            for begin, end in (self._masks[first:last] - start - 1).clip(0, t):
                labels[row, begin:end] = IGNORED
            lengths.append(np.diff(borders[borders < t], prepend=0, append=t).tolist())
        return Rows(both[:, :t], labels, lengths)

    def tokens(self, ids: Int64) -> npt.NDArray[np.uint32]:
        """The T + 1 tokens of whole windows [N, T + 1]; of the last one, alone, what there is."""
        return np.stack([self._tokens[i * self.seq_len : (i + 1) * self.seq_len + 1] for i in ids.tolist()])

    def label_counts(self, ids: Int64) -> Int64:
        """How many labels count, of each window."""
        starts = ids * self.seq_len
        ends = np.minimum(starts + self.seq_len, len(self._tokens) - 1)  # the last label's position
        borders = np.searchsorted(self._borders, ends, "right") - np.searchsorted(self._borders, starts, "right")
        counts: Int64 = ends - starts - borders - self._masked(ends + 1) + self._masked(starts + 1)
        return counts

    def _masked(self, places: Int64) -> Int64:
        """How many tokens before each of these places are not to be learned."""
        if not len(self._masks):
            return np.zeros_like(places)
        n = np.searchsorted(self._masks[:, 0], places)
        beyond = (self._masks[n - 1, 1] - places).clip(0)  # of the last run that begins before the place
        found: Int64 = self._masked_before[n] - np.where(n > 0, beyond, 0)
        return found


def check_length(seq_len: int, who: str, positions: int | None) -> None:
    """Refuses windows longer than the contexts that a model was made for: its predictions are random there."""
    if positions is not None and seq_len > positions:
        raise RefusedError(
            f"windows of {seq_len} tokens exceed the {positions} that the {who} was made for",
            hint=f"give --seq-len {positions} or less",
        )


def check_windows(windows: Windows, log: Callable[[str], None] = lambda line: None) -> None:
    """Refuses data that nothing can be learned from, with the first example; says what little is wrong with others.

    Looked at once, as every epoch has the same windows; of very large data at an even selection.

    Raises:
        RefusedError: more than MAX_SHARE of the windows repeat another one, or have the same input as another one and
            a different last label; more than MAX_EMPTY have no label; a nearly constant stream.
    """
    counts = windows.label_counts(np.arange(len(windows)))
    empty = int(np.count_nonzero(counts == 0))
    words = (
        f"{empty} of {len(windows)} windows have nothing to predict, such as window {int(np.argmin(counts))}: no token "
        "in it is learned behind another one of its document"
    )
    _judge(empty / len(windows), words, "give longer documents or answers, or a longer --seq-len", log, MAX_EMPTY)
    n_full = len(windows) - 1  # the last one may be filled up
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
            f"the data are nearly constant: {bits:.2f} bits a token, id {most} is {shares.max():.0%} of them",
            hint=f"text has more than {MIN_ENTROPY:g}; look at what was read",
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
            f"{copies} of {len(ids)} windows are copies; the first is window {ids[late]}, a copy of window "
            f"{ids[first[number[late]]]}"
        )
        _judge(copies / len(ids), words, "remove copies from the data, or give more of it", log)
    distinct = np.sort(np.concatenate(inputs)[first])
    clashes = int(np.count_nonzero(distinct[1:] == distinct[:-1]))
    if clashes:
        value = distinct[1:][distinct[1:] == distinct[:-1]][0]
        pair = ids[np.flatnonzero(np.concatenate(inputs) == value)]
        words = (
            f"{clashes} of {len(ids)} windows have another one's input and a different last label, such as windows "
            f"{pair[0]} and {pair[-1]}: no model can learn both"
        )
        _judge(clashes / len(ids), words, "use a longer --seq-len, or look at what was read", log)


def _in_turns(windows: Windows, ids: Int64) -> list[Int64]:
    each = max(1, _AT_ONCE // (windows.seq_len + 1))
    return [ids[start : start + each] for start in range(0, len(ids), each)]


# --- batches ---


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step, on the CPU until `to`.

    Attributes:
        tokens_NT: ids, int64.
        labels_NT: the next ids, int64; -100 counts for nothing.
        documents: the pieces of documents in the rows; None when every row is a piece of one document.
        index: windows that the run had taken before this step: the cursor that makes the same batch again.
        windows: number of each row's window; -1 for rows that only fill the last batch of the data.
        n_valid: labels that count in the whole step, all processes and micro-batches together.
        kept_P: int64 places of the labels that count in the flattened rows; None where nearly all do.
    """

    tokens_NT: Tensor
    labels_NT: Tensor
    documents: Documents | None
    index: int
    windows: tuple[int, ...]
    n_valid: int
    kept_P: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same on a device; copies to a GPU from pinned memory do not wait."""
        import torch

        from aprtrain.network.attention import Documents

        device = torch.device(device)

        def moved(x: Tensor) -> Tensor:
            return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)

        documents = self.documents
        if documents is not None:
            documents = Documents(moved(documents.cu_seqlens), documents.max_len)
        kept_P = None if self.kept_P is None else moved(self.kept_P)
        tokens_NT, labels_NT = moved(self.tokens_NT), moved(self.labels_NT)
        return replace(self, tokens_NT=tokens_NT, labels_NT=labels_NT, documents=documents, kept_P=kept_P)


@dataclass(frozen=True, slots=True)
class Share:
    """What a source of a mixture is: windows from `first` on, and which share of all that are taken are from it."""

    name: str
    first: int
    n: int
    weight: Fraction


def shares_of(corpus: Corpus, windows: Windows) -> list[Share]:
    """The sources of the training part by their windows; one in which two sources meet is of the former.

    Raises RefusedError for a source with less than a window.
    """
    found, begin, end = [], 0, 0
    for source in corpus.header.get("sources", []):
        end += source["tokens"]
        last = min(len(windows), -(-end // windows.seq_len))
        if last <= begin:
            raise RefusedError(
                f"{source['name']} holds {source['tokens']} tokens, less than a window of {windows.seq_len}",
                hint="give more of it, or leave it out; what a source before it holds too counts there",
            )
        found.append(Share(source["name"], begin, last - begin, Fraction(source["weight"])))
        begin = last
    return found


@dataclass
class Batches:
    """Iterator over steps: each one is the list of this process's micro-batches.

    Attributes:
        windows: what is trained on.
        windows_per_step: rows of the global batch.
        windows_per_micro: most rows of a micro-batch.
        seed: of the order.
        rank, world: this process and how many there are.
        shares: the sources of a mixture; a place in the order is of one of them whatever the step and the process.
        epochs: how often every window is seen, of a mixture those of the source that is used up first; None repeats
            without end.
        cursor: windows taken so far by the whole run; pass it in to continue from there.
        log: takes a line at the beginning of each epoch.
        n_steps: steps from the first window to the end of the data, None when they are repeated without end.

    Raises:
        UsageError: a step that the processes cannot share evenly.
    """

    windows: Windows
    _: KW_ONLY
    windows_per_step: int
    windows_per_micro: int
    seed: int
    shares: Sequence[Share] = ()
    rank: int = 0
    world: int = 1
    epochs: int | None = 1
    cursor: int = 0
    log: Callable[[str], None] = lambda line: None
    n_steps: int | None = field(init=False)

    def __post_init__(self) -> None:
        check_shared(self.windows_per_step, self.world, self.windows.seq_len)
        self.shares = self.shares or [Share("", 0, len(self.windows), Fraction(1))]
        self._end: int | None = None
        if self.epochs is not None:
            self._end = int(min(share.n * self.epochs / share.weight for share in self.shares))
        self.n_steps = None if self._end is None else -(-self._end // self.windows_per_step)

    def check(self, n_steps: int) -> None:
        """Refuses a run of `n_steps` steps that the data do not last for. Raises RefusedError."""
        if self.n_steps is not None and n_steps > self.n_steps:
            t, needed = self.windows.seq_len, n_steps * self.windows_per_step
            scarce = max(self.shares, key=lambda share: share.weight / share.n)
            needed, available = int(needed * scarce.weight), scarce.n
            whose = f" of {scarce.name}" if scarce.name else ""
            raise RefusedError(
                f"{n_steps} steps need {needed * t} tokens{whose}, the data hold {available * t} in {available} "
                f"windows: {needed / available:.1f} epochs",
                hint=f"give more data, fewer --steps, --epochs {-(-needed // available)} or --repeat",
            )

    def ends_epochs(self, step: int, each: int | None) -> bool:
        """Whether update `step` (the first is 1) ends the `each`-th pass over the data, the next so many, ..."""
        n = (self._end // self.epochs if self._end and self.epochs else len(self.windows)) * (each or 0)
        return n > 0 and step > 0 and step * self.windows_per_step // n > (step - 1) * self.windows_per_step // n

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The next step. Raises RefusedError at the end of the data: a run must not end there unnoticed."""
        ids = self._ids(self.cursor)
        n_valid = self.windows.n_labels(ids)
        step = [batch_of(self.windows, some, index=self.cursor, n_valid=n_valid) for some in self._shared(ids)]
        self._announce(self.cursor)
        self.cursor += self.windows_per_step
        return step

    def _shared(self, ids: list[int]) -> list[list[int]]:
        """This process's windows of a step, by micro-batch."""
        share = self.windows_per_step // self.world
        mine = ids[self.rank * share : (self.rank + 1) * share]
        return [mine[i : i + self.windows_per_micro] for i in range(0, len(mine), self.windows_per_micro)]

    def _ids(self, cursor: int) -> list[int]:
        end = self._end
        if end is not None and cursor >= end:
            raise RefusedError(
                f"the data are used up after {self.epochs} epochs of {end // (self.epochs or 1)} windows",
                hint="give more data, fewer --steps, more --epochs or --repeat",
            )
        places = range(cursor, cursor + self.windows_per_step)
        return [self._window(i) if end is None or i < end else -1 for i in places]

    def _window(self, place: int) -> int:
        """The number of the window at a place in the order of the whole run."""
        before, after = self._taken(place), self._taken(place + 1)
        number = next(k for k, n in enumerate(before) if after[k] > n)
        share, taken = self.shares[number], before[number]
        return share.first + shuffle_index(taken % share.n, share.n, self.seed + number, taken // share.n)

    def _taken(self, places: int) -> list[int]:
        """How many of so many first places are of each source: never a whole one off its weight."""
        found, rest = [], Fraction(1)
        for share in self.shares[:-1]:
            part = share.weight / rest
            found.append(places * part.numerator // part.denominator)
            places, rest = places - found[-1], rest - share.weight
        return [*found, places]

    def _announce(self, cursor: int) -> None:
        ends = zip(self._taken(cursor), self._taken(cursor + self.windows_per_step), strict=True)
        for share, (begin, end) in zip(self.shares, ends, strict=True):
            for epoch in range(-(-begin // share.n), -(-end // share.n)):
                if self.epochs is None or epoch < self.epochs:
                    total = "" if self.epochs is None else f" of {self.epochs}"
                    of = f" of {share.name}" if share.name else ""
                    self.log(f"epoch {epoch + 1}{total}: {share.n} windows{of} in a new order")


def check_shared(windows_per_step: int, processes: int, seq_len: int) -> None:
    """Raises UsageError for a step that the processes cannot share evenly."""
    if windows_per_step % processes:
        raise UsageError(
            f"{windows_per_step} windows a step cannot be shared evenly by {processes} processes",
            hint=f"choose --tokens-per-step as a multiple of {processes * seq_len}",
        )


def batch_of(windows: Windows, ids: Sequence[int], *, index: int = 0, n_valid: int | None = None) -> Batch:
    """The windows of these numbers as a batch; `n_valid` is counted when not given."""
    import torch

    from aprtrain.network.attention import Documents

    rows = windows.rows(ids)
    documents = None
    if windows.is_packed:
        lengths = [length for row in rows.lengths for length in row]
        usual = _power_of_two(int(2 * windows.documents_each * len(ids)) + 1)
        documents = Documents.of(lengths, windows.seq_len, capacity=max(usual, _power_of_two(len(lengths))))
    kept_P = np.flatnonzero(rows.labels_NT != IGNORED)
    return Batch(
        torch.from_numpy(rows.tokens_NT.copy()),
        torch.from_numpy(rows.labels_NT),
        documents,
        index,
        tuple(ids),
        windows.n_labels(ids) if n_valid is None else n_valid,
        torch.from_numpy(kept_P) if len(kept_P) < _NEARLY_ALL * rows.labels_NT.size else None,
    )


def shuffle_index(i: int, n: int, seed: int, epoch: int) -> int:
    """Where place `i` of an epoch's order points to: a permutation of [0, n) without a table.

    A Feistel network over the next even number of bits, walked until it lands below n (Black and Rogaway, Ciphers
    with Arbitrary Finite Domains, 2002, §3).
    """
    bits = max(1, (max(1, n - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    keys = [_mixed(_mixed(_mixed(seed) ^ epoch) + r) for r in range(_ROUNDS)]
    while True:
        left, right = i >> bits, i & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        i = left << bits | right
        if i < n:
            return i


def _mixed(x: int) -> int:
    """64 well mixed bits (the finaliser of SplitMix64; Steele, Lea and Flood, 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
