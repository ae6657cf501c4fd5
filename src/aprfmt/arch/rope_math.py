"""What rotary parameters mean in numbers: rotated dims, attention factors, the GGUF tensors of frequency divisors."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

from aprfmt.arch.fields import as_float, as_int, shorten
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Architecture
from aprfmt.errors import CorruptError, RefusedError

DEFAULT_THETA = 10000.0
"""Base frequency where a Hugging Face config names none."""

FREQS = "rope_freqs.weight"
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"

_MAX_HEAD_DIM = 1 << 20
_NEVER = 1e30
"""Divisor of a pair that is not rotated: its angle stays 0."""

_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def scaling_of(h: Hyperparams) -> dict[str, object]:
    """The scaling dict, {} where there is none. Raises CorruptError for what is none."""
    scaling = h.extra.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CorruptError("rope_scaling is not an object")
    return dict(scaling)


def rotary_dim(h: Hyperparams) -> int | None:
    """Rotated values of a head; None where the size of a head is unknown."""
    part = as_float(h.extra.get("partial_rotary_factor"), "partial_rotary_factor")
    if h.head_dim is None or part is None:
        return h.head_dim
    return int(h.head_dim * part)


def original_context(h: Hyperparams, scaling: Mapping[str, object]) -> int | None:
    """Positions before stretching: of the scaling dict, of the config, else all positions."""
    key = "original_max_position_embeddings"
    value = scaling.get(key) or h.extra.get(key) or h.max_position_embeddings
    return as_int(value, key)


def mscale_of(factor: float, mscale: float = 1.0) -> float:
    """Yarn's attention factor for a stretch of `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_factor(h: Hyperparams, kind: str, scaling: Mapping[str, object]) -> float | None:
    """What cosines and sines are multiplied with, as transformers computes it; None for the usual of yarn."""
    for name in ("attention_factor", "attn_factor"):
        if (number := as_float(scaling.get(name), name)) is not None:
            return number if number > 0 else None
    factor = as_float(scaling.get("factor"), "factor")
    if kind == "longrope":
        return _longrope_attention(h, scaling, factor)
    mscale, all_dim = (as_float(scaling.get(name), name) for name in ("mscale", "mscale_all_dim"))
    if factor and mscale and all_dim and mscale > 0 and all_dim > 0:
        return mscale_of(factor, mscale) / mscale_of(factor, all_dim)
    return None


def _longrope_attention(h: Hyperparams, scaling: Mapping[str, object], factor: float | None) -> float | None:
    original = original_context(h, scaling)
    if not original or original < 2:
        return None
    if factor is None and h.max_position_embeddings:
        factor = h.max_position_embeddings / original
    return 1.0 if not factor or factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def factor_tensors(h: Hyperparams, arch: Architecture) -> dict[str, list[float]]:
    """GGUF name -> divisors [rotated values of a head / 2] that this network needs; {} for most.

    Raises RefusedError for parameters that describe no frequencies, or lists of another length.
    """
    scaling = scaling_of(h)
    kind = str(scaling.get("rope_type", "default")).lower()
    dim = rotary_dim(h) or 0
    theta = h.rope_theta if h.rope_theta is not None else DEFAULT_THETA
    if kind == "llama3" and FREQS in arch.gguf_only:
        return {FREQS: llama3_factors(theta, dim, scaling, h.max_position_embeddings)}
    if kind == "proportional" and FREQS in arch.gguf_only:
        return {FREQS: _proportional(h, scaling)}
    if kind == "longrope" and LONG in arch.gguf_only:
        return {LONG: _listed(scaling, "long_factor", dim), SHORT: _listed(scaling, "short_factor", dim)}
    return {}


def _listed(scaling: Mapping[str, object], key: str, dim: int) -> list[float]:
    values = scaling.get(key)
    if not isinstance(values, list) or len(values) * 2 != dim:
        raise RefusedError(f"rope {key} is not a list of {dim // 2} numbers")
    return [as_float(value, key) or 0.0 for value in values]


