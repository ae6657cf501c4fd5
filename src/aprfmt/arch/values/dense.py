"""Converters of hyper-parameters that dense decoders have, beside those of base: Llama's kin, Gemma, Cohere, Phi."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.fields import as_float, as_id, as_int, from_f32
from aprfmt.arch.rope import scaling_of
from aprfmt.arch.values.base import (
    DEFAULT,
    FULL,
    LAYER_TYPES,
    SLIDING,
    YARN_LOG,
    Converter,
    Scope,
    default,
    layer_types_fill,
    layer_types_from,
    layer_types_to,
    nothing,
    periodic,
    plain_head_dim,
    window_to,
)
from aprfmt.errors import RefusedError

# --- Llama's kin ---

_STEP = 4
"""SmolLM3's runtime leaves every fourth layer unrotated, whatever a file says."""


def _rotated(n_layers: int, step: int) -> list[int]:
    return [int((i + 1) % step != 0) for i in range(n_layers)]


def _rotated_fill(scope: Scope) -> list[int]:
    step = scope.h.extra.get("no_rope_layer_interval")
    return _rotated(scope.h.num_layers or 0, step if isinstance(step, int) and step > 0 else _STEP)


def _rotated_to(value: object, scope: Scope) -> None:
    if isinstance(value, list) and [int(bool(item)) for item in value] != _rotated(len(value), _STEP):
        raise RefusedError(
            f"{scope.name}: llama.cpp's {scope.row.gguf} leaves every fourth layer unrotated, no other"
        )


def _whole_heads_to(value: object, scope: Scope) -> None:
    """The runtime has no other size of the projections than hidden_size."""
    h = scope.h
    if h.head_dim and h.hidden_size and h.num_heads and h.num_heads * h.head_dim != h.hidden_size:
        raise RefusedError(
            f"{h.num_heads} heads of {h.head_dim} values: llama.cpp's {scope.row.gguf} loads heads that make up the "
            f"hidden size, {h.hidden_size}"
        )


def _sliding_to(value: object, scope: Scope) -> object:
    """A network without a window has no pattern of windows."""
    return layer_types_to(value, scope) if window_to(scope.h.extra.get("sliding_window"), scope) else None


def _sliding_from(value: object, scope: Scope) -> object:
    if value is None and not scope.gguf("attention.sliding_window"):
        return [FULL] * (scope.h.num_layers or 0)
    return layer_types_from(value, scope)


_BETA, _PADDING = "llama_4_scaling_beta", "tokenizer.ggml.padding_token_id"


def _temperature_from(value: object, scope: Scope) -> object:
    """transformers has no Ministral 3 without a temperature: 0 is what changes nothing."""
    original = "original_max_position_embeddings"
    scope.h.extra["rope_scaling"] = {
        "rope_type": "default",
        original: scope.h.max_position_embeddings,
        **scaling_of(scope.h),
        _BETA: from_f32(value, scope.key.gguf) or 0.0,
    }
    return DEFAULT


def _unit_mscale_from(value: object, scope: Scope) -> object:
    """`mscale_all_dim` of a runtime that takes `mscale` for 1."""
    scaling = scope.h.extra.get("rope_scaling")
    if value is not None and isinstance(scaling, dict):
        scaling.setdefault("mscale", 1.0)
    return YARN_LOG.from_gguf(value, scope)


# --- Gemma, Cohere, Phi ---

_NO_CAP = float(1 << 20)
"""A soft-cap so wide that it changes no float32 logit: the runtime has no way to switch it off."""

_WIDE_HEADS = {"gemma2": 46, "gemma3": 62}
"""GGUF name -> layers of the one size that scales by hidden / heads, which the runtime tells by their number."""


def _own_layers_to(value: object, scope: Scope) -> list[bool] | None:
    """Layer types that are not those that the runtime takes where a file names none."""
    sliding = layer_types_to(value, scope)
    period = as_int(scope.defaults.get("sliding_window_pattern"), "sliding_window_pattern")
    if sliding is None or not period:
        return sliding
    return None if sliding == periodic(period, len(sliding)) else sliding


