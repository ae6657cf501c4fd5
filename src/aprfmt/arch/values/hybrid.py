"""Converters of hyper-parameters that state-space models and hybrids have, beside those of arch.values."""

from __future__ import annotations

from typing import Any

from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.values.base import DEFAULT, Converter, Side
from aprfmt.errors import CorruptError, RefusedError

_ATTENTION = ("full_attention", "attention")


def _kinds(side: Side) -> list[Any]:
    kinds = side.h.extra.get("layer_types") or side.h.extra.get("layers_block_type")
    if not isinstance(kinds, list):
        raise CorruptError("layer_types is no list")
    return kinds


def _expand_to(value: Any, side: Side) -> int | None:
    """Width of the mixer: expand x hidden."""
    factor, hidden = as_float(value, "expand"), side.h.hidden_size
    return None if factor is None or hidden is None else int(factor * hidden)


def _expand_from(value: Any, side: Side) -> Any:
    width, hidden = as_int(value, side.key.gguf), side.h.hidden_size
    if not width or not hidden:
        return DEFAULT
    return width // hidden if width % hidden == 0 else width / hidden


def _expanded_fill(side: Side) -> int | None:
    return _expand_to(side.h.extra.get("expand", side.defaults.get("expand")), side)


def _rank_fill(side: Side) -> int | None:
    """A sixteenth of the hidden size, rounded up: what "auto" means."""
    return -(-side.h.hidden_size // 16) if side.h.hidden_size else None


def _inner_to(value: Any, side: Side) -> int | None:
    """Values of a head -> values of all heads, whose number is the key `ssm.time_step_rank`."""
    size, heads = as_int(value, side.key.hf[0]), _heads(side)
    return None if size is None or heads is None else size * heads


def _heads(side: Side) -> int | None:
    name = next((key.hf[0] for key in side.row.keys if key.gguf == "ssm.time_step_rank"), "")
    return as_int(side.h.extra.get(name), name)


def _inner_from(value: Any, side: Side) -> Any:
    inner, heads = as_int(side.gguf("ssm.inner_size"), "ssm.inner_size"), side.gguf("ssm.time_step_rank")
    return inner // int(heads) if inner and heads else DEFAULT


def _recurrent_to(value: Any, side: Side) -> list[bool] | None:
    return None if value is None else [kind not in _ATTENTION for kind in _kinds(side)]


def _recurrent_from(value: Any, side: Side) -> Any:
    flags = value if isinstance(value, list | tuple) else None
    if flags is None:
        return _every_fourth(side, side.gguf("full_attention_interval"))
    return ["linear_attention" if flag else "full_attention" for flag in flags]


def _every_fourth(side: Side, interval: Any = None) -> list[str] | None:
    """Attention in each last one of `full_attention_interval` layers."""
    interval = interval or side.h.extra.get(
        "full_attention_interval", side.defaults["full_attention_interval"]
    )
    period, n_layers = as_int(interval, "full_attention_interval"), side.h.num_layers
    if not period or n_layers is None:
        return None
    return ["linear_attention" if (i + 1) % period else "full_attention" for i in range(n_layers)]


def _layer_heads_to(value: Any, side: Side) -> list[int] | None:
    heads = as_int(value, side.key.hf[0])
    return None if heads is None else [heads if kind in _ATTENTION else 0 for kind in _kinds(side)]


def _layer_heads_from(value: Any, side: Side) -> Any:
    heads = value if isinstance(value, list | tuple) else [value]
    return max((n for n in heads if isinstance(n, int)), default=DEFAULT) or DEFAULT


def _mixed_from(value: Any, side: Side) -> Any:
    """Kinds of layers by their KV heads: a layer without any has what the family has beside attention."""
    heads = side.gguf("attention.head_count_kv")
    if heads is None:
        return DEFAULT
    if not isinstance(heads, list | tuple):
        heads = [heads] * (side.h.num_layers or 0)
    return ["full_attention" if n else _other(side) for n in heads]


def _other(side: Side) -> str:
    return "conv" if any(row.layers == "conv" for row in side.row.tensors) else "linear_attention"


def _mixed_fill(side: Side) -> list[str] | None:
    """By the indices of the layers that have attention, as older configs list them; else all have it."""
    n_layers, h = side.h.num_layers, side.h
    if n_layers is None:
        return None
    listed = h.extra.get("full_attn_idxs")
    indices = range(n_layers) if listed is None else listed
    if not isinstance(indices, range | list):
        raise CorruptError("full_attn_idxs is no list")
    return ["full_attention" if i in indices else _other(side) for i in range(n_layers)]


_BLOCK_OF = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _block_types(value: Any, side: Side) -> Any:
    """Nemotron-H: its kinds of layers, which older configs spell as a string of one letter each."""
    pattern = side.h.extra.pop("hybrid_override_pattern", None)
    if value is not None or pattern is None:
        return DEFAULT
    if not isinstance(pattern, str) or not set(pattern) <= set(_BLOCK_OF):
        raise CorruptError(
            f"hybrid_override_pattern {pattern!r:.40} has other letters than {''.join(_BLOCK_OF)}"
        )
    return [_BLOCK_OF[letter] for letter in pattern]


def _block_types_from(value: Any, side: Side) -> Any:
    """By the KV heads and the widths of the MLPs: a layer that has neither is a state-space one."""
    heads, widths = side.gguf("attention.head_count_kv"), side.gguf("feed_forward_length")
    if not isinstance(heads, list | tuple) or not isinstance(widths, list | tuple):
        return DEFAULT
    mlp = "moe" if side.gguf("expert_count") else "mlp"
    return [
        "full_attention" if n else mlp if width else "linear_attention"
        for n, width in zip(heads, widths, strict=False)
    ]


def _listed_layers(side: Side) -> int | None:
    kinds = side.h.extra.get("layers_block_type") or side.h.extra.get("hybrid_override_pattern")
    return len(kinds) if isinstance(kinds, list | str) else None


def _mlp_layers_to(value: Any, side: Side) -> list[int] | None:
    width = as_int(value, side.key.hf[0])
    return None if width is None else [width if kind == "mlp" else 0 for kind in _kinds(side)]


def _moe_layers_to(value: Any, side: Side) -> list[int]:
    return [side.h.moe_intermediate_size or 0 if kind == "moe" else 0 for kind in _kinds(side)]


def _lone_width_to(value: Any, side: Side) -> Any:
    """Width of the dense MLP; of a network without experts that is the shared expert's."""
    return value if side.h.num_experts else side.h.extra.get("shared_intermediate_size", value)


def _rope_switch_to(value: Any, side: Side) -> bool:
    if value not in (None, "rope", "nope"):
        raise RefusedError(f"position_embedding_type {value!r:.40} has no GGUF form")
    return bool(value == "rope")


def _sections_to(value: Any, side: Side) -> dict[str, tuple[str, Any]] | None:
    """The sections of the three positions, where a Qwen3.5 config leaves them to its class; the runtime does not."""
    scaling = side.h.extra.get("rope_scaling") or {}
    if "mrope_section" in scaling:
        return None
    return {"rope.dimension_sections": ("i32[]", [11, 11, 10, 0])}


def _lfm2_width(value: Any, side: Side) -> Any:
    """LFM2 as it is held: the width that the MLP really has, with nothing left to adjust."""
    width, extra = as_int(value, side.key.hf[0]), side.h.extra
    if width is None or not extra.get("block_auto_adjust_ff_dim"):
        return DEFAULT
    width = 2 * width // 3
    if (factor := as_float(extra.get("block_ffn_dim_multiplier"), "block_ffn_dim_multiplier")) is not None:
        width = int(factor * width)
    multiple = as_int(extra.get("block_multiple_of"), "block_multiple_of") or 1
    return {side.key.hf[0]: -(-width // multiple) * multiple, "block_auto_adjust_ff_dim": False}


def _number_of(value: Any, side: Side) -> Any:
    return len(value) if isinstance(value, list) else DEFAULT


def _auto_rank(value: Any, side: Side) -> Any:
    return _rank_fill(side) if value == "auto" else DEFAULT


def _used_to(value: Any, side: Side) -> Any:
    """Experts that a token uses; the runtime refuses more than there are."""
    return value if side.h.num_experts else None


CONVERTERS: dict[str, Converter] = {
    "expand": Converter(_expand_to, _expand_from),
    "if_given": Converter(),
    "expanded": Converter(fill=_expanded_fill),
    "lfm2_width": Converter(settle=_lfm2_width),
    "never_adjusted": Converter(lambda value, side: None, lambda value, side: False),
    "number_of": Converter(settle=_number_of),
    "auto_rank": Converter(fill=_rank_fill, settle=_auto_rank),
    "inner_size": Converter(_inner_to, _inner_from),
    "recurrent_layers": Converter(_recurrent_to, _recurrent_from, _every_fourth),
    "attention_layers": Converter(_layer_heads_to, _layer_heads_from),
    "mixed_layers": Converter(lambda value, side: None, _mixed_from, _mixed_fill),
    "block_types": Converter(lambda value, side: None, _block_types_from, settle=_block_types),
    "listed_layers": Converter(fill=_listed_layers),
    "mlp_layers": Converter(_mlp_layers_to, _layer_heads_from),
    "moe_layers": Converter(_moe_layers_to, lambda value, side: DEFAULT),
    "lone_width": Converter(_lone_width_to),
    "some_experts": Converter(from_gguf=lambda value, side: value or 0),
    "used_experts": Converter(_used_to),
    "rope_switch": Converter(_rope_switch_to, lambda value, side: "rope" if value else None),
    "qwen3_5_sections": Converter(_sections_to, lambda value, side: DEFAULT),
}
"""What a Key's `via` names."""
