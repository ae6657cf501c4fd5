"""Row moves: equal to the reshape formula, undone by their inverses, the same on stored blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.arch.transforms import INVERSE, apply_move, move_group
from aprfmt.codecs.convert import encode
from aprfmt.errors import RefusedError


def to_gguf_order(rows: Any, n_heads: int) -> Any:
    """The reordering as a formula over a whole tensor [rows, ...]."""
    return (
        rows.reshape(n_heads, 2, len(rows) // n_heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 40), st.data())
def test_moves_undo_each_other(n_heads: int, half: int, row_bytes: int, data: st.DataObject) -> None:
    raw = data.draw(
        st.binary(min_size=n_heads * 2 * half * row_bytes, max_size=n_heads * 2 * half * row_bytes)
    )
    for move, inverse in INVERSE.items():
        moved = apply_move(move, raw, row_bytes, 2 * half)
        assert len(moved) == len(raw)
        assert apply_move(inverse, moved, row_bytes, 2 * half) == raw


@pytest.mark.parametrize("n_heads", [1, 3, 9])  # 9 query and 3 key heads: grouped-query attention
@pytest.mark.parametrize("shape", [(64, 5), (64, 576), (8,), (64,)])
def test_permute_is_the_formula(n_heads: int, shape: tuple[int, ...]) -> None:
    head_rows = shape[0]
    values = np.random.default_rng(0).standard_normal((n_heads * shape[0], *shape[1:])).astype(np.float32)
    row_bytes = values[0].nbytes
    want = to_gguf_order(values, n_heads)
    assert apply_move("rope_permute", values.tobytes(), row_bytes, head_rows) == want.tobytes()
    assert apply_move("rope_unpermute", want.tobytes(), row_bytes, head_rows) == values.tobytes()


def test_permute_of_one_head_in_words() -> None:
    assert apply_move("rope_permute", bytes([0, 1, 2, 3, 4, 5]), 1, 6) == bytes([0, 3, 1, 4, 2, 5])


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
def test_quantised_rows_move_as_their_values_do(dtype: str) -> None:
    values = np.random.default_rng(1).standard_normal((4 * 16, 96)).astype(np.float32)
    stored = encode(dtype, values)
    moved = apply_move("rope_permute", stored, len(stored) // 64, 16)
    assert moved == encode(dtype, to_gguf_order(values, 4))


def test_chunks_of_whole_heads_move_independently() -> None:
    raw = bytes(range(240))
    whole = apply_move("rope_permute", raw, 3, 8)
    assert (
        b"".join(apply_move("rope_permute", memoryview(raw)[i : i + 48], 3, 8) for i in range(0, 240, 48))
        == whole
    )
    assert apply_move("rope_permute", b"", 3, 8) == b""


@pytest.mark.parametrize(
    ("n_bytes", "row_bytes", "head_rows"), [(10, 1, 4), (12, 1, 3), (12, 0, 4), (12, 1, 0)]
)
def test_broken_heads_are_refused(n_bytes: int, row_bytes: int, head_rows: int) -> None:
    with pytest.raises(RefusedError, match="whole heads"):
        apply_move("rope_permute", bytes(n_bytes), row_bytes, head_rows)


def test_move_group() -> None:
    assert move_group("rope_permute", 576, 9) == 64
    for n_rows, n_heads in ((577, 9), (576, 0), (9, 9), (64, -1)):
        with pytest.raises(RefusedError, match="heads"):
            move_group("rope_permute", n_rows, n_heads)
