"""Converters of hyper-parameters that Gemma, Cohere and Phi have, beside those of arch.values."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.fields import as_float, as_int, from_f32
from aprfmt.arch.rope_math import scaling_of
from aprfmt.arch.values.base import (
    DEFAULT,
    FULL,
    LAYER_TYPES,
    Converter,
    Scope,
    default,
    layer_types_from,
    layer_types_to,
    periodic,
    plain_head_dim,
)
from aprfmt.errors import RefusedError

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
    none_slides = isinstance(kinds, list) and "sliding_attention" not in kinds
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


def _softcap_to(value: object, scope: Scope) -> float:
    number = as_float(value, scope.name)
    return number if number else _NO_CAP


def _softcap_from(value: object, scope: Scope) -> object:
    number = from_f32(value, scope.key.gguf)
    return DEFAULT if number is None else number if 0 < number < _NO_CAP else None


def _unscaled_to(value: object, scope: Scope) -> str | None:
    return "none" if scaling_of(scope.h).get("rope_type", "default") in ("default", "dynamic") else None


CONVERTERS: dict[str, Converter] = {
    "some_layer_types": replace(LAYER_TYPES, to_gguf=_some_layers_to),
    "own_layer_types": replace(LAYER_TYPES, to_gguf=_own_layers_to),
    "any_layer_types": replace(LAYER_TYPES, to_gguf=_any_layers_to, from_gguf=_any_layers_from),
    "any_window": Converter(_any_window_to, lambda value, scope: as_int(value, scope.key.gguf) or DEFAULT),
    "query_scale": Converter(
        _query_scale_to, lambda value, scope: DEFAULT if (scale := _query_scale(scope)) is None else scale
    ),
    "softcap": Converter(_softcap_to, _softcap_from),
    # Command-R has few positions, and under another key those that it was trained with.
    "trained_length": Converter(lambda value, scope: scope.size("model_max_length") or value),
    "unscaled": Converter(_unscaled_to, default),
}
"""What a Key's `via` names."""
