"""Converters of networks with routed experts, latent attention, state-space layers or short convolutions."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.facts import layer_kinds
from aprfmt.arch.fields import as_float, as_int, as_mapping
from aprfmt.arch.rope import attention_factor
from aprfmt.arch.values.base import (
    DEFAULT,
    FULL,
    LAYER_TYPES,
    ConfigKeys,
    Convert,
    Converter,
    GgufKeys,
    Scope,
    default,
    layer_types_fill,
    layer_types_to,
    nothing,
    over_hidden,
    periodic,
    times_hidden,
    unless_named,
)
from aprfmt.errors import CorruptError, RefusedError

# --- routed experts and latent attention ---


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
            f"{scope.name} is {value}, but a GGUF of {scope.row.gguf!r} has experts up to the last layer"
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
            f"{scope.name} has dense layers after sparse ones, which a GGUF of {scope.row.gguf!r} cannot have"
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


# --- state-space models and hybrids ---

LINEAR = "linear_attention"
_ATTENTION = (FULL, "attention")


def _kinds(scope: Scope) -> list[object]:
    kinds = layer_kinds(scope.h.extra)
    if kinds is None:
        raise CorruptError("layer_types is not a list")
    return kinds


def _rank_fill(scope: Scope) -> int | None:
    """A sixteenth of the hidden size, rounded up: what "auto" means."""
    return -(-scope.h.hidden_size // 16) if scope.h.hidden_size else None


def _inner_to(value: object, scope: Scope) -> int | None:
    """Values of a head -> values of all heads, whose number is the key `ssm.time_step_rank`."""
    size, heads = as_int(value, scope.name), _heads(scope)
    return None if size is None or heads is None else size * heads


def _heads(scope: Scope) -> int | None:
    name = next((key.hf[0] for key in scope.row.keys if key.gguf == "ssm.time_step_rank"), "")
    return as_int(scope.h.extra.get(name), name)


def _inner_from(value: object, scope: Scope) -> object:
    inner, heads = (as_int(scope.gguf(key), key) for key in ("ssm.inner_size", "ssm.time_step_rank"))
    return inner // heads if inner and heads else DEFAULT


def _recurrent_to(value: object, scope: Scope) -> list[bool] | None:
    return None if value is None else [kind not in _ATTENTION for kind in _kinds(scope)]


def _recurrent_from(value: object, scope: Scope) -> object:
    if not isinstance(value, list):
        return _every_fourth(scope, scope.gguf("full_attention_interval"))
    return _linear([bool(flag) for flag in value])


def _linear(flags: list[bool]) -> list[str]:
    return [LINEAR if flag else FULL for flag in flags]


def _every_fourth(scope: Scope, interval: object = None) -> list[str] | None:
    """Attention in each last one of `full_attention_interval` layers."""
    interval = interval or scope.h.extra.get(
        "full_attention_interval", scope.defaults["full_attention_interval"]
    )
    period, n_layers = as_int(interval, "full_attention_interval"), scope.h.num_layers
    if not period or n_layers is None:
        return None
    return _linear(periodic(period, n_layers))


def _per_layer(value: object, scope: Scope, *kinds: str) -> list[int] | None:
    """A number in the layers of some kinds, 0 in the others."""
    number = as_int(value, scope.name)
    return None if number is None else [number if kind in kinds else 0 for kind in _kinds(scope)]


def _most(value: object, scope: Scope) -> object:
    """What the layers have that have it."""
    heads = value if isinstance(value, list) else [value]
    return max((n for n in heads if isinstance(n, int)), default=0) or DEFAULT


def _mixed_from(value: object, scope: Scope) -> object:
    """Kinds of layers by their KV heads: a layer without any has what the family has beside attention."""
    heads = scope.gguf("attention.head_count_kv")
    if heads is None:
        return DEFAULT
    if not isinstance(heads, list):
        heads = [heads] * (scope.h.num_layers or 0)
    return [FULL if n else _other(scope) for n in heads]


def _other(scope: Scope) -> str:
    return "conv" if any(row.layers == "conv" for row in scope.row.tensors) else LINEAR


def _mixed_fill(scope: Scope) -> list[str] | None:
    """By the indices of the layers that have attention, as older configs list them; else all have it."""
    n_layers, h = scope.h.num_layers, scope.h
    if n_layers is None:
        return None
    listed = h.extra.get("full_attn_idxs")
    indices = range(n_layers) if listed is None else listed
    if not isinstance(indices, range | list):
        raise CorruptError("full_attn_idxs is not a list")
    return [FULL if i in indices else _other(scope) for i in range(n_layers)]


_BLOCK_OF = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}


def _block_types(value: object, scope: Scope) -> object:
    """Nemotron-H: its kinds of layers, which older configs spell as a string of one letter each."""
    pattern = scope.h.extra.pop("hybrid_override_pattern", None)
    if value is not None or pattern is None:
        return DEFAULT
    if not isinstance(pattern, str) or not set(pattern) <= set(_BLOCK_OF):
        raise CorruptError(
            f"hybrid_override_pattern {pattern!r:.40} may only have the letters {''.join(_BLOCK_OF)}"
        )
    return [_BLOCK_OF[letter] for letter in pattern]


def _block_types_from(value: object, scope: Scope) -> object:
    """By the KV heads and the widths of the MLPs: a layer that has neither is a state-space one."""
    heads, widths = scope.gguf("attention.head_count_kv"), scope.gguf("feed_forward_length")
    if not isinstance(heads, list) or not isinstance(widths, list):
        return DEFAULT
    mlp = "moe" if scope.gguf("expert_count") else "mlp"
    return [
        "full_attention" if n else mlp if width else LINEAR for n, width in zip(heads, widths, strict=False)
    ]


def _lone_width_to(value: object, scope: Scope) -> object:
    """Width of the dense MLP; of a network without experts that is the shared expert's."""
    return value if scope.h.num_experts else scope.h.extra.get("shared_intermediate_size", value)


