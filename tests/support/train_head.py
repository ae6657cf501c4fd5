"""Problems for the distillation head, and what must come out of them, by autograd on whole logits in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from aprfmt.texts.sequences import IGNORED
from aprfmt.tokenizer.alignment import SharedVocabulary
from aprtrain.loss.head import HeadOut, Softcaps, distill_head
from aprtrain.loss.objective import Objective


@dataclass(frozen=True)
class Problem:
    """Hidden states x, t and heads w, wt of student and teacher, labels, and what both share."""

    x: Tensor
    w: Tensor
    t: Tensor
    wt: Tensor
    labels: Tensor
    vocabulary: SharedVocabulary

    @property
    def n_valid(self) -> int:
        return int((self.labels >= 0).sum())

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Problem:
        x, w, t, wt = (a.to(device, dtype) for a in (self.x, self.w, self.t, self.wt))
        return replace(self, x=x, w=w, t=t, wt=wt, labels=self.labels.to(device))

    def rows(self, rows: slice) -> Problem:
        return replace(self, x=self.x[rows], t=self.t[rows], labels=self.labels[rows])


def problem(
    n: int, n_real: int, student_rows: int, teacher_rows: int, widths: tuple[int, int] = (8, 12), seed: int = 0,
    spread: float = 2.0, device: str = "cpu", ignored: int = 5,
) -> Problem:  # fmt: skip
    """Random bfloat16 material: logits with a standard deviation of `spread`, every `ignored`-th label off."""
    random = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, scale: float) -> Tensor:
        return (torch.randn(rows, columns, generator=random, device=device) * scale).bfloat16()

    d, e = widths
    labels = torch.randint(0, n_real, (n,), generator=random, device=device)
    labels[1::ignored] = IGNORED
    return Problem(
        normal(n, d, 1.0), normal(student_rows, d, spread / d**0.5),
        normal(n, e, 1.0), normal(teacher_rows, e, spread / e**0.5),
        labels, SharedVocabulary(n_real, teacher_rows, student_rows),
    )  # fmt: skip


class Answer(NamedTuple):
    """Loss, sums over valid positions, and gradients."""

    loss: Tensor
    ce: Tensor
    kl: Tensor
    kl1: Tensor
    agree: Tensor
    entropy: Tensor
    dx: Tensor
    dw: Tensor


def _divergence(objective: Objective, s: Tensor, t: Tensor) -> Tensor:
    """One value a row, straight from the definitions."""
    n, p = t.shape[1], s.softmax(1)
    q = functional.pad(t.softmax(1), (0, s.shape[1] - n))
    if objective.kind == "forward":
        terms: Tensor = torch.special.xlogy(q, q) - q * s.log_softmax(1)
        return terms.sum(1)
    if objective.kind == "reverse":
        r = s[:, :n].softmax(1)
        inside = (r * (s[:, :n].log_softmax(1) - t.log_softmax(1))).sum(1)
        return inside - p[:, :n].sum(1).log()
    if objective.kind == "tv":
        return (p - q).abs().sum(1) / 2
    m = objective.beta * q + (1 - objective.beta) * p
    teacher: Tensor = torch.special.xlogy(q, q) - torch.special.xlogy(q, m)
    if objective.kind == "skew":
        return teacher.sum(1)
    student: Tensor = torch.special.xlogy(p, p) - torch.special.xlogy(p, m)
    return (objective.beta * teacher + (1 - objective.beta) * student).sum(1)


def expected(p: Problem, objective: Objective, softcaps: Softcaps = Softcaps()) -> Answer:  # noqa: B008
    """What the head must give; nothing of the package's arithmetic is used."""
    p = p.to(torch.float64, str(p.x.device))
    x, w = p.x.requires_grad_(), p.w.requires_grad_()
    s, t = x @ w.T, p.t @ p.wt[: p.vocabulary.n_real].T
    s = softcaps.student * torch.tanh(s / softcaps.student) if softcaps.student else s
    t = softcaps.teacher * torch.tanh(t / softcaps.teacher) if softcaps.teacher else t
    valid = p.labels >= 0
    s, t = s[valid], t[valid]
    temperature, weight = objective.temperature, objective.kd_weight
    ce = functional.cross_entropy(s, p.labels[valid], reduction="sum")
    kl = _divergence(objective, s / temperature, t / temperature).sum()
    loss = ((1 - weight) * ce + weight * temperature**2 * kl) / len(s)
    dx, dw = torch.autograd.grad(loss, (x, w))
    kl1 = _divergence(Objective(kind="forward"), s, t).sum()
    agree = (s.argmax(1) == t.argmax(1)).sum()
    entropy = -(t.softmax(1) * t.log_softmax(1)).sum()
    return Answer._make(a.detach() for a in (loss, ce, kl, kl1, agree, entropy, dx, dw))


class Head:
    """`distill_head` on a problem, with gradients."""

    def __init__(self, **options: object) -> None:
        self.options = options

    def __call__(self, p: Problem, objective: Objective, **options: object) -> Answer:
        x, w = p.x.clone().requires_grad_(), p.w.clone().requires_grad_()
        arguments: dict[str, object] = {"n_valid": p.n_valid, **self.options, **options}
        out: HeadOut = distill_head(x, w, p.t, p.wt, p.labels, objective, p.vocabulary, **arguments)  # type: ignore[arg-type]
        out.loss.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        dw = w.grad if w.grad is not None else torch.zeros_like(w)
        return Answer._make(value.detach() for value in (*out, x.grad, dw))


def gap(found: Tensor, wanted: Tensor) -> float:
    """Relative distance; NaN is infinite."""
    found, wanted = found.detach().double(), wanted.detach().double()
    distance = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return distance if distance == distance else float("inf")


def cosine(found: Tensor, wanted: Tensor) -> float:
    return float(functional.cosine_similarity(found.double().flatten(), wanted.double().flatten(), 0))
