"""Row orders and value maps: equal to their formulas, undone by their inverses, refused where rows do not divide."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.arch.grammar import evaluate, parse_order
from aprfmt.arch.orders import VALUES, Order, check_order, check_value_map, indices, map_values
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import RefusedError

small = st.integers(1, 5)
swaps = st.tuples(small, small, small, small).map(lambda a: (("swap", a[:3]), a[0] * a[1] * a[2] * a[3]))
deals = st.lists(small, min_size=2, max_size=6).map(lambda a: (("deal", tuple(a)), a[0] * sum(a[1:])))
tails = st.tuples(st.integers(0, 7), small, small, small, small).map(
    lambda a: (("tail", a[:4]), a[0] + a[1] * a[2] * a[3] * a[4])
)

turns = st.tuples(small, st.integers(0, 3), small, small).map(
    lambda a: (("each", (a[0], a[1] + a[2] * a[3], a[2], a[3])), a[0] * (a[1] + a[2] * a[3]))
)
parts = st.permutations(range(5)).flatmap(lambda a: st.tuples(st.just(("parts", tuple(a))), small.map(lambda n: 5 * n)))


@given(st.one_of(swaps, deals, tails, turns, parts))
def test_an_order_is_a_permutation_that_its_inverse_undoes(case: tuple[Order, int]) -> None:
    order, n_rows = case
    check_order(order, n_rows)
    there, back = indices([order], n_rows), indices([order], n_rows, inverse=True)
    assert sorted(there) == list(range(n_rows))
    assert (there[back] == np.arange(n_rows)).all()
    assert (back[there] == np.arange(n_rows)).all()


@given(st.lists(st.sampled_from([("swap", (2, 2, 3)), ("deal", (2, 2, 4)), ("tail", (4, 1, 2, 4))]), max_size=4))
def test_orders_in_turn(orders: list[Order]) -> None:
    rows = np.arange(12) * 10
    want = rows
    for order in orders:
        want = want[indices([order], 12)]
    assert (rows[indices(orders, 12)] == want).all()
    assert (want[indices(orders, 12, inverse=True)] == rows).all()


def test_llama_heads_go_from_halves_to_neighbours() -> None:
    assert indices([("swap", (1, 2, 3))], 6).tolist() == [0, 3, 1, 4, 2, 5]
    assert indices([("swap", (2, 2, 2))], 8).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_fused_heads_are_dealt_out() -> None:
    # two groups of two queries, a key and a value, as Falcon stores them
    assert indices([("deal", (2, 2, 1, 1))], 8).tolist() == [0, 1, 4, 5, 2, 6, 3, 7]
    # interleaved gate and up
    assert indices([("deal", (3, 1, 1))], 6).tolist() == [0, 2, 4, 1, 3, 5]


def test_shared_heads_become_neighbours() -> None:
    # Plamo's key-value head k serves each head h with h % 5 == k, llama.cpp's the heads 8k to 8k + 7
    row = next(row for row in ARCHITECTURES["plamo"].tensors if row.gguf == ("blk.{n}.attn_q.weight",))
    name, sizes = parse_order(row.order[0])
    numbers = tuple(evaluate(size, {"heads": 40, "n_shared_head": 8}) or 0 for size in sizes)
    assert [head % 5 for head in indices([(name, numbers)], 40)] == [head // 8 for head in range(40)]


def test_a_tail_leaves_the_first_rows() -> None:
    assert indices([("tail", (2, 1, 2, 2))], 6).tolist() == [0, 1, 2, 4, 3, 5]


def test_a_part_of_each_group_is_turned() -> None:
    # two heads of six of which four values are rotated: their halves become neighbours
    assert indices([("each", (2, 6, 2, 2))], 12).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    # Runs of two rows: those of the second half between those of the first.
    assert indices([("each", (1, 9, 2, 2, 2))], 9).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8]


def test_parts_change_places() -> None:
    # mixes of r, k, v, w, g as llama.cpp's RWKV 6 has them: w, k, v, r, g
    assert indices([("parts", (3, 1, 2, 0, 4))], 10).tolist() == [6, 7, 2, 3, 4, 5, 0, 1, 8, 9]


@pytest.mark.parametrize(
    ("order", "n_rows"),
    [
        (("swap", (2, 2, 2)), 9), (("swap", (0, 2, 2)), 8), (("swap", (2, 2)), 8), (("deal", (2, 1, 1)), 6),
        (("deal", (3,)), 3), (("tail", (9, 1, 1, 2)), 8), (("tail", (1, 1, 2, 2)), 8), (("turn", (1,)), 1),
        (("swap", (-1, -2, 4)), 8), (("deal", ()), 0), (("each", (2, 4, 1, 5)), 8), (("each", (2, 4, 2, 2)), 16),
        (("each", (1, 4, 2, 2, 2)), 4),
        (("parts", (1, 0)), 3), (("parts", (1, 1)), 4), (("parts", (0, 2)), 4), (("parts", (0,)), 1),
    ],
)  # fmt: skip
def test_rows_that_do_not_divide_are_refused(order: Order, n_rows: int) -> None:
    with pytest.raises(RefusedError):
        indices([order], n_rows)


def test_value_maps() -> None:
    values = np.array([-1.5, -0.25, 0.0, 0.5, 3.0], np.float32)
    for name, want in (("plus_one", values + 1), ("minus_exp", -np.exp(values))):
        there, back = VALUES[name]
        assert there(values).dtype == np.float32
        assert np.allclose(there(values), want, rtol=1e-7)
        assert np.allclose(back(there(values)), values, atol=1e-6)


def test_value_maps_with_a_number() -> None:
    values, rows = np.array([[1.0, -2.0], [0.5, 3.0], [4.0, 0.0]], np.float32), np.array([0, 3, 5])
    turned = map_values("mirror:4", values, rows)  # rows 2, 3, 6, 7, ... are second halves
    assert turned.tolist() == [[1.0, -2.0], [-0.5, -3.0], [4.0, 0.0]]
    assert (map_values("mirror:4", turned, rows, inverse=True) == values).all()


@pytest.mark.parametrize("value", ["times:2", "mirror:", "mirror:0", "mirror:-4", "plus:1", "x"])
def test_what_is_no_value_map(value: str) -> None:
    with pytest.raises(ValueError, match=r"value map|could not convert"):
        check_value_map(value)
