"""Converters of hyper-parameters that Llama's kin has, beside those of arch.values."""

from __future__ import annotations

from typing import Any

from aprfmt.arch.fields import as_float, as_id, from_f32
from aprfmt.arch.rope import scaling_of
from aprfmt.arch.values.base import CONVERTERS as COMMON
from aprfmt.arch.values.base import DEFAULT, Converter, Side
from aprfmt.errors import RefusedError

_STEP = 4
"""SmolLM3's runtime leaves every fourth layer unrotated, whatever a file says."""


def _rotated(n_layers: int, step: int) -> list[int]:
    return [int((i + 1) % step != 0) for i in range(n_layers)]


def _rotated_fill(side: Side) -> list[int]:
    step = side.h.extra.get("no_rope_layer_interval")
    return _rotated(side.h.num_layers or 0, step if isinstance(step, int) and step > 0 else _STEP)


def _rotated_to(value: Any, side: Side) -> None:
    if isinstance(value, list) and [int(bool(item)) for item in value] != _rotated(len(value), _STEP):
        raise RefusedError(
            f"{side.key.hf[0]}: llama.cpp's {side.row.gguf} leaves every fourth layer unrotated, no other"
        )


def _whole_heads_to(value: Any, side: Side) -> None:
    """The runtime has no other size of the projections than hidden_size."""
    h = side.h
    if h.head_dim and h.hidden_size and h.num_heads and h.num_heads * h.head_dim != h.hidden_size:
        raise RefusedError(
            f"{h.num_heads} heads of {h.head_dim} values: llama.cpp's {side.row.gguf} loads heads that make up the "
            f"hidden size, {h.hidden_size}"
        )


def _window(side: Side) -> Any:
    return COMMON["window"].to_gguf(side.h.extra.get("sliding_window"), side)


def _sliding_to(value: Any, side: Side) -> Any:
    """A network without a window has no pattern of windows."""
    return COMMON["layer_types"].to_gguf(value, side) if _window(side) else None


def _sliding_from(value: Any, side: Side) -> Any:
    if value is None and not side.gguf("attention.sliding_window"):
        return ["full_attention"] * (side.h.num_layers or 0)
    return COMMON["layer_types"].from_gguf(value, side)


def _pad_token_from(value: Any, side: Side) -> int | None:
    key = "tokenizer.ggml.padding_token_id"
    return as_id(side.kv.get(key), key)


_BETA = "llama_4_scaling_beta"


def _temperature_to(value: Any, side: Side) -> float | None:
    return as_float(scaling_of(side.h).get(_BETA), _BETA) or None


def _temperature_from(value: Any, side: Side) -> Any:
    """transformers has no Ministral 3 without a temperature: 0 is what changes nothing."""
    original = "original_max_position_embeddings"
    side.h.extra["rope_scaling"] = {
        "rope_type": "default",
        original: side.h.max_position_embeddings,
        **scaling_of(side.h),
        _BETA: from_f32(value, side.key.gguf) or 0.0,
    }
    return DEFAULT


def _unit_mscale_from(value: Any, side: Side) -> Any:
    """`mscale_all_dim` of a runtime that takes `mscale` for 1."""
    scaling = side.h.extra.get("rope_scaling")
    if value is not None and isinstance(scaling, dict):
        scaling.setdefault("mscale", 1.0)
    return COMMON["yarn_log"].from_gguf(value, side)


CONVERTERS: dict[str, Converter] = {
    "every_fourth": Converter(_rotated_to, lambda value, side: _rotated_fill(side), _rotated_fill),
    "whole_heads": Converter(_whole_heads_to, lambda value, side: DEFAULT),
    "sliding_layers": Converter(_sliding_to, _sliding_from, COMMON["layer_types"].fill),
    "pad_token": Converter(lambda value, side: None, _pad_token_from),
    "llama_4_scaling": Converter(_temperature_to, _temperature_from),
    "unit_mscale": Converter(COMMON["yarn_log"].to_gguf, _unit_mscale_from),
}
"""What a Key's `via` names."""
