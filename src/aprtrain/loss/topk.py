"""The objective for a teacher known by its top-k log-probabilities and the residual mass at each position.

Both distributions are reduced to k + 1 outcomes, the k ids and "any other id":

    L = (1 - w) CE(y, softmax(s)) + w T^2 D(Q, P),   Q = (q_1 .. q_k, r),  P = (p_1 .. p_k, 1 - p_1 - .. - p_k)

where q and p are softmax(t / T) and softmax(s / T) over all ids, and r the teacher's residual mass at T. The forward
divergence omits r KL(q | others, p | others): it never exceeds that of the whole distributions. The gradient is
distributed over the other ids in proportion to the student's own probabilities.

Shape suffixes: N rows (positions), V rows of the student's head, K known ids, B = K + 1 outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aprtrain.loss.objective import Objective, RowLosses, divergence_of, forward_kl, times_log

CELLS = 1 << 27
"""Logits per chunk: each of the float32 buffers takes half a GiB."""


class TopK(NamedTuple):
    """A teacher's top-k log-probabilities at each of N positions.

    Attributes:
        ids_NK: the most likely ids, int64, the most likely first; no duplicates.
        logprobs_NK: their log-probabilities at temperature 1.
        rest_N: residual mass at the temperature of the objective.
        rest1_N: the same at temperature 1.
    """

    ids_NK: Tensor
    logprobs_NK: Tensor
    residual_N: Tensor
    residual1_N: Tensor

    def outcomes(self, temperature: float, residual_N: Tensor) -> Tensor:
        """log Q [N, B]; a mass of 0 is replaced by the smallest positive number."""
        residual_N1 = residual_N[:, None]
        top_NK = (self.logprobs_NK / temperature).log_softmax(1) + torch.log1p(-residual_N1)
        return torch.cat([top_NK, residual_N1.clamp(min=torch.finfo(residual_N.dtype).tiny).log()], 1)


class _Folded(NamedTuple):
    """A student's logits reduced to B outcomes: z_NB, up to a constant per row; the other ids' exponentials and their
    sum.
    """

    z_NB: Tensor
    others_NV: Tensor
    sum_N1: Tensor


def _fold(s_NV: Tensor, ids_NK: Tensor, temperature: float) -> _Folded:
    scaled_NV = (s_NV - s_NV.amax(1, keepdim=True)).div_(temperature)
    top_NK = scaled_NV.gather(1, ids_NK)
    # Summed without the known ids: 1 minus their sum would lose precision for a small mass.
    others_NV = scaled_NV.exp_().scatter_(1, ids_NK, 0)
    sum_N1 = others_NV.sum(1, keepdim=True).clamp_(min=torch.finfo(s_NV.dtype).tiny)
    return _Folded(torch.cat([top_NK, sum_N1.log()], 1), others_NV, sum_N1)


def sparse(objective: Objective, s_NV: Tensor, top: TopK, labels_N: Tensor) -> tuple[RowLosses, Tensor]:
    """As `objective.dense`, on outcomes: kl_N, kl1_N and entropy_N are those of Q and P.

    Allocates two tensors of the size of s_NV; the gradient is one of them.
    """
    valid_N = labels_N >= 0
    index_N1 = labels_N.clamp(min=0)[:, None]
    ce_weight, kd_weight = objective.weights()
    one = _fold(s_NV, top.ids_NK, 1.0)
    log_sum_N1 = one.z_NB.logsumexp(1, keepdim=True)
    logp_NB, logq1_NB = one.z_NB - log_sum_N1, top.outcomes(1.0, top.residual1_N)
    highest_N1 = s_NV.amax(1, keepdim=True)
    ce_N = (log_sum_N1 + highest_N1 - s_NV.gather(1, index_N1))[:, 0]
    grad_NV = one.others_NV.mul_(ce_weight * torch.exp(-log_sum_N1))
    grad_NV.scatter_(1, top.ids_NK, ce_weight * logp_NB[:, :-1].exp())
    grad_NV.scatter_add_(1, index_N1, torch.full_like(index_N1, -ce_weight, dtype=s_NV.dtype))

    temperature = objective.temperature
    soft = _fold(s_NV, top.ids_NK, temperature)
    kl_N, slope_NB = divergence_of(objective.kind)(
        soft.z_NB.log_softmax(1), top.outcomes(temperature, top.residual_N), objective.beta
    )
    slope_NB *= kd_weight / temperature
    grad_NV.addcmul_(soft.others_NV, slope_NB[:, -1:] / soft.sum_N1)
    grad_NV.scatter_add_(1, top.ids_NK, slope_NB[:, :-1])

    rows = RowLosses(
        ce_N=ce_N,
        kl_N=kl_N,
        kl1_N=forward_kl(logp_NB, logq1_NB, 0)[0],
        # Files round log-probabilities, so equal ones are not ties: the order of the ids tells the first.
        agree_N=(s_NV.gather(1, top.ids_NK[:, :1]) == highest_N1)[:, 0].to(s_NV.dtype),
        entropy_N=-times_log(logq1_NB.exp(), logq1_NB).sum(1),
    )
    return RowLosses(*(value_N.where(valid_N, 0) for value_N in rows)), grad_NV.mul_(valid_N[:, None])


def top_k_of(t_NR: Tensor, k: int, temperatures: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """From a teacher's logits [N, R]: ids [N, k], log-probabilities [N, k], residual mass [N, temperatures].

    Exact in the dtype of the logits: the mass is the sum over the other ids.
    """
    logq_NR = t_NR.log_softmax(1)
    logprobs_NK, ids_NK = logq_NR.topk(k, 1)
    rest = []
    for temperature in temperatures:
        mass_NR = (logq_NR / temperature).exp_()
        all_N = mass_NR.sum(1)
        rest.append(mass_NR.scatter_(1, ids_NK, 0).sum(1) / all_N)
    return ids_NK, logprobs_NK, torch.stack(rest, 1)
