"""The objective: value and gradient against autograd and finite differences, its limits, and faults that show."""

from __future__ import annotations

import itertools
import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from train_head import Problem, expected, problem

from aprfmt.errors import UsageError
from aprfmt.texts.sequences import IGNORED
from aprtrain import plugins
from aprtrain.loss import objective as module
from aprtrain.loss.objective import Objective, dense
from aprtrain.plugins import LOSSES, MIXTURES

KINDS = LOSSES.built_in
OBJECTIVES = [
    Objective(weight, temperature, kind, 0.3)
    for weight, temperature, kind in itertools.product((0.0, 0.3, 0.7, 1.0), (1.0, 2.0, 4.0), KINDS)
]


def rows(p: Problem) -> tuple[Tensor, Tensor]:
    p = p.to(torch.float64)
    return p.x @ p.w.T, p.t @ p.wt[: p.vocabulary.n_real].T


def loss(objective: Objective, s: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """The sum of the rows' losses."""
    terms, _ = dense(objective, s, t, labels)
    ce_weight, kd_weight = objective.weights()
    return ce_weight * terms.ce_N.sum() + kd_weight * terms.kl_N.sum()


def check_value(objective: Objective) -> None:
    p = problem(20, 40, 48, 64)
    s, t = rows(p)
    terms, _ = dense(objective, s, t, p.labels)
    wanted = expected(p, objective)
    found = [loss(objective, s, t, p.labels) / p.n_valid, *(term.sum() for term in terms)]
    for value, want in zip(found, wanted[:6], strict=True):
        assert torch.allclose(value, want.double(), rtol=1e-12, atol=1e-12)


def check_differences(objective: Objective) -> None:
    """Central differences over every logit, padding rows and ignored positions included."""
    p = problem(6, 40, 48, 64)
    s, t = rows(p)
    _, grad = dense(objective, s, t, p.labels)
    step = 1e-5
    for index in itertools.product(range(s.shape[0]), range(s.shape[1])):
        bump = torch.zeros_like(s)
        bump[index] = step
        above, below = loss(objective, s + bump, t, p.labels), loss(objective, s - bump, t, p.labels)
        assert abs((above - below) / (2 * step) - grad[index]) < 5e-9


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_value_and_terms_are_those_of_the_definitions(objective: Objective) -> None:
    check_value(objective)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_value(kind: str) -> None:
    check_differences(Objective(0.7, 3.0, kind, 0.3))


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(lambda o: (o.kd_weight, (1 - o.kd_weight) * o.temperature**2), id="alpha swapped"),
        pytest.param(lambda o: (1 - o.kd_weight, o.kd_weight), id="T^2 dropped"),
    ],
)
def test_wrong_weights_show(weights: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Objective, "weights", weights)
    with pytest.raises(AssertionError):
        check_value(Objective(0.7, 3.0))


def test_a_logged_divergence_that_is_not_the_trained_one_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, reverse = module.forward_kl, module._reverse

    def faulty(logp: Tensor, logq: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        return reverse(logp, logq, beta)[0], forward(logp, logq, beta)[1]

    monkeypatch.setitem(module.DIVERGENCES, "forward", faulty)
    with pytest.raises(AssertionError):
        check_differences(Objective(0.7, 3.0))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_logits_have_no_divergence_and_no_gradient(kind: str) -> None:
    s, _ = rows(problem(20, 40, 40, 64))
    terms, grad = dense(Objective(1.0, 2.0, kind), s, s, torch.zeros(20, dtype=torch.int64))
    assert terms.kl_N.abs().max() < 1e-12
    assert grad.abs().max() < 1e-12
    assert terms.agree_N.sum() == 20


@pytest.mark.parametrize("kind", KINDS)
def test_no_divergence_is_negative(kind: str) -> None:
    s, t = rows(problem(50, 40, 48, 64, spread=8))
    for noise in (0.0, 1e-6, 1e-3, 1.0):
        near = functional.pad(t, (0, 8), value=-40.0) + noise * s
        terms, _ = dense(Objective(1.0, 1.0, kind), near.float(), t.float(), torch.zeros(50, dtype=torch.int64))
        assert terms.kl_N.min() >= -1e-6


def test_weight_0_is_torchs_cross_entropy_and_needs_no_teacher() -> None:
    p = problem(20, 40, 48, 64)
    s, t = rows(p)
    s.requires_grad_()
    want = functional.cross_entropy(s, p.labels, ignore_index=IGNORED, reduction="sum")
    (want_grad,) = torch.autograd.grad(want, s)
    for teacher in (None, t):
        terms, grad = dense(Objective(0.0, 2.0), s.detach(), teacher, p.labels)
        assert torch.allclose(terms.ce_N.sum(), want)
        assert torch.allclose(grad, want_grad)
        assert (terms.kl_N.sum() == 0) == (teacher is None)


def test_weight_1_does_not_know_the_labels() -> None:
    p = problem(20, 40, 48, 64)
    s, t = rows(p)
    ones = torch.ones(20, dtype=torch.int64)
    (first, first_grad), (second, second_grad) = (dense(Objective(1.0, 2.0), s, t, k * ones) for k in (0, 7))
    assert torch.equal(first.kl_N, second.kl_N)
    assert torch.equal(first_grad, second_grad)


def test_the_temperature_leaves_the_top_id() -> None:
    s, t = rows(problem(20, 40, 40, 64))
    for temperature in (0.5, 1.0, 4.0):
        terms, _ = dense(Objective(1.0, temperature), s, t, torch.zeros(20, dtype=torch.int64))
        assert terms.agree_N.sum() == (s.argmax(1) == t.argmax(1)).sum()


def test_minus_infinity_in_the_teacher_is_probability_0() -> None:
    p = problem(20, 40, 48, 64)
    s, t = rows(p)
    t[:, 30:] = -torch.inf
    terms, grad = dense(Objective(0.7, 3.0), s, t, p.labels)
    short, short_grad = dense(Objective(0.7, 3.0), s, t[:, :30], p.labels)
    assert torch.isfinite(grad).all()
    for found, want in zip((*terms, grad), (*short, short_grad), strict=True):
        assert torch.allclose(found, want)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kd_weight": 1.1}, "KD weight"),
        ({"kd_weight": float("nan")}, "KD weight"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"kind": "fkl"}, "unknown loss"),
        ({"kind": "jsd", "beta": 1.0}, "beta"),
        ({"kind": "jsd", "beta": 0.0}, "beta"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Objective(**values)


def test_a_package_adds_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point names a function of the table's form; here half the squared distance of the probabilities."""
    point = EntryPoint("brier", "added_losses:brier", LOSSES.group)
    module_of_it = ModuleType("added_losses")

    def brier(logp: Tensor, logq: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        p = logp.exp()
        off = p - functional.pad(logq.exp(), (0, p.shape[1] - logq.shape[1]))
        return off.square().sum(1) / 2, p * (off - (p * off).sum(1, keepdim=True))

    vars(module_of_it)["brier"] = brier
    monkeypatch.setitem(sys.modules, "added_losses", module_of_it)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == LOSSES.group else [])
    plugins._installed.cache_clear()
    try:
        check_differences(Objective(0.7, 3.0, "brier"))
        with pytest.raises(UsageError, match="use forward, reverse, skew, jsd, tv, brier"):
            Objective(kind="fkl")
    finally:
        plugins._installed.cache_clear()


def test_the_table_has_the_names_of_the_options() -> None:
    assert set(module.DIVERGENCES) == set(LOSSES.built_in)
    assert set(MIXTURES) <= set(LOSSES.built_in)
