"""Tensors of a tower's GGUF that are computed."""

from __future__ import annotations

from functools import partial

import pytest

from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.canonical.derived_tensors import MADE, Sources
from aprfmt.canonical.row_mapping import BufferedTensor
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.errors import RefusedError
from aprfmt.types import Array

np = pytest.importorskip("numpy")


def _grid(positions: Array, side: int) -> Array | None:
    data = positions.astype("<f4").tobytes()
    source = BufferedTensor("positions", "F32", tuple(positions.shape), partial(list, (data,)))
    sources = Sources({"positions": CanonicalTensor("positions", (source,))}, Hyperparams(extra={"side": side}))
    return MADE["grid"](sources, ["positions", "side"])


def _plane(side: int) -> Array:
    """Positions that grow evenly in both directions, from corner to corner the same whatever the side."""
    places = np.linspace(0, 12, side)
    plane: Array = (places[:, None] * 3 + places[None, :]).reshape(1, side * side, 1)
    return plane


def test_positions_are_shrunk_with_their_corners_in_place() -> None:
    np.testing.assert_allclose(_grid(_plane(7), 4), _plane(4), rtol=1e-6)
    np.testing.assert_allclose(_grid(_plane(4), 5), _plane(5), rtol=1e-6)


def test_positions_of_the_right_size_stay() -> None:
    positions = np.random.default_rng(0).normal(size=(1, 16, 3)).astype(np.float32)
    np.testing.assert_array_equal(_grid(positions, 4), positions)


def test_positions_that_are_no_square_are_refused() -> None:
    with pytest.raises(RefusedError, match="15 positions are not a square grid"):
        _grid(np.zeros((1, 15, 3)), 4)
