"""Token mixers other than attention, within documents: short convolutions and the gated delta rule.

Shape suffixes: N rows of a batch, T positions, C channels, W taps of a convolution; H heads, K and V the sizes of a
key and a value; L chunks of S positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from aprtrain.network.attention import AttentionPlan

_CHUNK = 64
"""Positions that the delta rule computes at once."""


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The sizes of gated delta networks: heads of keys and of values, and the sizes of each.

    `grouped` if the rows of the projections are ordered by heads of keys, as Qwen3-Next's are.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    grouped: bool = False

    def split(self, fused_NTR: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The projections in the fused rows: Q, K and V of all heads; the output gate; learning rates; decays."""
        k, v, n = self.k_heads * self.k_dim, self.v_heads * self.v_dim, self.v_heads
        if not self.grouped:
            qkv, z, beta, decay = torch.split(fused_NTR, [2 * k + v, v, n, n], -1)
            return qkv, z, beta, decay
        parts = torch.split(fused_NTR, [2 * k + 2 * v, 2 * n], -1)
        wide, few = (x.view(*x.shape[:-1], self.k_heads, -1) for x in parts)
        q, keys, values, z = torch.split(wide, [self.k_dim] * 2 + [v // self.k_heads] * 2, -1)
        beta, decay = few.chunk(2, -1)
        qkv = torch.cat([x.flatten(-2) for x in (q, keys, values)], -1)
        return qkv, z.flatten(-2), beta.flatten(-2), decay.flatten(-2)

    @property
    def n_values(self) -> int:
        """Values per token that `delta_rule` keeps for the backward pass, in halves of a float32 number."""
        within, states = 9 * max(self.k_dim, self.v_dim) + 8 * _CHUNK, 2 * self.k_dim * self.v_dim // _CHUNK
        return 2 * self.v_heads * (within + states)


def causal_conv(x_NTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, plan: AttentionPlan) -> Tensor:
    """Convolves each channel over the last W positions of the document, in float32; the last tap is of the position."""
    assert plan.positions_NT is not None
    t, before = x_NTC.shape[1], weight_CW.shape[1] - 1
    if plan.cache is None:
        seen = functional.pad(x_NTC, (0, 0, before, 0))
    else:
        kept = plan.cache.state("conv", x_NTC, len(x_NTC), before, x_NTC.shape[2])
        seen = torch.cat((kept, x_NTC), 1)
        kept.copy_(seen[:, t:])
    seen, weight_WC = seen.to(torch.promote_types(x_NTC.dtype, torch.float32)), weight_CW.t()
    y_NTC = seen[:, before:] * weight_WC[before] + (0 if bias_C is None else bias_C)
    for back in range(1, before + 1):
        tap_NTC = weight_WC[before - back] * (plan.positions_NT >= back)[..., None]
        y_NTC = y_NTC + seen[:, before - back : before - back + t] * tap_NTC
    return y_NTC.to(x_NTC.dtype)


def delta_rule(
    q_NTHK: Tensor, k_NTHK: Tensor, v_NTHV: Tensor, decay_NTH: Tensor, beta_NTH: Tensor, plan: AttentionPlan
) -> Tensor:
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464), [N, T, H, V] in the dtype of the inputs.

    The state S [K, V] of a head is zero before a document. A position makes it e^g (S - beta k (k S)) + beta k v, where
    g is its `decay_NTH`, and reads q S. Computed chunk by chunk: within a chunk all positions at once, by a triangular
    system (the paper's section 3.3).
    """
    positions_NT, t = plan.positions_NT, q_NTHK.shape[1]
    assert positions_NT is not None
    size = min(_CHUNK, t)
    n_pad = -t % size
    step_S = torch.arange(size, device=positions_NT.device)

    def chunked(x: Tensor) -> Tensor:
        """[N, T, H, ...] as [N, H, L, S, ...]."""
        padded = functional.pad(x, (0, 0) * (x.ndim - 2) + (0, n_pad))
        return padded.view(len(x), -1, size, *x.shape[2:]).movedim(3, 1)

    q, k, v, decay, beta = map(chunked, (q_NTHK, k_NTHK, v_NTHV, decay_NTH, beta_NTH))
    padding = positions_NT[:, -1:] + step_S[:n_pad] + 1
    place_NLS = torch.cat((positions_NT, padding), 1).view(len(q), -1, size)
    back_SS = step_S[:, None] - step_S
    together = ((back_SS >= 0) & (place_NLS[..., None] >= back_SS))[:, None]  # in one document
    # Sums of the decays between two positions: differences of sums from the start would lose digits.
    sums = decay[..., None].expand(*decay.shape, size).masked_fill(back_SS <= 0, 0.0).cumsum(-2)
    between = sums.masked_fill(~together, -torch.inf).exp()
    since_start = decay.cumsum(-1).exp() * (place_NLS > step_S)[:, None]  # 0 if the document began in the chunk
    k_beta = k * beta[..., None]
    sides = torch.cat((v * beta[..., None], k_beta * since_start[..., None]), -1)
    system = (k_beta @ k.mT) * between
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    new, old = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
    inner, q, k = (q @ k.mT) * between, q * since_start[..., None], k * between[..., -1, :, None]
    sizes = len(q), q.shape[1], k.shape[-1], v.shape[-1]
    kept = None if plan.cache is None else plan.cache.state("delta", q, *sizes)
    state, found = q.new_zeros(sizes) if kept is None else kept.clone(), []
    for chunk in range(q.shape[2]):
        change = new[:, :, chunk] - old[:, :, chunk] @ state
        found.append(q[:, :, chunk] @ state + inner[:, :, chunk] @ change)
        state = state * since_start[:, :, chunk, -1, None, None] + k[:, :, chunk].mT @ change
    if kept is not None:
        kept.copy_(state)
    return torch.stack(found, 2).movedim(1, 3).flatten(1, 2)[:, :t]