def _some_layers_to(value: object, scope: Scope) -> list[bool] | None:
    """The runtime asserts that some layer slides, and a file of this architecture cannot say that none does."""
    sliding = layer_types_to(value, scope)
    if sliding and not any(sliding):
        raise RefusedError(f"{scope.name}: llama.cpp's {scope.row.gguf} needs at least one sliding layer")
    return _own_layers_to(value, scope)


def _any_window_to(value: object, scope: Scope) -> int | None:
    """Gemma 3's runtime takes a window to mean that some layer slides."""
    kinds = scope.h.extra.get("layer_types")
    none_slides = isinstance(kinds, list) and SLIDING not in kinds
    return None if none_slides else as_int(value, scope.name) or None


def _any_layers_to(value: object, scope: Scope) -> list[bool] | None:
    sliding = _own_layers_to(value, scope)
    return sliding if sliding and any(sliding) else None


def _any_layers_from(value: object, scope: Scope) -> object:
    if not scope.gguf("attention.sliding_window"):
        return [FULL] * (scope.h.num_layers or 0)
    return layer_types_from(value, scope)


def _query_scale(scope: Scope) -> int | None:
    """What llama.cpp divides attention scores by the root of."""
    wide = scope.h.num_layers == _WIDE_HEADS.get(scope.row.gguf)
    return plain_head_dim(scope.h) if wide else scope.h.head_dim


def _query_scale_to(value: object, scope: Scope) -> None:
    number, runtime = as_float(value, scope.name), _query_scale(scope)
    if number is not None and runtime is not None and number != runtime:
        raise RefusedError(
            f"{scope.name} is {number:g}; llama.cpp's {scope.row.gguf} of these dimensions scales by {runtime}",
            hint="a GGUF has no key for it",
        )


def _softcap_from(value: object, scope: Scope) -> object:
    number = from_f32(value, scope.key.gguf)
    return DEFAULT if number is None else number if 0 < number < _NO_CAP else None


def _unscaled_to(value: object, scope: Scope) -> str | None:
    return "none" if scaling_of(scope.h).get("rope_type", "default") in ("default", "dynamic") else None


CONVERTERS: dict[str, Converter] = {
    "every_fourth": Converter(_rotated_to, lambda value, scope: _rotated_fill(scope), _rotated_fill),
    "whole_heads": Converter(_whole_heads_to, default),
    "sliding_layers": Converter(_sliding_to, _sliding_from, layer_types_fill),
    "pad_token": Converter(nothing, lambda value, scope: as_id(scope.kv.get(_PADDING), _PADDING)),
    "llama_4_scaling": Converter(
        lambda value, scope: as_float(scaling_of(scope.h).get(_BETA), _BETA) or None, _temperature_from
    ),
    "unit_mscale": Converter(YARN_LOG.to_gguf, _unit_mscale_from),
    "some_layer_types": replace(LAYER_TYPES, to_gguf=_some_layers_to),
    "own_layer_types": replace(LAYER_TYPES, to_gguf=_own_layers_to),
    "any_layer_types": replace(LAYER_TYPES, to_gguf=_any_layers_to, from_gguf=_any_layers_from),
    "any_window": Converter(_any_window_to, lambda value, scope: as_int(value, scope.key.gguf) or DEFAULT),
    "query_scale": Converter(
        _query_scale_to, lambda value, scope: DEFAULT if (scale := _query_scale(scope)) is None else scale
    ),
    "softcap": Converter(lambda value, scope: as_float(value, scope.name) or _NO_CAP, _softcap_from),
    # Command-R has few positions, and under another key those that it was trained with.
    "trained_length": Converter(lambda value, scope: scope.size("model_max_length") or value),
    "unscaled": Converter(_unscaled_to, default),
}
