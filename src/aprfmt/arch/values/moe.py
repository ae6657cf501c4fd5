"""Converters of hyper-parameters that routed experts and latent attention have, beside those of arch.values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aprfmt.arch.fields import as_int
from aprfmt.arch.rope_math import attention_factor
from aprfmt.arch.values.base import CONVERTERS as COMMON
from aprfmt.arch.values.base import DEFAULT, Converter, Side, ToGguf
from aprfmt.errors import RefusedError

_LAYER_TYPES = COMMON["layer_types"]


def unless_named(otherwise: Any) -> Converter:
    """The same on both sides; a GGUF without the key means `otherwise`."""
    return Converter(from_gguf=lambda value, side: otherwise if value is None else value)


def _gguf_int(side: Side, suffix: str) -> int:
    return as_int(side.gguf(suffix), suffix) or 0


def _sum_of(*names: str) -> ToGguf:
    """The sum of config values; None where one is unknown."""

    def to_gguf(value: Any, side: Side) -> int | None:
        numbers = [as_int(side.config(name), name) for name in names]
        known = [number for number in numbers if number is not None]
        return sum(known) if len(known) == len(numbers) else None

    return to_gguf


def _mla_key_from(value: Any, side: Side) -> Any:
    """What of a key is not rotated. Files that keep whole keys name its length as any other family."""
    length = as_int(value, side.key.gguf) or _gguf_int(side, "attention.key_length")
    return length - _gguf_int(side, "rope.dimension_count") if length else DEFAULT


def _mla_value_from(value: Any, side: Side) -> Any:
    return as_int(value, side.key.gguf) or _gguf_int(side, "attention.value_length") or DEFAULT


def _shared_width(value: Any, side: Side) -> int | None:
    count = as_int(side.config("moe_num_shared_experts"), "moe_num_shared_experts")
    return count * side.h.moe_intermediate_size if count and side.h.moe_intermediate_size else None


def _without_drafts(value: Any, side: Side) -> Any:
    """A GGUF counts the layers of its draft head with the network's own."""
    layers = as_int(value, side.key.gguf)
    return DEFAULT if layers is None else layers - _gguf_int(side, "nextn_predict_layers")


def _last_layer_to(value: Any, side: Side) -> None:
    """Up to which layer there are experts: a GGUF has no key for it, it is always the last."""
    if value not in (None, -1) and side.h.num_layers is not None and value != side.h.num_layers - 1:
        raise RefusedError(
            f"{side.key.hf[0]} is {value}; a GGUF of {side.row.gguf!r} has experts up to the last layer"
        )


def _dense_first(value: Any, side: Side) -> Any:
    """How many layers at the beginning are dense, of a list that says it of each; one where nothing says it."""
    if not isinstance(value, list):
        return DEFAULT if side.config("first_k_dense_replace") is not None else {"first_k_dense_replace": 1}
    count = next((n for n, kind in enumerate(value) if kind != "dense"), len(value))
    return {"mlp_layer_types": value, "first_k_dense_replace": count}


def _dense_first_to(value: Any, side: Side) -> None:
    if (
        isinstance(value, list)
        and "dense" in value[as_int(side.config("first_k_dense_replace"), "count") or 0 :]
    ):
        raise RefusedError(
            f"{side.key.hf[0]} has dense layers behind others; a GGUF of {side.row.gguf!r} has none"
        )


def _odd_layer_types(value: Any, side: Side) -> Any:
    """Layer types that are not the row's pattern, which the runtime knows by itself."""
    expected = _LAYER_TYPES.fill(side) if _LAYER_TYPES.fill else None
    return None if value == expected else _LAYER_TYPES.to_gguf(value, side)


def _untruncated_from(value: Any, side: Side) -> Any:
    """gpt-oss does not round the ends of yarn's ramp; a GGUF cannot say so."""
    scaling = side.h.extra.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type") == "yarn":
        scaling.setdefault("truncate", False)
    return DEFAULT


def _mscales_from(value: Any, side: Side) -> Any:
    """PhiMoE's longrope names its attention factor twice; a GGUF has one."""
    scaling = side.h.extra.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type") == "longrope":
        factor = attention_factor(side.h, "longrope", scaling)
        for name in ("short_mscale", "long_mscale"):
            scaling.setdefault(name, 1.0 if factor is None else factor)
    return DEFAULT


def _group_choice_from(value: Any, side: Side) -> str:
    return "group_limited_greedy" if _gguf_int(side, "expert_group_count") > 1 else "greedy"


CONVERTERS: dict[str, Converter] = {
    "absent_false": unless_named(False),
    "absent_0": unless_named(0),
    "absent_1": unless_named(1),
    "absent_1.0": unless_named(1.0),
    "or_zero": Converter(lambda value, side: value or 0, lambda value, side: value or None),
    "only_true": Converter(lambda value, side: value or None, lambda value, side: bool(value)),
    "mla_kv_heads": Converter(lambda value, side: 1, lambda value, side: side.h.num_heads),
    "mla_key_width": Converter(_sum_of("kv_lora_rank", "qk_rope_head_dim")),
    "mla_value_width": Converter(_sum_of("kv_lora_rank")),
    "mla_key_length": Converter(_sum_of("qk_nope_head_dim", "qk_rope_head_dim"), _mla_key_from),
    "mla_value_length": Converter(from_gguf=_mla_value_from),
    "shared_width": Converter(_shared_width),
    "without_drafts": Converter(from_gguf=_without_drafts),
    "no_drafts": Converter(lambda value, side: None if value is None else 0, lambda value, side: value or 0),
    "unsaid_drafts": Converter(lambda value, side: None, lambda value, side: value or 0),
    "last_layer": Converter(_last_layer_to),
    "leading_dense": Converter(_dense_first_to, lambda value, side: DEFAULT, settle=_dense_first),
    "odd_layer_types": replace(_LAYER_TYPES, to_gguf=_odd_layer_types),
    "untruncated": Converter(lambda value, side: None, _untruncated_from),
    "mscales": Converter(lambda value, side: None, _mscales_from),
    "group_choice": Converter(lambda value, side: None, _group_choice_from),
}
"""What a Key's `via` names."""
