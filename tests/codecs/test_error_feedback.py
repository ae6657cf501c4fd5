"""Error feedback against its formula, one value at a time."""

from __future__ import annotations

import numpy as np
import pytest

from aprfmt.codecs.error_feedback import feedback_blocks, with_feedback
from aprfmt.types import Array


def rounded(values: Array) -> Array:
    return np.asarray(np.clip(np.rint(values), -8, 7))


def by_formula(row: Array, moments: Array) -> Array:
    """What is rounded, column by column: each error over the inverse of what is left moves the others (OBQ)."""
    squares = moments.astype("f8")
    squares[np.diag_indices_from(squares)] += 0.01 * squares.diagonal().mean()
    left, row, found = [*np.argsort(-moments.diagonal(), kind="stable")], row.astype("f8"), row.astype("f8")
    while left:
        inverse = np.linalg.inv(squares[np.ix_(left, left)])
        column = left[0]
        found[column] = row[column]
        error = (row[column] - rounded(row[column])) / inverse[0, 0]
        row[left] -= error * inverse[0]
        left = left[1:]
    return found


def test_codes_are_those_of_the_formula() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((400, 20)) @ rng.standard_normal((20, 100)) + 0.5 * rng.standard_normal((400, 100))
    moments = (inputs.T @ inputs).astype("f4")
    values = (3 * rng.standard_normal((4, 100))).astype("f4")
    blocks = feedback_blocks([moments[:80, :80], moments[80:, 80:]])
    found = with_feedback(values, blocks, lambda column, rows: rounded(rows))
    for row, own in zip(values, found, strict=True):
        wanted = np.r_[by_formula(row[:80], moments[:80, :80]), by_formula(row[80:], moments[80:, 80:])]
        assert np.allclose(own, wanted, atol=1e-3)
        change, alone = row - rounded(own), row - rounded(row)
        assert change @ moments @ change < 0.5 * (alone @ moments @ alone)


@pytest.mark.parametrize("moments", [np.eye(8), np.zeros((8, 8)), np.diag([0.0, *np.ones(7)])])
def test_without_correlation_each_value_is_rounded_alone(moments: Array) -> None:
    values = np.linspace(-3.3, 3.2, 16, dtype="f4").reshape(2, 8)
    found = with_feedback(values, feedback_blocks([moments]), lambda column, rows: rounded(rows))
    assert np.array_equal(found, values)
