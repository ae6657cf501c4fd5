"""The choice of a type for each tensor, against exhaustive search."""

from __future__ import annotations

import itertools
import random

import pytest

from aprfmt.convert.bit_allocation import (
    AllocatedTensor,
    TypeOption,
    fit_bytes,
    fit_loss,
    hull,
    smallest,
    total_bytes,
    total_loss,
)


def tensors(seed: int, n: int = 5, n_types: int = 4) -> list[AllocatedTensor]:
    """Random tensors whose larger types are mostly, not always, more precise."""
    rng = random.Random(seed)
    found = []
    for i in range(n):
        size = rng.randrange(50, 400)
        options = [
            TypeOption(f"T{bits}", size * bits, 4.0**-bits * rng.uniform(0.5, 3)) for bits in range(2, 2 + n_types)
        ]
        found.append(AllocatedTensor(f"t{i}", tuple(options), rng.uniform(0.1, 5)))
    return found


def every(rows: list[AllocatedTensor]) -> list[tuple[int, float]]:
    """(bytes, loss) of all choices."""
    return [
        (sum(o.n_bytes for o in choice), sum(t.loss(o) for t, o in zip(rows, choice, strict=True)))
        for choice in itertools.product(*(t.options for t in rows))
    ]


def most_of_one(rows: list[AllocatedTensor]) -> float:
    """The most loss that the type of one tensor decides over."""
    return max(t.loss(a) - t.loss(b) for t in rows for a, b in itertools.pairwise(hull(t.options)))


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_within_one_tensor_of_the_best(seed: int) -> None:
    rows = tensors(seed)
    choices = every(rows)
    least, greatest = min(choices)[0], max(choices)[0]
    for part in (0.0, 0.2, 0.5, 0.8, 1.0):
        budget = int(least + part * (greatest - least))
        chosen = fit_bytes(rows, budget)
        assert chosen is not None
        assert total_bytes(chosen) <= budget
        best = min(loss for size, loss in choices if size <= budget)
        assert best <= total_loss(rows, chosen) <= best + most_of_one(rows)
    assert fit_bytes(rows, least - 1) is None


@pytest.mark.parametrize("seed", range(6))
def test_the_smallest_choice_within_a_loss(seed: int) -> None:
    rows = tensors(seed)
    choices = every(rows)
    least = min(loss for _, loss in choices)
    for factor in (1.0, 1.5, 4.0, 30.0):
        chosen = fit_loss(rows, least * factor * (1 + 1e-12))
        assert chosen is not None
        assert total_loss(rows, chosen) <= least * factor * (1 + 1e-9)
        smaller = [(t, o) for t in rows for o in t.options if o.n_bytes < chosen[t.name].n_bytes]
        assert all(total_loss(rows, chosen | {t.name: o}) > least * factor for t, o in smaller)  # nothing is left over
        best = min(size for size, loss in choices if loss <= least * factor * (1 + 1e-9))
        assert total_bytes(chosen) <= best + max(o.n_bytes for t in rows for o in t.options)
    assert fit_loss(rows, least * 0.99) is None


def test_a_costly_tensor_gets_the_bits() -> None:
    options = tuple(TypeOption(f"T{bits}", 100 * bits, 4.0**-bits) for bits in (2, 4, 8))
    rows = [AllocatedTensor(name, options, cost) for name, cost in (("cheap", 0.01), ("costly", 100.0))]
    chosen = fit_bytes(rows, 1000)
    assert chosen is not None
    assert {name: option.dtype for name, option in chosen.items()} == {"cheap": "T2", "costly": "T8"}


def test_a_type_that_is_larger_and_worse_is_never_a_corner() -> None:
    options = [TypeOption("a", 10, 1.0), TypeOption("worse", 20, 2.0), TypeOption("above", 30, 0.9)]
    assert [o.dtype for o in hull([*options, TypeOption("b", 40, 0.1)])] == ["a", "b"]


def test_what_is_left_of_a_budget_is_used() -> None:
    """The step with the best price does not fit; a smaller one does."""
    big = AllocatedTensor("big", (TypeOption("s", 100, 1.0), TypeOption("l", 1000, 0.0)), 100.0)
    small = AllocatedTensor("small", (TypeOption("s", 100, 1.0), TypeOption("l", 200, 0.5)), 1.0)
    chosen = fit_bytes([big, small], 350)
    assert chosen is not None
    assert (chosen["big"].dtype, chosen["small"].dtype) == ("s", "l")
    assert smallest([big, small])["small"].dtype == "s"