def _rope_switch_to(value: object, scope: Scope) -> bool:
    if value not in (None, "rope", "nope"):
        raise RefusedError(f"a GGUF cannot have position_embedding_type {value!r:.40}")
    return bool(value == "rope")


def _sections_to(value: object, scope: Scope) -> GgufKeys | None:
    """The sections of the three positions, where a Qwen3.5 config leaves them to its class; the runtime does not."""
    if "mrope_section" in as_mapping(scope.h.extra.get("rope_scaling")):
        return None
    return GgufKeys({"rope.dimension_sections": ("i32[]", [11, 11, 10, 0])})


def _lfm2_width(value: object, scope: Scope) -> object:
    """LFM2 as it is held: the width that the MLP really has, with nothing left to adjust."""
    width, extra = as_int(value, scope.name), scope.h.extra
    if width is None or not extra.get("block_auto_adjust_ff_dim"):
        return DEFAULT
    width = 2 * width // 3
    if (factor := as_float(extra.get("block_ffn_dim_multiplier"), "block_ffn_dim_multiplier")) is not None:
        width = int(factor * width)
    multiple = as_int(extra.get("block_multiple_of"), "block_multiple_of") or 1
    return ConfigKeys({scope.name: -(-width // multiple) * multiple, "block_auto_adjust_ff_dim": False})


def _count_layers(scope: Scope) -> int | None:
    kinds = scope.h.extra.get("layers_block_type") or scope.h.extra.get("hybrid_override_pattern")
    return len(kinds) if isinstance(kinds, list | str) else None


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
    "expand": Converter(times_hidden, lambda value, scope: over_hidden(as_int(value, scope.key.gguf), scope)),
    "if_given": Converter(),
    "expanded": Converter(
        fill=lambda scope: times_hidden(scope.h.extra.get("expand", scope.defaults.get("expand")), scope)
    ),
    "lfm2_width": Converter(settle=_lfm2_width),
    "never_adjusted": Converter(nothing, lambda value, scope: False),
    "number_of": Converter(settle=lambda value, scope: len(value) if isinstance(value, list) else DEFAULT),
    "auto_rank": Converter(
        fill=_rank_fill, settle=lambda value, scope: _rank_fill(scope) if value == "auto" else DEFAULT
    ),
    "inner_size": Converter(_inner_to, _inner_from),
    "recurrent_layers": Converter(_recurrent_to, _recurrent_from, _every_fourth),
    "attention_layers": Converter(lambda value, scope: _per_layer(value, scope, *_ATTENTION), _most),
    "mixed_layers": Converter(nothing, _mixed_from, _mixed_fill),
    "block_types": Converter(nothing, _block_types_from, settle=_block_types),
    "listed_layers": Converter(fill=_count_layers),
    "mlp_layers": Converter(lambda value, scope: _per_layer(value, scope, "mlp"), _most),
    "moe_layers": Converter(
        lambda value, scope: _per_layer(scope.h.moe_intermediate_size or 0, scope, "moe"), default
    ),
    "lone_width": Converter(_lone_width_to),
    "some_experts": Converter(from_gguf=lambda value, scope: value or 0),
    # The runtime refuses more used experts than there are.
    "used_experts": Converter(lambda value, scope: value if scope.h.num_experts else None),
    "rope_switch": Converter(_rope_switch_to, lambda value, scope: "rope" if value else None),
    "qwen3_5_sections": Converter(_sections_to, default),
}
