"""The order in which windows are seen, and the batches made of them.

Window number `i` of an epoch is a function of (seed, epoch, i), so the place in the data is one integer: how many
windows the run has taken. A step takes the same windows whatever the number of processes; each one gets a stretch.

Shape suffixes: N rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from aprfmt.errors import RefusedError, UsageError
from aprtrain.data.packing import Windows
from aprtrain.network.attention import Documents

_ROUNDS = 6
_MASK = (1 << 64) - 1


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
    """

    tokens_NT: Tensor
    labels_NT: Tensor
    documents: Documents | None
    index: int
    windows: tuple[int, ...]
    n_valid: int

    def to(self, device: torch.device | str) -> Batch:
        """The same on a device; copies to a GPU from pinned memory do not wait."""
        device = torch.device(device)

        def moved(x: Tensor) -> Tensor:
            return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)

        documents = self.documents
        if documents is not None:
            documents = Documents(moved(documents.cu_seqlens), documents.max_len)
        return Batch(
            moved(self.tokens_NT), moved(self.labels_NT), documents, self.index, self.windows, self.n_valid
        )


class Batches:
    """Iterator over steps: each one is the list of this process's micro-batches.

    Attributes:
        cursor: windows taken so far by the whole run; pass it in to continue from there.
        n_steps: steps from the first window to the end of the data, None when they are repeated without end.
    """

    def __init__(
        self,
        windows: Windows,
        *,
        windows_per_step: int,
        windows_per_micro: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        epochs: int | None = 1,
        cursor: int = 0,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Places an iterator over `windows`.

        Args:
            windows: what is trained on.
            windows_per_step: rows of the global batch.
            windows_per_micro: most rows of a micro-batch.
            seed: of the order.
            rank, world: this process and how many there are.
            epochs: how often every window is seen; None repeats without end.
            cursor: where to continue.
            log: takes a line at the beginning of each epoch.

        Raises:
            UsageError: a step that the processes cannot share evenly.
        """
        if windows_per_step % world:
            raise UsageError(
                f"{windows_per_step} windows a step cannot be shared evenly by {world} processes",
                hint=f"choose --tokens-per-step as a multiple of {world * windows.seq_len}",
            )
        self._windows = windows
        self._per_step = windows_per_step
        self._per_micro = windows_per_micro
        self._seed = seed
        share = windows_per_step // world
        self._mine = slice(rank * share, (rank + 1) * share)
        self._epochs = epochs
        self._log = log
        self.cursor = cursor
        self.n_steps = None if epochs is None else -(-len(windows) * epochs // windows_per_step)

    def check(self, n_steps: int) -> None:
        """Refuses a run of `n_steps` steps that the data do not last for. Raises RefusedError."""
        if self.n_steps is not None and n_steps > self.n_steps:
            t = self._windows.seq_len
            needed, available = n_steps * self._per_step, len(self._windows)
            raise RefusedError(
                f"{n_steps} steps need {needed * t} tokens, the data hold {available * t} in {available} windows: "
                f"{needed / available:.1f} epochs",
                hint=f"give more data, fewer --steps, --epochs {-(-needed // available)} or --repeat",
            )

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The next step. Raises RefusedError at the end of the data: a run must not end there unnoticed."""
        ids = self._ids(self.cursor)
        n_valid = self._windows.n_labels(ids)
        step = [
            batch_of(self._windows, some, index=self.cursor, n_valid=n_valid) for some in self._shared(ids)
        ]
        self._announce(self.cursor)
        self.cursor += self._per_step
        return step

    def upcoming(self) -> Iterator[tuple[int, ...]]:
        """The windows of this process's micro-batches from here to the end of the data; the cursor stays."""
        steps: Iterable[int] = count(self.cursor, self._per_step)
        if self._epochs is not None:
            steps = range(self.cursor, len(self._windows) * self._epochs, self._per_step)
        return (tuple(some) for cursor in steps for some in self._shared(self._ids(cursor)))

    def windows_until(self, n_steps: int) -> Iterator[int]:
        """The windows of all processes from here to the end of step `n_steps`; -1 for rows that only fill."""
        steps = range(self.cursor, n_steps * self._per_step, self._per_step)
        return (window for cursor in steps for window in self._ids(cursor))

    def _shared(self, ids: list[int]) -> list[list[int]]:
        """This process's windows of a step, by micro-batch."""
        mine = ids[self._mine]
        return [mine[i : i + self._per_micro] for i in range(0, len(mine), self._per_micro)]

    def _ids(self, cursor: int) -> list[int]:
        n = len(self._windows)
        end = None if self._epochs is None else n * self._epochs
        if end is not None and cursor >= end:
            raise RefusedError(
                f"the data are used up after {self._epochs} epochs of {n} windows",
                hint="give more data, fewer --steps, more --epochs or --repeat",
            )
        places = range(cursor, cursor + self._per_step)
        return [shuffle_index(i % n, n, self._seed, i // n) if end is None or i < end else -1 for i in places]

    def _announce(self, cursor: int) -> None:
        n = len(self._windows)
        for epoch in range(-(-cursor // n), -(-(cursor + self._per_step) // n)):
            if self._epochs is None or epoch < self._epochs:
                total = "" if self._epochs is None else f" of {self._epochs}"
                self._log(f"epoch {epoch + 1}{total}: {n} windows in a new order")


def batch_of(windows: Windows, ids: Sequence[int], *, index: int = 0, n_valid: int | None = None) -> Batch:
    """The windows of these numbers as a batch; `n_valid` is counted when not given."""
    rows = windows.rows(ids)
    documents = None
    if windows.is_packed:
        lengths = [length for row in rows.lengths for length in row]
        usual = _power_of_two(int(2 * windows.documents_each * len(ids)) + 1)
        documents = Documents.of(lengths, windows.seq_len, capacity=max(usual, _power_of_two(len(lengths))))
    return Batch(
        torch.from_numpy(rows.tokens_NT.copy()),
        torch.from_numpy(rows.labels_NT),
        documents,
        index,
        tuple(ids),
        windows.n_labels(ids) if n_valid is None else n_valid,
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
