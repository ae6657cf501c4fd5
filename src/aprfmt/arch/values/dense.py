"""Converters of hyper-parameters that Llama's kin has, beside those of arch.values."""

from __future__ import annotations

from aprfmt.arch.fields import as_float, as_id, from_f32
from aprfmt.arch.rope_math import scaling_of
from aprfmt.arch.values.base import (
    DEFAULT,
    FULL,
    YARN_LOG,
    Converter,
    Scope,
    default,
    layer_types_fill,
    layer_types_from,
    layer_types_to,
    nothing,
    window_to,
)
from aprfmt.errors import RefusedError

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


def _pad_token_from(value: object, scope: Scope) -> int | None:
    key = "tokenizer.ggml.padding_token_id"
    return as_id(scope.kv.get(key), key)


_BETA = "llama_4_scaling_beta"


def _temperature_to(value: object, scope: Scope) -> float | None:
    return as_float(scaling_of(scope.h).get(_BETA), _BETA) or None


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


CONVERTERS: dict[str, Converter] = {
    "every_fourth": Converter(_rotated_to, lambda value, scope: _rotated_fill(scope), _rotated_fill),
    "whole_heads": Converter(_whole_heads_to, default),
    "sliding_layers": Converter(_sliding_to, _sliding_from, layer_types_fill),
    "pad_token": Converter(nothing, _pad_token_from),
    "llama_4_scaling": Converter(_temperature_to, _temperature_from),
    "unit_mscale": Converter(YARN_LOG.to_gguf, _unit_mscale_from),
}
"""What a Key's `via` names."""
