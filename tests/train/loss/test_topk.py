"""The loss against the teacher's k most likely ids and the mass of the rest: by autograd in float64, and its bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from train_head import Problem, expected, gap, problem

from aprfmt.errors import UsageError
from aprfmt.tokenizer.alignment import SharedVocabulary
from aprtrain.loss.head import HeadOut, Softcaps, distill_head, head_bytes
from aprtrain.loss.objective import Objective
from aprtrain.loss.topk import TopK, sparse, top_k_of
from aprtrain.plugins import LOSSES

KINDS = LOSSES.built_in


def top_of(p: Problem, k: int, temperature: float) -> TopK:
    """What files would say of the problem's teacher."""
    logits = p.t.double() @ p.wt[: p.vocabulary.n_real].double().T
    ids, logprobs, rest = top_k_of(logits, k, (temperature, 1.0))
    return TopK(ids, logprobs.to(p.x.dtype), rest[:, 0].to(p.x.dtype), rest[:, 1].to(p.x.dtype))


def run(p: Problem, objective: Objective, top: TopK, **options: object) -> tuple[HeadOut, Tensor, Tensor]:
    """The loss and its gradients with respect to hidden states and head."""
    x, w = p.x.clone().requires_grad_(), p.w.clone().requires_grad_()
    given: dict[str, object] = {"n_valid": p.n_valid, "chunk": 8, **options}
    out: HeadOut = distill_head(x, w, None, None, p.labels, objective, None, top=top, **given)  # type: ignore[arg-type]
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return out, x.grad, w.grad if w.grad is not None else torch.zeros_like(w)


def outcomes(logits: Tensor, ids: Tensor) -> Tensor:
    """Probabilities of the ids, and of all others together, as a sum over those alone."""
    others = torch.ones_like(logits).scatter(1, ids, 0)
    p = logits.softmax(1)
    return torch.cat([p.gather(1, ids), (p * others).sum(1, keepdim=True)], 1)


def divergence(objective: Objective, q: Tensor, p: Tensor) -> Tensor:
    def kl(a: Tensor, b: Tensor) -> Tensor:
        terms: Tensor = torch.special.xlogy(a, a) - torch.special.xlogy(a, b)
        return terms.sum(1)

    if objective.kind == "forward":
        return kl(q, p)
    if objective.kind == "reverse":
        return kl(p, q)
    if objective.kind == "tv":
        return (p - q).abs().sum(1) / 2
    m = objective.beta * q + (1 - objective.beta) * p
    if objective.kind == "skew":
        return kl(q, m)
    return objective.beta * kl(q, m) + (1 - objective.beta) * kl(p, m)


def check(p: Problem, objective: Objective, k: int, bound: float, softcap: float = 0.0) -> None:
    """Loss, sums and gradients against the definition, by autograd on whole logits in float64."""
    found, dx, dw = run(p, objective, top_of(p, k, objective.temperature), softcaps=Softcaps(softcap, 0.0))
    wide = p.to(torch.float64)
    x, w = wide.x.requires_grad_(), wide.w.requires_grad_()
    valid, temperature, weight = wide.labels >= 0, objective.temperature, objective.kd_weight
    s, t = (x @ w.T)[valid], (wide.t @ wide.wt[: wide.vocabulary.n_real].T)[valid]
    s = softcap * torch.tanh(s / softcap) if softcap else s
    ids = t.topk(k, 1).indices
    ce = functional.cross_entropy(s, wide.labels[valid], reduction="sum")
    kl = divergence(objective, outcomes(t / temperature, ids), outcomes(s / temperature, ids)).sum()
    loss = ((1 - weight) * ce + weight * temperature**2 * kl) / len(s)
    wanted_dx, wanted_dw = torch.autograd.grad(loss, (x, w))
    q, student = outcomes(t, ids), outcomes(s, ids)
    kl1 = divergence(Objective(kind="forward"), q, student).sum()
    agree, entropy = (s.argmax(1) == t.argmax(1)).sum(), -torch.special.xlogy(q, q).sum()
    for value, want in (
        (found.loss, loss.detach()), (found.ce_sum, ce.detach()), (found.kl_sum, kl.detach()),
        (found.kl1_sum, kl1.detach()), (found.agree, agree), (found.teacher_entropy_sum, entropy),
        (dx, wanted_dx), (dw, wanted_dw),
    ):  # fmt: skip
        assert gap(value, want) < bound or (want.abs().max() < 1e-12 and value.abs().max() < 1e-12)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("weight", "temperature"), [(0.3, 2.0), (1.0, 1.0), (0.5, 4.0), (0.0, 2.0)])
