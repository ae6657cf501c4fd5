"""Routed experts: their configuration, and the router.

Shape suffixes: S tokens, D = d_model, E experts, U experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Architecture
from aprfmt.errors import CorruptError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer.

    Attributes:
        n, used, width: number of experts, experts per token, and expert width.
        score: router score function, "softmax" or "sigmoid".
        groups, groups_used: number of expert groups, and groups per token.
        best: a group's score is the sum of this many of its best scores.
        normed: whether the scores of the selected experts are normalized to sum to 1.
        scale: final factor of the scores.
        transposed: whether expert matrices are stored [in, out].
        limit, slope: gate and up rows alternate; gates are clamped to at most `limit`, ups to [-limit, limit], and the
            output is (up + 1) gate sigmoid(slope gate); 0 for the network's usual activation.
    """

    n: int
    used: int
    width: int
    score: str
    groups: int
    groups_used: int
    best: int
    normed: bool
    scale: float
    transposed: bool
    limit: float
    slope: float


def experts_of(h: Hyperparams, row: Architecture) -> Experts:
    """From the hyper-parameters and the row. Raises UnsupportedError, CorruptError."""
    stacked = next((t for t in row.tensors if "blk.{n}.ffn_up_exps.weight" in t.gguf and "{e}" not in t.hf[0]), None)
    n, used = h.num_experts or 0, h.num_experts_per_tok or 0
    groups, groups_used = (as_int(h.extra.get(key), key) or 1 for key in ("n_group", "topk_group"))
    scale = as_float(h.extra.get("routed_scaling_factor"), "routed_scaling_factor")
    gating = next((key.constant for key in row.keys if key.gguf == "expert_gating_func"), None)
    if h.extra.get("topk_method") == "greedy":
        groups = groups_used = 1
    score = str(h.extra.get("scoring_func") or ("sigmoid" if gating == 2 else "softmax"))
    if score not in ("softmax", "sigmoid"):
        raise UnsupportedError(f"unsupported router score function {score!r:.40}")
    if not (0 < used <= n and 0 < groups_used <= groups and n % groups == 0 and used * groups <= n * groups_used):
        raise CorruptError(f"cannot select {used} of {n} experts from {groups_used} of {groups} groups")
    return Experts(
        n=n,
        used=used,
        width=h.moe_intermediate_size or h.intermediate_size or 0,
        score=score,
        groups=groups,
        groups_used=groups_used,
        best=min(2 if score == "sigmoid" else 1, n // groups),
        normed=bool(h.extra.get("norm_topk_prob", True)),
        scale=1.0 if scale is None else scale,
        transposed=stacked is not None and stacked.transposed,
        limit=as_float(h.extra.get("swiglu_limit"), "swiglu_limit") or 0.0,
        slope=as_float(h.extra.get("swiglu_alpha"), "swiglu_alpha") or 0.0,
    )


class _LoadBalance(torch.autograd.Function):
    """Scores as they are; their gradient gets that of the auxiliary loss, see `choose_experts`."""

    @staticmethod
    def forward(ctx: Any, scores_SE: Tensor, chosen_SU: Tensor, weight: float) -> Tensor:
        ctx.save_for_backward(chosen_SU)
        ctx.weight = weight
        return scores_SE.view_as(scores_SE)

    @staticmethod
    def backward(ctx: Any, grad_SE: Tensor) -> tuple[Tensor, None, None]:
        (chosen_SU,) = ctx.saved_tensors
        n_tokens, n = grad_SE.shape
        counts_E = grad_SE.new_zeros(n).scatter_add_(0, chosen_SU.flatten(), grad_SE.new_ones(chosen_SU.numel()))
        return grad_SE + counts_E * (ctx.weight * n / n_tokens), None, None


def choose_experts(
    y_SD: Tensor,
    router_ED: Tensor,
    router_bias_E: Tensor | None,
    choice_bias_E: Tensor | None,
    e: Experts,
    balance: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(weights, indices) of each token's experts, [S, U]; weights are float32.

    `choice_bias_E` affects the selection, not the weights. The backward pass adds the gradient of a load-balancing
    loss: `balance` times the sum over tokens of E sum_e f_e p_e, with p_e the token's score of expert e, and f_e the
    number of tokens that chose it, divided by S (Fedus et al. 2021, arXiv:2101.03961, eq. 4, for U choices per token).
    """
    bias_E = None if router_bias_E is None else router_bias_E.float()
    logits_SE = functional.linear(y_SD.float(), router_ED.float(), bias_E)
    scores_SE = logits_SE.softmax(-1) if e.score == "softmax" else logits_SE.sigmoid()
    choice_SE = scores_SE if choice_bias_E is None else scores_SE + choice_bias_E
    if e.groups > e.groups_used:
        grouped = choice_SE.view(len(y_SD), e.groups, -1)
        group_S = grouped.topk(e.best, -1).values.sum(-1).topk(e.groups_used, -1).indices
        taken = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, group_S, True)
        choice_SE = grouped.masked_fill(~taken[..., None], -math.inf).flatten(1)
    chosen_SU = choice_SE.topk(e.used, -1).indices
    if balance and torch.is_grad_enabled():
        scores_SE = _LoadBalance.apply(scores_SE, chosen_SU, balance)  # type: ignore[no-untyped-call]
    weights_SU = scores_SE.gather(1, chosen_SU)
    if e.normed:
        weights_SU = weights_SU / weights_SU.sum(-1, keepdim=True)
    return weights_SU * e.scale, chosen_SU
