"""Rotary position embeddings: frequencies for each kind of scaling, and the rotation of heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aprfmt.arch import rope, rope_factors, yarn
from aprfmt.arch.fields import as_float
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of one layer type.

    Attributes:
        inv_freq: radians per position, [R], each a float32 number; 2 R dimensions of a head are rotated.
        factor: factor of cosines and sines (YaRN's attention factor; 1 for the others).
        long: the frequencies for documents longer than `context`; () if they are the same.
        beta: queries at position p are multiplied by 1 + beta ln(1 + floor(p / context)); 0 for most networks.
        context: original context length before scaling.
    """

    inv_freq: tuple[float, ...]
    factor: float = 1.0
    long: tuple[float, ...] = ()
    beta: float = 0.0
    context: int = 1


_SCALINGS = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")


def rope_of(h: Hyperparams, theta: float, scaling: Mapping[str, object], dim: int) -> Rope:
    """The rotation of `dim` dimensions of a head at base `theta` with the `scaling` dict of a config.json ({} for
    none).

    Raises UnsupportedError for an unknown kind of scaling, RefusedError for invalid parameters.
    """
    kind = str(scaling.get("rope_type", "default")).lower()
    if kind not in _SCALINGS:
        raise UnsupportedError(
            f"rope scaling {kind!r} is not supported for training", hint=f"supported: {', '.join(_SCALINGS)}"
        )
    # `dynamic` has no effect within the context length, unless it has an alpha.
    theta *= (_number(scaling, "alpha", 1.0) or 1.0) ** (dim / (dim - 2)) if kind == "dynamic" and dim > 2 else 1.0
    # Computed in float32 as in transformers, so that angles at long positions are equal.
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inv_freq, factor, long = 1.0 / (theta**exponents), 1.0, ()
    if kind == "proportional":  # the first pairs only; the others have the frequency 0
        part = as_float(h.extra.get("partial_rotary_factor"), "partial_rotary_factor")
        n_rotated = int((1.0 if part is None else part) * dim // 2)
        inv_freq = inv_freq / (_number(scaling, "factor", 1.0) or 1.0) * (torch.arange(dim // 2) < n_rotated)
    elif kind == "linear":
        inv_freq = inv_freq / _number(scaling, "factor", 1.0)
    elif kind == "llama3":
        factors = rope_factors.llama3_factors(theta, dim, scaling, h.max_position_embeddings)
        inv_freq = inv_freq / torch.tensor(factors, dtype=torch.float32)
    elif kind == "yarn":
        inv_freq, factor = _yarn(h, theta, scaling, inv_freq)
    elif kind == "longrope":
        named = (rope_factors.listed_factors(scaling, key, dim) for key in ("short_factor", "long_factor"))
        short, stretched = (1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponents) for factors in named)
        inv_freq, long, factor = short, tuple(stretched.tolist()), rope.attention_factor(h, kind, scaling) or 1.0
    beta, context = _number(scaling, "llama_4_scaling_beta", 0.0), rope.original_context(h, scaling) or 1
    return Rope(tuple(inv_freq.tolist()), factor, long, beta, context)


def _yarn(h: Hyperparams, theta: float, scaling: Mapping[str, object], inv_freq: Tensor) -> tuple[Tensor, float]:
    """Frequencies and attention factor of yarn (Peng et al., arXiv 2309.00071, section 3.2).

    Low frequencies are interpolated, high ones are not. A pair rotates r times within the original context; from
    `beta_fast` rotations on it keeps its frequency f, up to `beta_slow` it gets f / factor, in between a mixture that
    is linear in the index of the pair.
    """
    original = rope.original_context(h, scaling) or 1
    factor = _number(scaling, "factor", 0.0) or (h.max_position_embeddings or original) / original
    betas = _number(scaling, "beta_fast", 32.0), _number(scaling, "beta_slow", 1.0)
    low, high = yarn.ramp_bounds(2 * len(inv_freq), theta, original, betas, whole=bool(scaling.get("truncate", True)))
    pairs = torch.arange(len(inv_freq), dtype=torch.float32)
    slow = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    attention = rope.attention_factor(h, "yarn", scaling)
    mixed = inv_freq / factor * slow + inv_freq * (1 - slow)
    return mixed, rope.mscale_of(factor) if attention is None else attention


def yarn_scale(scaling: Mapping[str, object]) -> float:
    """The factor of latent attention scores under YaRN."""
    stretch, all_dim = (_number(scaling, key, 0.0) for key in ("factor", "mscale_all_dim"))
    return rope.mscale_of(stretch, all_dim) ** 2 if all_dim and scaling.get("rope_type") != "default" else 1.0


def _number(scaling: Mapping[str, object], key: str, default: float) -> float:
    value = as_float(scaling.get(key), key)
    return default if value is None else value


CosSin = tuple[Tensor, Tensor, Tensor | None]
"""Cosines and sines [N, T, 1, R] of positions, and the factors of queries, [N, T, 1, 1]; all float32."""


def inverse_frequencies(kind: Rope, device: torch.device) -> Tensor:
    """Frequencies for short and for long documents, [2, R], float32."""
    return torch.tensor((kind.inv_freq, kind.long or kind.inv_freq), dtype=torch.float32, device=device)


def cos_sin_of(kind: Rope, inv_freq_2R: Tensor, positions_NT: Tensor, lengths_NT: Tensor) -> CosSin:
    """Cosines and sines at these positions in documents of these lengths, from `inverse_frequencies`."""
    inv_freq = inv_freq_2R[(lengths_NT > kind.context).long()][:, :, None] if kind.long else inv_freq_2R[0]
    angles = positions_NT[..., None, None].float() * inv_freq
    warmth = None
    if kind.beta:
        steps = torch.floor(positions_NT[..., None, None].float() / kind.context)
        warmth = 1 + kind.beta * torch.log(1 + steps)
    return angles.cos() * kind.factor, angles.sin() * kind.factor, warmth


def rotate(x_NTHE: Tensor, cos_sin: CosSin, adjacent: bool) -> Tensor:
    """Rotates the first 2 R dimensions of each head, in float32; the others are unchanged.

    Pairs are dimensions i and i + R, or `adjacent` ones, depending on the row order of Q and K in the network's
    checkpoints.
    """
    cos, sin, _ = cos_sin
    wide = x_NTHE.to(torch.promote_types(x_NTHE.dtype, torch.float32))
    turned, rest = wide[..., : 2 * cos.shape[-1]], wide[..., 2 * cos.shape[-1] :]
    first, second = (turned[..., ::2], turned[..., 1::2]) if adjacent else turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if adjacent else torch.cat(pair, dim=-1)
    return (torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated).to(x_NTHE.dtype)