@pytest.mark.parametrize("k", [1, 7, 39])
def test_value_and_gradient_are_those_of_the_definition(
    kind: str, weight: float, temperature: float, k: int, softcap: float
) -> None:
    check(problem(29, 40, 48, 64).to(torch.float64), Objective(weight, temperature, kind, 0.3), k, 1e-9, softcap)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_exact_to_its_digits_and_bfloat16_reads_the_same(kind: str) -> None:
    check(problem(29, 40, 48, 64).to(torch.float32), Objective(0.7, 2.0, kind), 7, 2e-6)


def test_a_small_mass_of_the_rest_keeps_its_digits() -> None:
    """A student that is sure: 1 - (p_1 + .. + p_k) would be rounding alone."""
    p = problem(29, 40, 48, 64, spread=9.0).to(torch.float32)
    p = replace(p, t=p.x, wt=torch.cat([p.w, p.w[:8]])[:48], vocabulary=SharedVocabulary(40, 48, 48))
    p = replace(p, t=p.t * 0.5)
    check(p, Objective(1.0, 1.0), 12, 2e-5)


def loss_of_a_row(kind: str, temperature: float, s: list[float], logprobs: dict[int, float], rest: float) -> float:
    """T^2 D(Q, P) of one position, sum by sum: of the student's logits, what files say of a teacher, and its rest."""
    heated = {i: math.exp(value / temperature) for i, value in logprobs.items()}
    share = (1 - rest) / math.fsum(heated.values())
    student = [math.exp((value - max(s)) / temperature) for value in s]
    total, others = math.fsum(student), math.fsum(value for i, value in enumerate(student) if i not in logprobs)
    q = [*(value * share for value in heated.values()), rest]
    p = [*(student[i] / total for i in heated), others / total]
    m = [0.3 * a + 0.7 * b for a, b in zip(q, p, strict=True)]

    def kl(one: list[float], other: list[float]) -> float:
        return math.fsum(a * math.log(a / b) for a, b in zip(one, other, strict=True))

    of_kind = {
        "forward": kl(q, p), "reverse": kl(p, q), "skew": kl(q, m), "jsd": 0.3 * kl(q, m) + 0.7 * kl(p, m),
        "tv": math.fsum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
    }  # fmt: skip
    return temperature**2 * of_kind[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.5, 2.0, 4.0])
def test_a_rest_weighs_the_same_at_every_temperature(kind: str, temperature: float) -> None:
    """What files say, whatever logits it came from: by plain sums, and as heated logits have it at temperature 1."""
    random = torch.Generator().manual_seed(3)
    s = torch.randn(6, 12, generator=random, dtype=torch.float64) * 2
    ids = torch.stack([torch.randperm(12, generator=random)[:4] for _ in range(6)])
    rest, rest1 = torch.rand(2, 6, generator=random, dtype=torch.float64) * 0.9 + 0.05
    known = torch.randn(6, 4, generator=random, dtype=torch.float64).sort(1, descending=True).values
    logprobs = known.log_softmax(1) + (1 - rest1).log()[:, None]
    labels = ids[:, 0]
    found, grad = sparse(Objective(1.0, temperature, kind, 0.3), s, TopK(ids, logprobs, rest, rest1), labels)

    def wanted(row: int, logits: list[float]) -> float:
        said = dict(zip(ids[row].tolist(), logprobs[row].tolist(), strict=True))
        return loss_of_a_row(kind, temperature, logits, said, float(rest[row]))

    step = 1e-5
    for row in range(6):
        logits = s[row].tolist()
        assert temperature**2 * float(found.kl_N[row]) == pytest.approx(wanted(row, logits), rel=1e-12)
        for i in range(12):
            up, down = ([x + sign * step * (i == n) for n, x in enumerate(logits)] for sign in (1, -1))
            slope = (wanted(row, up) - wanted(row, down)) / (2 * step)
            assert float(grad[row, i]) == pytest.approx(slope, rel=1e-6, abs=1e-8)
    heated = (logprobs / temperature).log_softmax(1) + (1 - rest).log()[:, None]
    same, slopes = sparse(Objective(1.0, 1.0, kind, 0.3), s / temperature, TopK(ids, heated, rest, rest), labels)
    assert gap(found.kl_N, same.kl_N) < 1e-12
    assert gap(grad, temperature * slopes) < 1e-12


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_with_all_ids_it_is_the_whole_distribution(temperature: float) -> None:
    p = problem(29, 48, 48, 48).to(torch.float64)
    objective = Objective(0.7, temperature)
    found, dx, dw = run(p, objective, top_of(p, 48, temperature))
    wanted = expected(p, objective)
    for value, want in ((found.loss, wanted.loss), (found.kl1_sum, wanted.kl1), (dx, wanted.dx), (dw, wanted.dw)):
        assert gap(value, want) < 1e-9


