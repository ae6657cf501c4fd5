"""Second moments of the inputs of weights: sums of x xᵀ over all tokens, in square blocks on disk.

The memory is that of one block, whatever the model.
"""

from __future__ import annotations

import os

import numpy as np

from aprfmt.llama.engine import MOMENT_COLUMNS
from aprfmt.types import Array


class MomentSums:
    """Sums of the outer products of inputs, in files of a folder.

    Args:
        folder: where each block of each input has a file of float32: INPUT.BLOCK.

    Attributes:
        inputs: by the name of a weight, [number of its input, columns]; weights of one input share its number.
        rows: tokens by number of the input.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.inputs: dict[str, tuple[int, int]] = {}
        self.rows: list[int] = []

    def add(self, name: str, values: Array, same_as: str | None) -> None:
        """Adds the inputs of a weight, float32 [tokens, columns]; `same_as` is a weight whose inputs they are, too."""
        if same_as is not None:
            self.inputs.setdefault(name, self.inputs[same_as])
            return
        if name not in self.inputs:
            self.inputs[name] = len(self.rows), values.shape[1]
            self.rows.append(0)
        number = self.inputs[name][0]
        self.rows[number] += len(values)
        for block, first in enumerate(range(0, values.shape[1], MOMENT_COLUMNS)):
            part = values[:, first : first + MOMENT_COLUMNS]
            sums = part.T @ part
            path = os.path.join(self._folder, f"{number}.{block}")
            if os.path.exists(path):
                sums += np.fromfile(path, "<f4").reshape(sums.shape)
            sums.astype("<f4", copy=False).tofile(path)
