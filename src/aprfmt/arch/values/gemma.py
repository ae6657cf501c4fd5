"""Converters of hyper-parameters that Gemma, Cohere and Phi have, beside those of arch.values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aprfmt.arch.fields import as_float, as_int, from_f32
from aprfmt.arch.rope import scaling_of
from aprfmt.arch.values.base import CONVERTERS as COMMON
from aprfmt.arch.values.base import DEFAULT, Converter, Side, plain_head_dim
from aprfmt.errors import RefusedError

_LAYER_TYPES = COMMON["layer_types"]

_NO_CAP = float(1 << 20)
"""A soft-cap so wide that it changes no float32 logit: the runtime has no way to switch it off."""

_WIDE_HEADS = {"gemma2": 46, "gemma3": 62}
"""GGUF name -> layers of the one size that scales by hidden / heads, which the runtime tells by their number."""


def _own_layers_to(value: Any, side: Side) -> Any:
    """Layer types that are not those that the runtime takes where a file names none."""
    sliding = _LAYER_TYPES.to_gguf(value, side)
    period = as_int(side.defaults.get("sliding_window_pattern"), "sliding_window_pattern")
    if sliding is None or not period:
        return sliding
    return None if sliding == [bool((i + 1) % period) for i in range(len(sliding))] else sliding


def _some_layers_to(value: Any, side: Side) -> Any:
    """The runtime asserts that some layer slides, and a file of this architecture cannot say that none does."""
    sliding = _LAYER_TYPES.to_gguf(value, side)
    if sliding and not any(sliding):
        raise RefusedError(
            f"{side.key.hf[0]}: llama.cpp's {side.row.gguf} runs with a sliding layer at least"
        )
    return _own_layers_to(value, side)


def _any_window_to(value: Any, side: Side) -> int | None:
    """Gemma 3's runtime takes a window to mean that some layer slides."""
    kinds = side.h.extra.get("layer_types")
    none_slides = isinstance(kinds, list) and "sliding_attention" not in kinds
    return None if none_slides else as_int(value, side.key.hf[0]) or None


def _any_layers_to(value: Any, side: Side) -> Any:
    sliding = _own_layers_to(value, side)
    return sliding if sliding and any(sliding) else None


def _any_layers_from(value: Any, side: Side) -> Any:
    if not side.gguf("attention.sliding_window"):
        return ["full_attention"] * (side.h.num_layers or 0)
    return _LAYER_TYPES.from_gguf(value, side)


def _query_scale(side: Side) -> int | None:
    """What llama.cpp divides attention scores by the root of."""
    wide = side.h.num_layers == _WIDE_HEADS.get(side.row.gguf)
    return plain_head_dim(side.h) if wide else side.h.head_dim


def _query_scale_to(value: Any, side: Side) -> None:
    number, runtime = as_float(value, side.key.hf[0]), _query_scale(side)
    if number is not None and runtime is not None and number != runtime:
        raise RefusedError(
            f"{side.key.hf[0]} is {number:g}; llama.cpp's {side.row.gguf} of these dimensions scales by {runtime}",
            hint="a GGUF has no key for it",
        )


def _query_scale_from(value: Any, side: Side) -> Any:
    scale = _query_scale(side)
    return DEFAULT if scale is None else scale


def _softcap_to(value: Any, side: Side) -> float:
    number = as_float(value, side.key.hf[0])
    return number if number else _NO_CAP


def _softcap_from(value: Any, side: Side) -> Any:
    number = from_f32(value, side.key.gguf)
    return DEFAULT if number is None else number if 0 < number < _NO_CAP else None


def _never_to(value: Any, side: Side) -> None:
    if value:
        raise RefusedError(
            f"{side.key.hf[0]} is {value!r:.40}, which llama.cpp's {side.row.gguf} cannot compute"
        )


def _trained_length(value: Any, side: Side) -> int | None:
    """Command-R's config has few positions, and under another key those that it was trained with."""
    return as_int(side.h.extra.get("model_max_length"), "model_max_length") or as_int(value, side.key.hf[0])


def _unscaled_to(value: Any, side: Side) -> str | None:
    return "none" if scaling_of(side.h).get("rope_type", "default") in ("default", "dynamic") else None


CONVERTERS: dict[str, Converter] = {
    "some_layer_types": replace(_LAYER_TYPES, to_gguf=_some_layers_to),
    "own_layer_types": replace(_LAYER_TYPES, to_gguf=_own_layers_to),
    "any_layer_types": replace(_LAYER_TYPES, to_gguf=_any_layers_to, from_gguf=_any_layers_from),
    "any_window": Converter(_any_window_to, lambda value, side: as_int(value, side.key.gguf) or DEFAULT),
    "query_scale": Converter(_query_scale_to, _query_scale_from),
    "softcap": Converter(_softcap_to, _softcap_from),
    "never": Converter(_never_to),
    "trained_length": Converter(_trained_length),
    "unscaled": Converter(_unscaled_to, lambda value, side: DEFAULT),
}
"""What a Key's `via` names."""