@pytest.mark.parametrize("k", [1, 4, 16, 47])
def test_what_is_left_out_is_the_divergence_among_the_others(k: int) -> None:
    """KL(whole) = KL(outcomes) + r KL(q | others, p | others), so the loss never exceeds that of the whole."""
    p = problem(29, 48, 48, 48, ignored=99).to(torch.float64)
    p = replace(p, labels=p.labels.clamp(min=0))
    for temperature in (1.0, 2.0):
        objective = Objective(1.0, temperature)
        s, t = p.x @ p.w.T / temperature, p.t @ p.wt.T / temperature
        others = torch.ones_like(t, dtype=torch.bool).scatter(1, t.topk(k, 1).indices, False)
        q, r = t.softmax(1), (t.softmax(1) * others).sum(1)
        tail_q, tail_p = (a.masked_fill(~others, -torch.inf).log_softmax(1) for a in (t, s))
        left_out = (r * torch.where(others, tail_q.exp() * (tail_q - tail_p), 0).sum(1)).sum()
        whole = (q * (t.log_softmax(1) - s.log_softmax(1))).sum()
        found = run(p, objective, top_of(p, k, temperature))[0].kl_sum
        assert abs(float(whole - found - left_out)) < 1e-9
        assert float(found) <= float(whole) + 1e-9


def test_the_others_are_pushed_as_one() -> None:
    """The gradient on an id that the teacher says nothing of goes by the mass of all others, not to zero."""
    p = problem(20, 40, 48, 64).to(torch.float64)
    top = top_of(p, 4, 1.0)
    more = top._replace(residual_N=top.residual_N.clamp(max=0.4) + 0.5)
    less, much = (run(p, Objective(1.0, 1.0), some)[2] for some in (top, more))
    assert float((much - less).abs().max()) > 1e-3


def test_chunks_buffers_and_lost_mass() -> None:
    p = problem(29, 40, 48, 64).to(torch.float64)
    objective, top = Objective(0.7, 2.0), top_of(p, 7, 2.0)
    first, dx, dw = run(p, objective, top)
    buffer = torch.ones_like(p.w)
    second, dx2, none = run(p, objective, top, chunk=5, grad_w=buffer)
    assert torch.allclose(dx, dx2, rtol=1e-12)
    assert torch.allclose(buffer - 1, dw, rtol=1e-9)
    assert none.abs().max() == 0
    assert torch.allclose(first.loss, second.loss, rtol=1e-12)
    none_left = run(
        p, objective, top._replace(residual_N=torch.zeros(29).double(), residual1_N=torch.zeros(29).double())
    )
    assert all(bool(torch.isfinite(value).all()) for value in (*none_left[0], *none_left[1:]))


def test_what_does_not_fit_is_refused() -> None:
    p = problem(9, 40, 48, 64).to(torch.float64)
    with pytest.raises(UsageError, match="teacher's ids are missing"):
        run(p, Objective(), top_of(p.rows(slice(1, 9)), 4, 1.0))
    with pytest.raises(UsageError, match="not both"):
        distill_head(
            p.x, p.w, p.t, p.wt, p.labels, Objective(), p.vocabulary, n_valid=9, top=top_of(p, 4, 3.0)
        )  # fmt: skip


def test_memory_is_bounded_whatever_the_vocabulary() -> None:
    for rows in (32_000, 151_936, 262_144):
        assert head_bytes(SharedVocabulary(rows, rows, rows), 896, top=True) <= 14 << 27


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_on_cuda_with_a_real_vocabulary(kind: str) -> None:
    p = problem(64, 151_665, 151_936, 152_064, widths=(128, 192), device="cuda", spread=4)
    objective = Objective(0.7, 2.0, kind)
    wide = p.to(torch.float64, "cuda")
    wanted = run(wide, objective, top_of(wide, 64, 2.0))
    found = run(
        p, objective, TopK(*(a.float() if a.is_floating_point() else a for a in top_of(wide, 64, 2.0))), chunk=32
    )
    assert gap(found[0].loss, wanted[0].loss) < 1e-4
    assert gap(found[1], wanted[1]) < 0.01
    assert gap(found[2], wanted[2]) < 0.01
