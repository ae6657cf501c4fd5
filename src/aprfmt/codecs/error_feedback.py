"""GPTQ's error feedback (Frantar et al., arXiv 2210.17323).

Columns are rounded one by one, and the columns that are not rounded yet make up for the error of each, as far as the
second moments of the inputs tell.

Scales are fixed before. So the columns with the largest inputs can be rounded first without storing an order
(act-order), and codes keep their layout. Second moments come in square blocks along the diagonal: the error of a column
reaches the columns of its block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aprfmt.types import Array

_DAMPING = 0.01
"""Added to the diagonal, as a part of its mean."""
_LAZY = 64
"""Columns whose errors reach later columns together, by one matrix product."""


@dataclass(frozen=True, slots=True)
class FeedbackBlock:
    """Columns that make up for the errors of each other.

    Attributes:
        columns: their indices in the order in which they are rounded.
        factor: float32 [columns, columns], the upper Cholesky factor of the inverse second moments, in that order.
    """

    columns: Array
    factor: Array


def feedback_blocks(moments: Sequence[Array]) -> list[FeedbackBlock]:
    """Prepares the second moments of neighbouring columns, [n, n] each and finite, for `with_feedback`.

    Columns without inputs neither pass on errors nor make up for them.
    """
    import numpy as np

    blocks, first = [], 0
    for block in moments:
        squares = block.astype("f8")
        diagonal = squares.diagonal()
        order = np.argsort(-diagonal, kind="stable")
        mean = float(diagonal.mean())
        squares = squares[np.ix_(order, order)]
        squares[np.diag_indices_from(squares)] += _DAMPING * mean if mean > 0 else 1.0
        # From the last column to the first, the lower factor of the matrix is the inverse of what is wanted.
        lower = np.linalg.cholesky(squares[::-1, ::-1])
        factor = np.triu(np.linalg.inv(lower[::-1, ::-1]))
        blocks.append(FeedbackBlock(first + order, np.ascontiguousarray(factor, "f4")))
        first += len(block)
    return blocks


def with_feedback(values: Array, blocks: Sequence[FeedbackBlock], stored: Callable[[int, Array], Array]) -> Array:
    """What to round to nearest instead of `values`, float32 [rows, columns].

    Args:
        values: rows of the weight.
        blocks: for all columns.
        stored: the values that readers see of a column, given its index and what is rounded to nearest, float32 [rows].
    """
    import numpy as np

    found = values.copy()
    for block in blocks:
        rest = np.ascontiguousarray(values[:, block.columns].T)  # [columns, rows], in the order of rounding
        errors = np.empty((_LAZY, rest.shape[1]), "f4")
        for start in range(0, len(rest), _LAZY):
            stop = min(start + _LAZY, len(rest))
            for i in range(start, stop):
                row = block.factor[i]
                error = (rest[i] - stored(int(block.columns[i]), rest[i])) / row[i]
                rest[i + 1 : stop] -= row[i + 1 : stop, None] * error
                errors[i - start] = error
            rest[stop:] -= block.factor[start:stop, stop:].T @ errors[: stop - start]
        found[:, block.columns] = rest.T
    return found
