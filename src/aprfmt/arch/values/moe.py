"""Converters of hyper-parameters that routed experts and latent attention have, beside those of arch.values."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.fields import as_int
from aprfmt.arch.rope import attention_factor
from aprfmt.arch.values.base import (
    DEFAULT,
    LAYER_TYPES,
    ConfigKeys,
    Convert,
    Converter,
    Scope,
    default,
    layer_types_fill,
    layer_types_to,
    nothing,
    unless_named,
)
from aprfmt.errors import RefusedError


def _gguf_int(scope: Scope, suffix: str) -> int:
    return as_int(scope.gguf(suffix), suffix) or 0


def _sum_of(*names: str) -> Convert:
    """The sum of config values; None where one is unknown."""

    def to_gguf(value: object, scope: Scope) -> int | None:
        numbers = [scope.size(name) for name in names]
        known = [number for number in numbers if number is not None]
        return sum(known) if len(known) == len(numbers) else None

    return to_gguf


def _mla_key_from(value: object, scope: Scope) -> object:
    """What of a key is not rotated. Files that keep whole keys name its length as any other family."""
    length = as_int(value, scope.key.gguf) or _gguf_int(scope, "attention.key_length")
    return length - _gguf_int(scope, "rope.dimension_count") if length else DEFAULT


def _mla_value_from(value: object, scope: Scope) -> object:
    return as_int(value, scope.key.gguf) or _gguf_int(scope, "attention.value_length") or DEFAULT


def _shared_width(value: object, scope: Scope) -> int | None:
    count = scope.size("moe_num_shared_experts")
    return count * scope.h.moe_intermediate_size if count and scope.h.moe_intermediate_size else None


def _without_drafts(value: object, scope: Scope) -> object:
    """A GGUF counts the layers of its draft head with the network's own."""
    layers = as_int(value, scope.key.gguf)
    return DEFAULT if layers is None else layers - _gguf_int(scope, "nextn_predict_layers")


def _last_layer_to(value: object, scope: Scope) -> None:
    """Up to which layer there are experts: a GGUF has no key for it, it is always the last."""
    if value not in (None, -1) and scope.h.num_layers is not None and value != scope.h.num_layers - 1:
        raise RefusedError(
            f"{scope.name} is {value}; a GGUF of {scope.row.gguf!r} has experts up to the last layer"
        )


def _dense_first(value: object, scope: Scope) -> object:
    """How many layers at the beginning are dense, of a list that says it of each; one where nothing says it."""
    if not isinstance(value, list):
        return (
            DEFAULT
            if scope.config("first_k_dense_replace") is not None
            else ConfigKeys(first_k_dense_replace=1)
        )
    count = next((n for n, kind in enumerate(value) if kind != "dense"), len(value))
    return ConfigKeys(mlp_layer_types=value, first_k_dense_replace=count)


def _dense_first_to(value: object, scope: Scope) -> None:
    if isinstance(value, list) and "dense" in value[scope.size("first_k_dense_replace") or 0 :]:
        raise RefusedError(
            f"{scope.name} has dense layers behind others; a GGUF of {scope.row.gguf!r} has none"
        )


def _odd_layer_types(value: object, scope: Scope) -> object:
    """Layer types that are not the row's pattern, which the runtime knows by itself."""
    return None if value == layer_types_fill(scope) else layer_types_to(value, scope)


def _untruncated_from(value: object, scope: Scope) -> object:
    """gpt-oss does not round the ends of yarn's ramp; a GGUF cannot say so."""
    scaling = scope.h.extra.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type") == "yarn":
        scaling.setdefault("truncate", False)
    return DEFAULT


def _mscales_from(value: object, scope: Scope) -> object:
    """PhiMoE's longrope names its attention factor twice; a GGUF has one."""
    scaling = scope.h.extra.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type") == "longrope":
        factor = attention_factor(scope.h, "longrope", scaling)
        for name in ("short_mscale", "long_mscale"):
            scaling.setdefault(name, 1.0 if factor is None else factor)
    return DEFAULT


def _group_choice_from(value: object, scope: Scope) -> str:
    return "group_limited_greedy" if _gguf_int(scope, "expert_group_count") > 1 else "greedy"


CONVERTERS: dict[str, Converter] = {
    "absent_false": unless_named(False),
    "absent_0": unless_named(0),
    "absent_1": unless_named(1),
    "absent_1.0": unless_named(1.0),
    "or_zero": Converter(lambda value, scope: value or 0, lambda value, scope: value or None),
    "only_true": Converter(lambda value, scope: value or None, lambda value, scope: bool(value)),
    "mla_kv_heads": Converter(lambda value, scope: 1, lambda value, scope: scope.h.num_heads),
    "mla_key_width": Converter(_sum_of("kv_lora_rank", "qk_rope_head_dim")),
    "mla_value_width": Converter(_sum_of("kv_lora_rank")),
    "mla_key_length": Converter(_sum_of("qk_nope_head_dim", "qk_rope_head_dim"), _mla_key_from),
    "mla_value_length": Converter(from_gguf=_mla_value_from),
    "shared_width": Converter(_shared_width),
    "without_drafts": Converter(from_gguf=_without_drafts),
    "no_drafts": Converter(
        lambda value, scope: None if value is None else 0, lambda value, scope: value or 0
    ),
    "unsaid_drafts": Converter(nothing, lambda value, scope: value or 0),
    "last_layer": Converter(_last_layer_to),
    "leading_dense": Converter(_dense_first_to, default, settle=_dense_first),
    "odd_layer_types": replace(LAYER_TYPES, to_gguf=_odd_layer_types),
    "untruncated": Converter(nothing, _untruncated_from),
    "mscales": Converter(nothing, _mscales_from),
    "group_choice": Converter(nothing, _group_choice_from),
}
