"""Scores llama.cpp's predictions, and compares two models, position by position."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aprfmt.llama.client import Llama
from aprfmt.llama.engine import BATCH
from aprfmt.types import Array

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Logits = npt.NDArray[np.float32]

_BYTES = 48 << 20
"""Logits in memory at once, per model."""


class Scored(NamedTuple):
    """Values at the positions that have a label [P]; those of another model are None without one.

    Attributes:
        loss: -ln of the probability of the label, in nats.
        hit: whether the label is the top-1 token.
        kl: KL(other, model) in nats.
        agree: whether both have the same top-1 token.
        other_loss: the other model's loss.
        dropped: the other model's probability of ids that are not shared; None if all are.
    """

    loss: Floats
    hit: npt.NDArray[np.bool_]
    kl: Floats | None = None
    agree: npt.NDArray[np.bool_] | None = None
    other_loss: Floats | None = None
    dropped: Floats | None = None


class LogitsReader:
    """Reads the logits of loaded models from files that their workers write.

    Args:
        folder: of scratch files.
        model: the model.
        other: one to compare with.
        n_shared: ids below it are the same in both; probability of further ids of `other`, up to `n_other`, counts as
            dropped.
        n_other: number of ids of `other` that are tokens; None: all.
    """

    def __init__(
        self,
        folder: str,
        model: Llama,
        other: Llama | None = None,
        n_shared: int | None = None,
        n_other: int | None = None,
    ) -> None:
        self._folder = folder
        self._models = [model] if other is None else [model, other]
        self._shared = n_shared if n_shared is not None else min(each.n_vocab for each in self._models)
        self._n_other = n_other if n_other is not None else self._models[-1].n_vocab
        for each in self._models:
            # A worker that lacks some instructions dies here, before a context can be lost.
            each.generate([max(0, each.facts.bos)], 1)

    def logits(self, ids: Sequence[int]) -> Iterator[tuple[int, list[Logits]]]:
        """(position, logits of each model [positions, vocabulary]) for pieces of one text. Raises RunError."""
        import numpy as np

        step = max(1, _BYTES // (4 * max(each.n_vocab for each in self._models)))
        for start in range(0, len(ids), step):
            some = ids[start : start + step]
            rows = []
            for number, each in enumerate(self._models):
                path = os.path.join(self._folder, f"logits-{number}")
                with open(path, "ab") as file:  # overwritten, so that its pages are reused
                    file.truncate(4 * len(some) * each.n_vocab)
                each.logits(some, path, follow=start > 0)
                rows.append(np.fromfile(path, np.float32).reshape(len(some), each.n_vocab))
            yield start, rows

    def after(self, ids: Sequence[int], first: int) -> Iterator[tuple[int, Logits]]:
        """(position, the first model's logits [positions, vocabulary]) from position `first` on. Raises RunError.

        The text is computed in batches as large as llama-perplexity's: kernels round otherwise at the end of a batch.
        """
        import numpy as np

        model, path = self._models[0], os.path.join(self._folder, "logits-0")
        step = max(1, _BYTES // (4 * model.n_vocab))
        for start in range(0, len(ids), BATCH):
            some = ids[start : start + BATCH]
            skip = max(0, first - start)
            model.compute(some, first=skip, follow=start > 0)
            for at in range(skip, len(some), step):
                count = min(step, len(some) - at)
                with open(path, "ab") as file:  # overwritten, so that its pages are reused
                    file.truncate(4 * count * model.n_vocab)
                model.outputs(at, count, path)
                yield start + at, np.fromfile(path, np.float32).reshape(count, model.n_vocab)

    def last(self, ids: Sequence[int]) -> Logits:
        """The first model's logits after one text [vocabulary]. Raises RunError."""
        import numpy as np

        path = os.path.join(self._folder, "last")
        self._models[0].last_logits(ids, path)
        found: Logits = np.fromfile(path, np.float32)
        return found

    def score(self, ids: Sequence[int], labels: Sequence[int] | None = None) -> Scored:
        """The scores of one text; labels below 0 are ignored. Without labels each token is the label of the one before.

        Raises RunError for NaN logits.
        """
        import numpy as np

        wanted = np.array(labels if labels is not None else [*ids[1:], -1], np.int64)
        last = int(np.flatnonzero(wanted >= 0)[-1]) + 1 if (wanted >= 0).any() else 0
        pieces = [
            self._scores(rows, wanted[start : start + len(rows[0])]) for start, rows in self.logits([*ids[:last]])
        ]
        if not pieces:
            return Scored(np.zeros(0), np.zeros(0, np.bool_))
        columns = zip(*pieces, strict=True)
        joined: list[Any] = [None if parts[0] is None else np.concatenate(parts) for parts in columns]
        return Scored(*joined)

    def _scores(self, rows: list[Logits], labels: Array) -> Scored:
        import numpy as np

        places = np.flatnonzero(labels >= 0)
        chosen = labels[places]
        own = rows[0][places].astype(np.float64)
        if len(chosen) and chosen.max() >= own.shape[1]:
            own = np.pad(own, ((0, 0), (0, int(chosen.max()) + 1 - own.shape[1])), constant_values=-np.inf)
        log_sum = _log_sum(own)
        first = own.argmax(1)
        at = np.arange(len(places))
        loss = log_sum - own[at, chosen]
        if len(rows) == 1:
            return Scored(loss, first == chosen)
        n = self._shared
        theirs = rows[1][places].astype(np.float64)
        shared, beyond = theirs[:, :n], theirs[:, n : self._n_other]
        other_sum = _log_sum(shared)
        with np.errstate(invalid="ignore"):
            weighted = np.where(
                np.isneginf(shared), 0.0, np.exp(shared - other_sum[:, None]) * (shared - own[:, :n])
            ).sum(1)
        label = np.where(chosen < n, shared[at, np.minimum(chosen, n - 1)], np.nan)
        dropped = None
        if beyond.shape[1]:
            dropped = 1 / (1 + np.exp(other_sum - _log_sum(beyond)))
        return Scored(
            loss, first == chosen, weighted - other_sum + log_sum, first == shared.argmax(1), other_sum - label, dropped
        )


def _log_sum(rows: Floats) -> Floats:
    import numpy as np

    if not len(rows):
        return np.zeros(0)
    top = rows.max(1)
    total: Floats = top + np.log(np.exp(rows - top[:, None]).sum(1))
    return total
