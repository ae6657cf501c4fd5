"""GGUF tensors of rope factors: the frequency divisors of llama3, longrope and proportional scaling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from aprfmt.arch.fields import as_float, as_int, shorten
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.rope import (
    DEFAULT_THETA,
    FREQS,
    LONG,
    MAX_HEAD_DIM,
    SHORT,
    full_head_dim,
    halves_full,
    original_context,
    reads_factors,
    rotary_dim,
    scaling_of,
)
from aprfmt.arch.row import Architecture
from aprfmt.errors import RefusedError
from aprfmt.io.jsonx import to_f32

_NEVER = 1e30
"""Divisor of an unrotated pair: its angle stays 0."""

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def factor_tensors(h: Hyperparams, arch: Architecture) -> dict[str, list[float]]:
    """GGUF name -> divisors [rotated dimensions / 2] of this network; {} for most.

    Raises RefusedError for invalid parameters, or lists of another length.
    """
    scaling = scaling_of(h)
    kind = str(scaling.get("rope_type", "default")).lower()
    dim = rotary_dim(h) or 0
    theta = h.rope_theta if h.rope_theta is not None else DEFAULT_THETA
    if kind == "llama3" and reads_factors(arch, FREQS):
        factors = llama3_factors(theta, dim, scaling, h.max_position_embeddings)
        whole = (h.head_dim or 0) // 2 if halves_full(arch) else 0
        return {
            FREQS: factors + [1.0] * (whole - len(factors))
        }  # llama.cpp expects the largest number of pairs of any layer
    if reads_factors(arch, FREQS) and (kind == "proportional" or arch.freqs_always):
        return {FREQS: _proportional(h, scaling)}
    if kind == "longrope" and reads_factors(arch, LONG):
        return {LONG: listed_factors(scaling, "long_factor", dim), SHORT: listed_factors(scaling, "short_factor", dim)}
    return {}


def listed_factors(scaling: Mapping[str, object], key: str, dim: int) -> list[float]:
    """Divisors [dim / 2] listed in `scaling`. Raises RefusedError for a list of another length."""
    values = scaling.get(key)
    if not isinstance(values, list) or len(values) * 2 != dim:
        raise RefusedError(f"rope {key} is not a list of {dim // 2} numbers")
    return [as_float(value, key) or 0.0 for value in values]


def _proportional(h: Hyperparams, scaling: Mapping[str, object]) -> list[float]:
    """The first pairs are rotated as those of the whole head, the others not at all."""
    head = full_head_dim(h) or 0
    if not 0 < head <= MAX_HEAD_DIM:
        raise RefusedError(f"cannot compute rotary frequencies for a head of {head} values")
    if scaling.get("rope_type", "default") != "proportional":
        return [1.0] * (head // 2)
    part = as_float(h.extra.get("partial_rotary_factor"), "partial_rotary_factor")
    factor = as_float(scaling.get("factor"), "factor") or 1.0
    rotated = max(0, min(head // 2, int((1.0 if part is None else part) * head // 2)))
    return [factor] * rotated + [_NEVER] * (head // 2 - rotated)


def read_factor_tensors(h: Hyperparams, tensors: Mapping[str, Sequence[float]]) -> list[str]:
    """Sets the rope scaling from a GGUF's factor tensors; returns warnings about unrecognized ones."""
    warnings = []
    freqs = tensors.get(FREQS)
    if freqs is not None and "factor" not in scaling_of(h) and not _read_proportional(h, freqs):
        n_pairs = (rotary_dim(h) or 0) // 2
        if n_pairs and all(value == 1 for value in freqs[n_pairs:]):
            freqs = freqs[:n_pairs]
        scaling = infer_llama3(freqs, h.rope_theta or DEFAULT_THETA, rotary_dim(h) or 0, scaling_of(h))
        if scaling is not None:
            h.extra["rope_scaling"] = {**scaling_of(h), **scaling}
        elif any(value != 1 for value in freqs):
            warnings.append("the rope frequencies of the GGUF match no known scaling")
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
    `context` (max_position_embeddings) is c if `scaling` states none, as in transformers. Raises RefusedError for
    invalid parameters, CorruptError for anything but numbers.
    """
    usual = {"original_max_position_embeddings": context} if context else {}
    defaults = {**_LLAMA3, **usual}
    values = {key: as_float(scaling.get(key), key) or default for key, default in defaults.items()}
    factor, low, high = values["factor"], values["low_freq_factor"], values["high_freq_factor"]
    original = values["original_max_position_embeddings"]
    if head_dim <= 0 or head_dim % 2 or head_dim > MAX_HEAD_DIM or theta <= 0:
        raise RefusedError(f"cannot compute rotary frequencies for a head of {head_dim} values at theta {theta:g}")
    if high < low or min(factor, low) <= 0:
        raise RefusedError("invalid llama3 rope parameters")
    factors = []
    for i in range(0, head_dim, 2):
        # Rounded to float32 at every step, like the converter's tensors: so the bytes are equal.
        frequency = to_f32(1 / to_f32(theta ** to_f32(i / head_dim)))
        wavelength = to_f32(to_f32(1 / frequency) * to_f32(2 * math.pi)) if frequency else math.inf
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low or high == low:
            factors.append(factor)
        else:
            smooth = to_f32(to_f32(to_f32(to_f32(1 / wavelength) * original) - low) / (high - low))
            factors.append(to_f32(1 / to_f32(to_f32(to_f32(1 - smooth) / factor) + smooth)))
    return factors


def infer_llama3(
    factors: Sequence[float], theta: float, head_dim: int, known: Mapping[str, object] | None = None
) -> dict[str, object] | None:
    """A scaling dict that yields these factors; None if none does.

    Low and high frequency factors and the context can be scaled together without effect. As in most models, low and
    high are assumed to be 1 and 4, or 1 and 1, as in Llama 4, and the context the `known` one, 8192, or another power
    of two; if none of these matches, the context is `known` or 8192, and both factors follow.
    """
    if len(factors) * 2 != head_dim or not factors or not all(map(math.isfinite, factors)) or max(factors) <= 1:
        return None
    key = "original_max_position_embeddings"
    given = [number for number in [as_int((known or {}).get(key), key)] if number]
    usual = ((1.0, high, context) for high in (4.0, 1.0) for context in (*given, 8192, *(1 << n for n in range(3, 25))))
    for low, high, context in (*usual, *_fitted_llama3(factors, theta, head_dim, (given or [8192])[0])):
        if not 0 < low <= high < math.inf:
            continue
        scaling: dict[str, object] = {
            "factor": shorten(max(factors)), "low_freq_factor": low, "high_freq_factor": high, key: context
        }  # fmt: skip
        expected = llama3_factors(theta, head_dim, scaling)
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)):
            return {"rope_type": "llama3", **scaling}
    return None


def _fitted_llama3(
    factors: Sequence[float], theta: float, head_dim: int, context: int
) -> Iterator[tuple[float, float, int]]:
    """Candidates (low, high, context) for the factors, from the line through those between 1 and the largest.

    There 1 / factor is linear in 1 / wavelength. One such factor, or none, leaves a choice of lines: those that start
    between it and the next are tried.
    """
    largest = max(factors)
    waves = [2 * math.pi * theta ** (2 * i / head_dim) for i in range(len(factors))]
    between = [
        (1 / wave, (1 / factor - 1 / largest) / (1 - 1 / largest))
        for wave, factor in zip(waves, factors, strict=True)
        if 1 < factor < largest
    ]
    first = next((wave for wave, factor in zip(waves, factors, strict=True) if factor == largest), 2 * waves[-1])
    before = max((wave for wave, factor in zip(waves, factors, strict=True) if factor == 1), default=waves[0] / 2)
    if len(between) > 1:
        (x, y), (x2, y2) = between[0], between[-1]
        if x != x2 and (slope := (y - y2) / (x - x2)) > 0:
            yield _llama3_line(slope, slope * x - y, context)
        return
    start = 1 / between[0][0] if between else before
    for part in (0.75, *(0.5**i for i in range(1, 16))):
        end = start ** (1 - part) * first**part  # the wavelength from which on the factor is the largest
        x, y = between[0] if between else (1 / (before * end) ** 0.5, 1.0)
        if x <= 1 / end:
            continue
        slope = y / (x - 1 / end)
        yield _llama3_line(slope, slope / end, context)


def _llama3_line(slope: float, offset: float, context: int) -> tuple[float, float, int]:
    """(low, high, context) of s = slope / wavelength - offset."""
    width = context / slope
    return shorten(offset * width), shorten(offset * width + width), context