def _proportional(h: Hyperparams, scaling: Mapping[str, object]) -> list[float]:
    """The first pairs are rotated as those of the whole head would be, the others not at all."""
    head = h.head_dim or 0
    if not 0 < head <= _MAX_HEAD_DIM:
        raise RefusedError(f"a head of {head} values has no rotary frequencies")
    part = as_float(h.extra.get("partial_rotary_factor"), "partial_rotary_factor")
    factor = as_float(scaling.get("factor"), "factor") or 1.0
    rotated = max(0, min(head // 2, int((1.0 if part is None else part) * head // 2)))
    return [factor] * rotated + [_NEVER] * (head // 2 - rotated)


def read_factor_tensors(h: Hyperparams, tensors: Mapping[str, Sequence[float]]) -> list[str]:
    """Sets the rope scaling of a GGUF's factor tensors; gives warnings about those that mean nothing known."""
    warnings = []
    freqs = tensors.get(FREQS)
    if freqs is not None and "factor" not in scaling_of(h):
        scaling = infer_llama3(freqs, h.rope_theta or DEFAULT_THETA, rotary_dim(h) or 0, scaling_of(h))
        if scaling is not None:
            h.extra["rope_scaling"] = scaling
        elif not _read_proportional(h, freqs) and any(value != 1 for value in freqs):
            warnings.append("the rope frequencies of the GGUF are not those of a known scaling")
    if LONG in tensors and SHORT in tensors:
        scaling = {**scaling_of(h), "rope_type": "longrope"}
        scaling["short_factor"] = [shorten(value) for value in tensors[SHORT]]
        scaling["long_factor"] = [shorten(value) for value in tensors[LONG]]
        if original := original_context(h, scaling):
            scaling["original_max_position_embeddings"] = original
        h.extra["rope_scaling"] = scaling
    return warnings


def _read_proportional(h: Hyperparams, freqs: Sequence[float]) -> bool:
    rotated = sum(1 for value in freqs if value < _NEVER / 2)
    if rotated in (0, len(freqs)) or len(set(freqs[:rotated])) != 1 or min(freqs[rotated:]) < _NEVER / 2:
        return False
    scaling: dict[str, object] = {**scaling_of(h), "rope_type": "proportional"}
    if freqs[0] != 1:
        scaling["factor"] = shorten(freqs[0])
    h.extra["rope_scaling"] = scaling
    h.extra["partial_rotary_factor"] = rotated / len(freqs)
    return True


def llama3_factors(
    theta: float, head_dim: int, scaling: Mapping[str, object], context: int | None = None
) -> list[float]:
    """Frequency divisors of `rope_freqs.weight`: F32 [head_dim / 2], by the rule of llama.cpp's converter.

    With f_i = theta^(-2i/d), wavelength w = 2 pi / f_i and original context c: w < c / high gives 1,
    w > c / low the factor, between them 1 / ((1 - s) / factor + s) with s = (c / w - low) / (high - low).
    `context` (max_position_embeddings) is c where `scaling` names none, as in transformers.
    Raises RefusedError for parameters that describe no frequencies, CorruptError for what is not a number.
    """
    usual = {"original_max_position_embeddings": context} if context else {}
    defaults = {**_LLAMA3, **usual}
    values = {key: as_float(scaling.get(key), key) or default for key, default in defaults.items()}
    factor, low, high = values["factor"], values["low_freq_factor"], values["high_freq_factor"]
    original = values["original_max_position_embeddings"]
    if head_dim <= 0 or head_dim % 2 or head_dim > _MAX_HEAD_DIM or theta <= 0:
        raise RefusedError(f"a head of {head_dim} values at theta {theta:g} has no rotary frequencies")
    if high <= low or min(factor, low) <= 0:
        raise RefusedError("the llama3 rope parameters describe no frequencies")
    factors = []
    for i in range(0, head_dim, 2):
        # Rounded to float32 at every step, as the converter's tensors are: so the bytes are the same.
        frequency = _f32(1 / _f32(theta ** _f32(i / head_dim)))
        wavelength = _f32(_f32(1 / frequency) * _f32(2 * math.pi)) if frequency else math.inf
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = _f32(_f32(_f32(_f32(1 / wavelength) * original) - low) / (high - low))
            factors.append(_f32(1 / _f32(_f32(_f32(1 - smooth) / factor) + smooth)))
    return factors


def _f32(value: float) -> float:
    """The float32 nearest to `value`; infinite beyond its range."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf


def infer_llama3(
    factors: Sequence[float], theta: float, head_dim: int, known: Mapping[str, object] | None = None
) -> dict[str, object] | None:
    """A scaling dict that gives these factors; None if none does.

    Low and high frequency factors are taken for 1 and 4, as all models have them: they and the context can be scaled
    together without a difference. The context is the `known` one, 8192, or another power of two that fits.
    """
    if (
        len(factors) * 2 != head_dim
        or not factors
        or not all(map(math.isfinite, factors))
        or max(factors) <= 1
    ):
        return None
    key = "original_max_position_embeddings"
    given = [known[key]] if known and known.get(key) else []
    for context in (*given, 8192, *(1 << n for n in range(3, 25))):
        scaling: dict[str, object] = {**_LLAMA3, "factor": shorten(max(factors)), key: context}
        expected = llama3_factors(theta, head_dim, scaling)
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)):
            return {"rope_type": "llama3", **scaling}
    return None
