"""Rotary embedding parameters in their three spellings: Hugging Face dict, GGUF keys, GGUF factor tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.arch.fields import GgufKey, as_float, as_int, float_key, from_f32, int_key
from aprfmt.errors import CorruptError, RefusedError

DEFAULT_THETA = 10000.0
"""Base frequency where a Hugging Face config names none."""

_MAX_HEAD_DIM = 1 << 20

_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Hugging Face key of a yarn dict -> GGUF suffix; the first name of a suffix is the one given back.
_YARN = {
    "extrapolation_factor": "yarn_ext_factor",
    "attention_factor": "yarn_attn_factor",
    "attn_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def read_hf(config: Mapping[str, Any]) -> tuple[float | None, dict[str, Any] | None]:
    """(theta, scaling) of a config.json in the spelling of transformers 4 or 5.

    The scaling dict has `rope_type` and no theta; None where positions are not scaled. Raises CorruptError.
    """
    found: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise CorruptError(f"config.json: {key} is no object")
        nested = value.get("full_attention")
        found = dict(nested if isinstance(nested, Mapping) else value)
        if found:
            break
    theta = found.pop("rope_theta", None)
    theta = as_float(theta if theta is not None else config.get("rope_theta"), "rope_theta")
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    if not isinstance(kind, str):
        raise CorruptError("config.json: rope_type is no string")
    if kind == "default" and not found:
        return theta, None
    return theta, {"rope_type": kind, **found}


def to_gguf(scaling: Mapping[str, Any] | None, prefix: str, context: int | None) -> list[GgufKey]:
    """GGUF keys of a scaling dict, as llama.cpp's converter writes them; llama3 is a tensor and gives none.

    Raises RefusedError for kinds that need tensors this family has not.
    """
    kind = str(scaling.get("rope_type", "default")).lower() if scaling else "default"
    if not scaling or kind in ("default", "llama3", "dynamic"):
        return []
    if kind not in ("linear", "yarn"):
        raise RefusedError(f"rope scaling {kind!r} has no GGUF form for this architecture")
    base = f"{prefix}.rope.scaling."
    keys: list[GgufKey] = [
        (f"{base}type", "STRING", kind),
        float_key(f"{base}factor", scaling.get("factor", 1.0)),
    ]
    if kind == "yarn":
        original = scaling.get("original_max_position_embeddings") or context
        if original:
            keys.append(int_key(f"{base}original_context_length", original))
        done: set[str] = set()
        for name, suffix in _YARN.items():
            if scaling.get(name) is not None and suffix not in done:
                done.add(suffix)
                keys.append(float_key(base + suffix, scaling[name]))
    return keys


def from_gguf(kv: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    """The scaling dict that GGUF keys describe; None where they describe none. Raises CorruptError."""
    base = f"{prefix}.rope.scaling."
    kind = kv.get(f"{base}type")
    factor = from_f32(kv.get(f"{base}factor"), f"{base}factor")
    # Files from before the scaling keys name a bare linear factor.
    factor = factor or from_f32(kv.get(f"{prefix}.rope.scale_linear"), f"{prefix}.rope.scale_linear")
    if kind is None and factor:
        kind = "linear"
    if kind in (None, "none", ""):
        return None
    if not isinstance(kind, str):
        raise CorruptError(f"{base}type is no string")
    scaling: dict[str, Any] = {"rope_type": kind}
    if factor is not None:
        scaling["factor"] = factor
    original = as_int(kv.get(f"{base}original_context_length"), f"{base}original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    for name, suffix in _YARN.items():
        value = from_f32(kv.get(base + suffix), base + suffix)
        if value is not None and name != "attn_factor":
            scaling[name] = value
    return scaling


def llama3_factors(
    theta: float, head_dim: int, scaling: Mapping[str, Any], context: int | None = None
) -> list[float]:
    """Frequency divisors of `rope_freqs.weight`: F32 [head_dim / 2], by the rule of llama.cpp's converter.

    With f_i = theta^(-2i/d), wavelength w = 2 pi / f_i and original context c: w < c / high gives 1,
    w > c / low the factor, between them 1 / ((1 - s) / factor + s) with s = (c / w - low) / (high - low).
    `context` (max_position_embeddings) is c where `scaling` names none, as in transformers.
    Raises RefusedError for parameters that describe no frequencies, CorruptError for what is no number.
    """
    given = {"original_max_position_embeddings": context} if context else {}
    defaults = {**_LLAMA3, **given}
    values = {key: as_float(scaling.get(key), key) or default for key, default in defaults.items()}
    factor, low, high = values["factor"], values["low_freq_factor"], values["high_freq_factor"]
    original = values["original_max_position_embeddings"]
    if head_dim <= 0 or head_dim % 2 or head_dim > _MAX_HEAD_DIM or theta <= 0:
        raise RefusedError(f"a head of {head_dim} values at theta {theta:g} has no rotary frequencies")
    if high <= low or min(factor, low) <= 0:
        raise RefusedError("the llama3 rope parameters describe no frequencies")
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def infer_llama3(factors: Sequence[float], theta: float, head_dim: int) -> dict[str, Any] | None:
    """The scaling dict that gives these factors (context 8192, low 1, high 4); None if none does."""
    if (
        len(factors) * 2 != head_dim
        or not factors
        or not all(map(math.isfinite, factors))
        or max(factors) <= 1
    ):
        return None
    scaling: dict[str, Any] = {"rope_type": "llama3", **_LLAMA3, "factor": float(max(factors))}
    expected = llama3_factors(theta, head_dim, scaling)
    if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)):
        return scaling
    return None
