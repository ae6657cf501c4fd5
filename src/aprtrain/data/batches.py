"""Batches of windows: the order of training, and the rows of a step.

Window number `i` of an epoch is a function of (seed, epoch, i), so the position in the data is one integer: the number
of windows taken so far. A step takes the same windows for any number of processes; each one gets a contiguous part.

Shape suffixes: N rows, T positions, P unmasked labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from aprfmt.errors import RefusedError, UsageError
from aprfmt.text import plural
from aprfmt.texts.sequences import IGNORED, Windows
from aprfmt.texts.shards import Corpus
from aprtrain.network.attention import Documents
from aprtrain.world import copy_to

_NEARLY_ALL = 7 / 8  # of the labels: fewer are gathered
_ROUNDS = 6
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step, on the CPU until `to`.

    Attributes:
        tokens_NT: token ids, int64.
        labels_NT: the next ids, int64; -100 is ignored.
        documents: the documents in the rows; None if every row is part of one document.
        windows: number of each row's window; -1 for rows that fill up the last batch of the data.
        n_valid: number of unmasked labels of the whole step, over all processes and micro-batches.
        kept_P: int64 indices of the unmasked labels in the flattened rows; None if nearly all are unmasked.
    """

    tokens_NT: Tensor
    labels_NT: Tensor
    documents: Documents | None
    windows: tuple[int, ...]
    n_valid: int
    kept_P: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Moves the batch to a device; copies to a GPU from pinned memory are asynchronous."""
        device = torch.device(device)
        moved = partial(copy_to, device=device)
        documents = self.documents
        if documents is not None:
            documents = Documents(moved(documents.cu_seqlens), documents.max_len)
        kept_P = None if self.kept_P is None else moved(self.kept_P)
        tokens_NT, labels_NT = moved(self.tokens_NT), moved(self.labels_NT)
        return replace(self, tokens_NT=tokens_NT, labels_NT=labels_NT, documents=documents, kept_P=kept_P)


@dataclass(frozen=True, slots=True)
class Share:
    """A source of a mixture: its windows, starting at `first`, and its fraction of all windows taken."""

    name: str
    first: int
    n: int
    weight: Fraction


def shares_of(corpus: Corpus, windows: Windows) -> list[Share]:
    """The sources of the training data with their windows. Raises RefusedError for a source that fills no window."""
    found = []
    for source, (first, last) in zip(corpus.header.get("sources", []), pairwise(windows.sources), strict=False):
        check_source(source["name"], source["tokens"], windows.seq_len)
        found.append(Share(source["name"], first, last - first, Fraction(source["weight"])))
    return found


@dataclass
class Batches:
    """Iterates over steps: each one is the list of this process's micro-batches.

    Attributes:
        windows: the training data.
        sequences_per_step: rows of the global batch.
        windows_per_micro: maximum number of rows per micro-batch.
        seed: of the order.
        rank, world: rank of this process, and number of processes.
        shares: the sources of a mixture; each position of the order belongs to one of them, for any batch size and
            number of processes.
        epochs: number of passes over the data, for a mixture over the source that is used up first; None: repeat
            indefinitely.
        cursor: windows taken so far by the whole run; pass it in to resume.
        log: called with a line at the start of each epoch.
        n_steps: number of steps until the data ends; None if it repeats indefinitely.

    Raises:
        UsageError: the processes cannot share a step evenly.
    """

    windows: Windows
    _: KW_ONLY
    sequences_per_step: int
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
        check_shared(self.sequences_per_step, self.world, self.windows.seq_len)
        self.shares = self.shares or [Share("", 0, len(self.windows), Fraction(1))]
        self._end: int | None = None
        if self.epochs is not None:
            self._end = int(min(share.n * self.epochs / share.weight for share in self.shares))
        self.n_steps = None if self._end is None else -(-self._end // self.sequences_per_step)

    def check(self, n_steps: int) -> None:
        """Refuses a run of `n_steps` steps for which the data is too short. Raises RefusedError."""
        if self.n_steps is not None and n_steps > self.n_steps:
            t, needed = self.windows.seq_len, n_steps * self.sequences_per_step
            scarce = max(self.shares, key=lambda share: share.weight / share.n)
            needed, available = int(needed * scarce.weight), scarce.n
            whose = f" of {scarce.name}" if scarce.name else ""
            raise RefusedError(
                f"{n_steps} steps need {needed * t} tokens{whose}, but the data has {available * t} in {available} "
                f"sequences: {needed / available:.1f} epochs",
                hint=more_data_hint(-(-needed // available), available * t // n_steps, t),
            )

    def ends_epochs(self, step: int, each: int | None) -> bool:
        """Whether update `step` (from 1) completes another `each` passes over the data."""
        n = (self._end // self.epochs if self._end and self.epochs else len(self.windows)) * (each or 0)
        return n > 0 and step > 0 and step * self.sequences_per_step // n > (step - 1) * self.sequences_per_step // n

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The next step. Raises RefusedError at the end of the data: a run must not end there unnoticed."""
        ids = self.skip()
        n_valid = self.windows.n_labels(ids)
        return [batch_of(self.windows, some, n_valid=n_valid) for some in self._shared(ids)]

    def skip(self) -> list[int]:
        """Takes the next step without its batches: the windows of all processes. Raises as `__next__`."""
        ids = self._ids(self.cursor)
        self._announce(self.cursor)
        self.cursor += self.sequences_per_step
        return ids

    def _shared(self, ids: list[int]) -> list[list[int]]:
        """This process's windows of a step, by micro-batch."""
        share = self.sequences_per_step // self.world
        mine = ids[self.rank * share : (self.rank + 1) * share]
        return [mine[i : i + self.windows_per_micro] for i in range(0, len(mine), self.windows_per_micro)]

    def _ids(self, cursor: int) -> list[int]:
        end = self._end
        if end is not None and cursor >= end:
            raise RefusedError(
                f"the data ends after {self.epochs} epochs of {end // (self.epochs or 1)} sequences",
                hint="add data, lower --steps, raise --epochs or use --repeat",
            )
        places = range(cursor, cursor + self.sequences_per_step)
        return [self._window(i) if end is None or i < end else -1 for i in places]

    def _window(self, place: int) -> int:
        """Index of the window at a position in the order of the whole run."""
        before, after = self._taken(place), self._taken(place + 1)
        number = next(k for k, n in enumerate(before) if after[k] > n)
        share, taken = self.shares[number], before[number]
        return share.first + shuffle_index(taken % share.n, share.n, self.seed + number, taken // share.n)

    def _taken(self, places: int) -> list[int]:
        """How many of the first positions belong to each source: within one of its exact share."""
        found, rest = [], Fraction(1)
        for share in self.shares[:-1]:
            part = share.weight / rest
            found.append(places * part.numerator // part.denominator)
            places, rest = places - found[-1], rest - share.weight
        return [*found, places]

    def _announce(self, cursor: int) -> None:
        ends = zip(self._taken(cursor), self._taken(cursor + self.sequences_per_step), strict=True)
        for share, (begin, end) in zip(self.shares, ends, strict=True):
            first, last = -(-begin // share.n) + 1, -(-end // share.n)
            if self.epochs is not None:
                last = min(last, self.epochs)
            if first <= last:
                begun = f"epoch {first}" if first == last else f"epochs {first} to {last}"
                total = "" if self.epochs is None else f" of {self.epochs}"
                of = f" of {share.name}" if share.name else ""
                self.log(f"{begun}{total}: {plural(share.n, 'sequence')}{of}, reshuffled")


def more_data_hint(epochs: int, tokens_per_step: int, seq_len: int) -> str:
    """What to type where the data is too small: passes over it, or steps of at most `tokens_per_step` tokens."""
    smaller = tokens_per_step // seq_len * seq_len
    or_smaller = f", --tokens-per-step {smaller}" if smaller else ""
    return f"use --epochs {epochs}{or_smaller} or --repeat, lower --steps, or add data"


def check_source(name: str, n_tokens: int, seq_len: int) -> None:
    """Raises RefusedError for a source of a mixture that cannot fill a window."""
    if n_tokens < seq_len:
        raise RefusedError(
            f"{name} has {n_tokens} tokens, fewer than a sequence of {seq_len}",
            hint="add text to it, or drop it; duplicates count for the first source that has them",
        )


def check_shared(sequences_per_step: int, processes: int, seq_len: int) -> None:
    """Raises UsageError for a step that cannot be divided evenly among the processes."""
    if sequences_per_step % processes:
        raise UsageError(
            f"{sequences_per_step} sequences per step do not divide over {processes} processes",
            hint=f"set --tokens-per-step to a multiple of {processes * seq_len}",
        )


def batch_of(windows: Windows, ids: Sequence[int], *, n_valid: int | None = None) -> Batch:
    """The windows with these indices as a batch; `n_valid` is computed if not given."""
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
        tuple(ids),
        windows.n_labels(ids) if n_valid is None else n_valid,
        torch.from_numpy(kept_P) if len(kept_P) < _NEARLY_ALL * rows.labels_NT.size else None,
    )


def shuffle_index(i: int, n: int, seed: int, epoch: int) -> int:
    """The index at position `i` of a shuffled epoch: a permutation of [0, n) without a table.

    A Feistel network over the next even number of bits, iterated until the result is below n (Black and Rogaway,
    Ciphers with Arbitrary Finite Domains, 2002, §3).
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
