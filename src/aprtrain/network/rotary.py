"""Rotary positions in numbers: the frequencies of a network, and the rotation itself.

Shape suffixes: N rows of a batch, T positions, H heads, E values of a head, R = E / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aprfmt.arch import rope
from aprfmt.arch.fields import as_float
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of one kind of layers.

    Attributes:
        inv_freq: radians a position, [R], each a float32 number.
        factor: what cosines and sines are multiplied with (yarn's attention factor; 1 for the others).
    """

    inv_freq: tuple[float, ...]
    factor: float = 1.0


_KINDS = ("default", "dynamic", "linear", "llama3", "yarn")


def rope_of(h: Hyperparams, theta: float, scaling: Mapping[str, object]) -> Rope:
    """The rotation at base `theta` under the `scaling` dict of a config.json ({} for none).

    Raises UnsupportedError for a kind of scaling whose frequencies depend on the length of the text.
    """
    dim = h.head_dim or 0
    if rope.rotary_dim(h) != dim or dim % 2 or dim < 2:
        raise UnsupportedError(f"heads of {dim} values rotated in part cannot be trained")
    kind = str(scaling.get("rope_type", "default")).lower()
    if kind not in _KINDS or (kind == "dynamic" and scaling.get("alpha")):
        raise UnsupportedError(
            f"rope scaling {kind!r} cannot be trained",
            hint=f"known are {', '.join(_KINDS)} (dynamic without alpha)",
        )
    # Computed in float32 as transformers does it, so that long positions give the same angles.
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inv_freq, factor = 1.0 / (theta**exponents), 1.0
    # `dynamic` changes nothing within the positions that a network is made for.
    if kind == "linear":
        inv_freq = inv_freq / _number(scaling, "factor", 1.0)
    elif kind == "llama3":
        factors = rope.llama3_factors(theta, dim, scaling, h.max_position_embeddings)
        inv_freq = inv_freq / torch.tensor(factors, dtype=torch.float32)
    elif kind == "yarn":
        inv_freq, factor = _yarn(h, theta, scaling, inv_freq)
    return Rope(tuple(inv_freq.tolist()), factor)


def _yarn(
    h: Hyperparams, theta: float, scaling: Mapping[str, object], inv_freq: Tensor
) -> tuple[Tensor, float]:
    """Frequencies and attention factor of yarn (Peng et al., arXiv 2309.00071, section 3.2).

    Slow pairs are stretched, fast ones are not. A pair turns r times within the original context; from `beta_fast`
    turns on it keeps its frequency f, up to `beta_slow` it gets f / factor, between them a mixture that is linear in
    the number of the pair.
    """
    original = rope.original_context(h, scaling) or 1
    factor = _number(scaling, "factor", 0.0) or (h.max_position_embeddings or original) / original
    dim = 2 * len(inv_freq)

    def pair_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_of(_number(scaling, "beta_fast", 32.0))
    high = pair_of(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    pairs = torch.arange(len(inv_freq), dtype=torch.float32)
    slow = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    attention = rope.attention_factor(h, "yarn", scaling)
    mixed = inv_freq / factor * slow + inv_freq * (1 - slow)
    return mixed, rope.mscale_of(factor) if attention is None else attention


def _number(scaling: Mapping[str, object], key: str, default: float) -> float:
    value = as_float(scaling.get(key), key)
    return default if value is None else value


def tables(rope: tuple[Tensor, float], positions_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, T, 1, R] of positions, float32, by the frequencies [R] and the factor of a Rope."""
    inv_freq_R, factor = rope
    angles = positions_NT[..., None, None].float() * inv_freq_R
    return angles.cos() * factor, angles.sin() * factor


def rotate(x_NTHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each half of a head against the other, in float32, as Hugging Face orders the rows of Q and K."""
    wide = x_NTHE.to(torch.promote_types(x_NTHE.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_NTHE.dtype)
