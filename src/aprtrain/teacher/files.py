"""Targets of a batch from teacher files.

Shape suffixes: P labelled positions, K ids known of each, R temperatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aprfmt.errors import CorruptError, RefusedError
from aprfmt.formats.teacher_files import AGAIN, Answer, Places, TeacherFiles
from aprfmt.types import Array
from aprtrain.loss.topk import TopK
from aprtrain.world import copy_to


class TopKTargets(NamedTuple):
    """A batch's labelled positions: their places in the flattened batch [P], what is known, the label's logprob."""

    index_P: Tensor
    top: TopK
    label_P: Tensor

    def to(self, device: torch.device) -> TopKTargets:
        """Moves the targets to a device; copies to a GPU are asynchronous."""
        moved = partial(copy_to, device=device)
        return TopKTargets(moved(self.index_P), TopK(*map(moved, self.top)), moved(self.label_P))


class TeacherTargets:
    """Reads the saved top-k log-probabilities of one part of the data, by sequence."""

    def __init__(
        self, files: TeacherFiles, places: Places, n_ids: int, k: int | None = None, temperature: float = 1.0
    ) -> None:
        """`places` as `bind` gives them; `n_ids` that the student has; the first `k` ids of each position are used."""
        self._places = places
        self._n_ids = n_ids
        self._k = k or files.facts.k
        self._seq_len = files.facts.seq_len
        self._temperature = temperature
        self._column = files.facts.temperatures.index(temperature)

    def __call__(self, windows: Sequence[int]) -> TopKTargets:
        """The targets of a batch of these windows; negative ones are empty. Raises as Shard.read, RefusedError."""
        found: list[tuple[Array, ...]] = []
        for row, window in enumerate(windows):
            if window < 0:
                continue
            shard, number = self._places.at[window]
            a = shard.read(number)
            if not np.array_equal(a.positions_P, np.flatnonzero(self._places.windows.rows([window]).labels_NT >= 0)):
                raise CorruptError(
                    f"sequence {number} of the file: its positions do not match the labels", path=shard.path, hint=AGAIN
                )
            if a.ids_PK.size and int(a.ids_PK.max()) >= self._n_ids:
                raise RefusedError(
                    f"teacher id {int(a.ids_PK.max())} exceeds the student's {self._n_ids}", path=shard.path
                )
            rest = self._residual(a, self._temperature, self._column), self._residual(a, 1.0, 0)
            index = a.positions_P.astype(np.int64) + row * self._seq_len
            ids, logprobs = a.ids_PK[:, : self._k].astype(np.int64), a.logprobs_PK[:, : self._k]
            found.append((index, ids, logprobs, *rest, a.label_P))
        none, no_ids = np.zeros(0, np.float32), np.zeros((0, self._k))
        found.append((none.astype(np.int64), no_ids.astype(np.int64), no_ids.astype(np.float32), none, none, none))
        columns = [torch.from_numpy(np.concatenate(column)) for column in zip(*found, strict=True)]
        return TopKTargets(columns[0], TopK(*columns[1:5]), columns[5])

    def _residual(self, a: Answer, temperature: float, column: int) -> Array:
        """The mass of all ids behind the first k, float32."""
        rest = a.residual_PR[:, column].astype(np.float64).clip(0, 1)
        if self._k < a.ids_PK.shape[1]:
            p_PK = np.exp((a.logprobs_PK - a.logprobs_PK[:, :1]).astype(np.float64) / temperature)
            rest += (1 - rest) * p_PK[:, self._k :].sum(1) / p_PK.sum(1)
        return rest.astype(np.float32)
