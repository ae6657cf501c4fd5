"""The distillation objective: the value and the gradient of each row of logits.

    L = (1 - w) CE(y, softmax(s)) + w T^2 D(softmax(t / T), softmax(s / T))

with student logits s, teacher logits t, label y, KD weight w and temperature T (Hinton et al. 2015, arXiv:1503.02531;
the factor T^2 keeps the size of the gradient independent of T). D is one of DIVERGENCES, or of those that an installed
package adds (`divergence_of`).

The teacher's distribution covers ids below n_real only; the student's head may have more rows, and its softmax covers
all of them. With P the probability that the student gives to the shared ids, both Kullback-Leibler divergences are
computed on the shared ids and -ln P is added: for the forward one this is an identity, the reverse one would
otherwise be infinite.

`dense` is the reference implementation for any floating point dtype; the fused kernel is tested against it.

Shape suffixes: N rows (positions), V rows of the student's head, R shared ids (n_real).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from aprfmt.errors import UsageError
from aprtrain.plugins import LOSSES, MIXTURES


@dataclass(frozen=True)
class Objective:
    """The loss to minimise.

    Args:
        kd_weight: w, the weight of the divergence; cross entropy has weight 1 - w. 0 needs no teacher.
        temperature: T > 0, divides both models' logits in the divergence.
        kind: with m = b teacher + (1 - b) student one of "forward": KL(teacher, student); "reverse": KL(student,
            teacher); "skew": KL(teacher, m) (Ko et al. 2024, arXiv:2402.03898, its alpha is b); "jsd": the generalised
            Jensen-Shannon divergence b KL(teacher, m) + (1 - b) KL(student, m) (Agarwal et al. 2024, arXiv:2306.13649);
            "tv": half the sum of |teacher - student| (Wen et al. 2023, arXiv:2307.15190); or an installed one.
        beta: b, the teacher's share of the mixture m.

    Raises:
        UsageError: a value is out of range.
    """

    kd_weight: float = 0.7
    temperature: float = 3.0
    kind: str = "forward"
    beta: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.kd_weight <= 1:
            raise UsageError(f"the KD weight must be from 0 to 1, not {self.kd_weight}")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise UsageError(f"the temperature must be above 0, not {self.temperature}")
        if (fault := LOSSES.unknown(self.kind)) is not None:
            raise UsageError(fault)
        if self.kind in MIXTURES and not 0 < self.beta < 1:
            raise UsageError(
                f"beta must be above 0 and below 1, not {self.beta}",
                hint="at 0 and 1 it is a KL divergence: use --loss forward or reverse",
            )

    def weights(self) -> tuple[float, float]:
        """Factors of cross entropy and divergence: (1 - w, w T^2)."""
        return 1 - self.kd_weight, self.kd_weight * self.temperature**2


class RowLosses(NamedTuple):
    """One value per row, 0 if the label is IGNORED; losses in nats."""

    ce_N: Tensor
    """Cross entropy with the label."""
    kl_N: Tensor
    """The objective's divergence at its temperature, without T^2; 0 without a teacher."""
    kl1_N: Tensor
    """KL(teacher, student) at temperature 1, for every objective."""
    agree_N: Tensor
    """1 if both models have the same top-1 token (or share one of equally likely ones), else 0."""
    entropy_N: Tensor
    """The teacher's entropy at temperature 1."""


def times_log(weight: Tensor, log: Tensor) -> Tensor:
    """weight * log with 0 * log 0 = 0."""
    return torch.where(weight > 0, weight * log, 0)


def forward_kl(logp_NV: Tensor, logq_NR: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """KL(teacher, student) of each row and its gradient, see DIVERGENCES."""
    q_NR, shared = logq_NR.exp(), logq_NR.shape[1]
    grad_NV = logp_NV.exp()
    grad_NV[:, :shared] -= q_NR
    return times_log(q_NR, logq_NR - logp_NV[:, :shared]).sum(1), grad_NV


def _reverse(logp_NV: Tensor, logq_NR: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    shared = logq_NR.shape[1]
    mass_N1 = logp_NV[:, :shared].logsumexp(1, keepdim=True)
    logr_NR = logp_NV[:, :shared] - mass_N1
    r_NR, ratio_NR = logr_NR.exp(), logr_NR - logq_NR
    value_N1 = times_log(r_NR, ratio_NR).sum(1, keepdim=True)
    grad_NV = logp_NV.exp()
    grad_NV[:, :shared] += times_log(r_NR, ratio_NR - value_N1) - r_NR
    return (value_N1 - mass_N1)[:, 0], grad_NV


def _jsd(logp_NV: Tensor, logq_NR: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    shared = logq_NR.shape[1]
    p_NV, q_NR = logp_NV.exp(), logq_NR.exp()
    logm_NV = logp_NV + math.log(1 - beta)
    logm_NV[:, :shared] = torch.logaddexp(logm_NV[:, :shared], logq_NR + math.log(beta))
    ratio_NV = times_log(p_NV, logp_NV - logm_NV)
    terms_NV = (1 - beta) * ratio_NV
    terms_NV[:, :shared] += beta * times_log(q_NR, logq_NR - logm_NV[:, :shared])
    # Each term is non-negative (log-sum inequality), so negative values are rounding errors.
    value_N = terms_NV.clamp(min=0).sum(1)
    return value_N, (1 - beta) * (ratio_NV - p_NV * ratio_NV.sum(1, keepdim=True))


def _skew(logp_NV: Tensor, logq_NR: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    shared = logq_NR.shape[1]
    p_NV, q_NR = logp_NV.exp(), logq_NR.exp()
    logm_NR = torch.logaddexp(logp_NV[:, :shared] + math.log(1 - beta), logq_NR + math.log(beta))
    ratio_NR = (1 - beta) * p_NV[:, :shared] * (logq_NR - logm_NR).exp()
    grad_NV = p_NV * ratio_NR.sum(1, keepdim=True)
    grad_NV[:, :shared] -= ratio_NR
    return times_log(q_NR, logq_NR - logm_NR).sum(1), grad_NV


def _total_variation(logp_NV: Tensor, logq_NR: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    excess_NV = logp_NV.exp()
    p_NV = excess_NV.clone()
    excess_NV[:, : logq_NR.shape[1]] -= logq_NR.exp()
    sign_NV = excess_NV.sign()
    return excess_NV.abs().sum(1) / 2, p_NV * (sign_NV - (p_NV * sign_NV).sum(1, keepdim=True)) / 2


Divergence = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""(log p [N, V], log q [N, R], beta) -> value [N], gradient [N, V] with respect to the logits of p."""

DIVERGENCES: dict[str, Divergence] = {
    "forward": forward_kl,
    "reverse": _reverse,
    "jsd": _jsd,
    "skew": _skew,
    "tv": _total_variation,
}


def divergence_of(kind: str) -> Divergence:
    """A divergence by its name, one of `plugins.LOSSES`."""
    found: Divergence = DIVERGENCES.get(kind) or LOSSES.installed()[kind].load()
    return found


def dense(objective: Objective, s_NV: Tensor, t_NR: Tensor | None, labels_N: Tensor) -> tuple[RowLosses, Tensor]:
    """The objective's terms of each row, and the gradient of each row's loss with respect to its student logits.

    Args:
        objective: the loss to minimise.
        s_NV: student logits for all rows of its head; their floating point dtype is that of the computation.
        t_NR: teacher logits for the shared ids; with None the terms that need a teacher are 0.
        labels_N: int64 ids, or IGNORED.

    Returns:
        The terms, and the gradient [N, V] of `weights()[0] * ce + weights()[1] * kl`, 0 in ignored rows.
    """
    valid_N, zero_N = labels_N >= 0, s_NV.new_zeros(len(s_NV))
    index_N1 = labels_N.clamp(min=0)[:, None]
    ce_weight, kd_weight = objective.weights()
    logp_NV = s_NV.log_softmax(1)
    grad_NV = logp_NV.exp()
    grad_NV.scatter_add_(1, index_N1, -torch.ones_like(index_N1, dtype=s_NV.dtype))
    grad_NV *= ce_weight
    rows = RowLosses(-logp_NV.gather(1, index_N1)[:, 0], zero_N, zero_N, zero_N, zero_N)
    if t_NR is not None:
        shared, temperature = t_NR.shape[1], objective.temperature
        logq_NR = t_NR.log_softmax(1)
        divergence = divergence_of(objective.kind)
        kl_N, slope_NV = divergence(
            (s_NV / temperature).log_softmax(1), (t_NR / temperature).log_softmax(1), objective.beta
        )
        grad_NV += kd_weight / temperature * slope_NV
        top_NR = (t_NR == t_NR.amax(1, keepdim=True)) & (s_NV[:, :shared] == s_NV.amax(1, keepdim=True))
        rows = rows._replace(
            kl_N=kl_N,
            kl1_N=forward_kl(logp_NV, logq_NR, 0)[0],
            agree_N=top_NR.any(1).to(s_NV.dtype),
            entropy_N=-times_log(logq_NR.exp(), logq_NR).sum(1),
        )
    return RowLosses(*(value_N.where(valid_N, 0) for value_N in rows)), grad_NV.where(valid_N[:, None], 0)
