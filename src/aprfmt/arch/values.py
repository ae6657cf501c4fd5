"""Converters: hyper-parameters whose config.json value and GGUF value are not the same number.

A row's Key names one by `via`. A converter is a pair of small functions and a line in CONVERTERS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from aprfmt.arch import rope
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Convert, Converter, GgufKeys, Scope, default, nothing, words
from aprfmt.arch.fields import as_float, as_id, as_int, as_mapping, from_f32, shorten
from aprfmt.arch.grammar import layer_kinds
from aprfmt.arch.rope import attention_factor, scaling_of
from aprfmt.arch.values_compressed import COMPRESSED
from aprfmt.arch.values_drafts import DRAFTS
from aprfmt.arch.values_experts import EXPERTS
from aprfmt.arch.values_heads import HEADS
from aprfmt.arch.values_hybrid import HYBRID
from aprfmt.arch.values_layers import (
    FULL,
    LAYER_CONVERTERS,
    LAYER_TYPES,
    SLIDING,
    kinds_of,
    layer_types_fill,
    layer_types_from,
    layer_types_to,
    periodic,
)
from aprfmt.arch.values_ngrams import NGRAMS, with_plain_kinds
from aprfmt.arch.values_projectors import PROJECTORS
from aprfmt.arch.values_remote import REMOTE
from aprfmt.arch.values_rwkv import RWKV
from aprfmt.arch.values_sparse import SPARSE
from aprfmt.arch.values_windows import WINDOWS
from aprfmt.errors import CorruptError, RefusedError


def _rope_from(value: object, scope: Scope) -> object:
    rope.from_gguf(scope.h, scope.row, scope.kv, scope.defaults)
    return DEFAULT


def _rotary_dim_from(value: object, scope: Scope) -> object:
    rope.set_rotary_dim(scope.h, as_int(value, "rope.dimension_count"), scope.defaults)
    return DEFAULT


def head_dim_is_named(scope: Scope) -> bool:
    """Whether the size of a head has to be written: the source names it, or it follows from nothing else."""
    h = scope.h
    named = h.extra.get("head_dim") or scope.defaults.get("head_dim")
    return h.head_dim is not None and bool(named or h.head_dim != h.plain_head_dim)


def _head_dim_settle(value: object, scope: Scope) -> object:
    if scope.h.head_dim:
        scope.h.extra["head_dim"] = scope.h.head_dim
    return DEFAULT


def _head_dim_to(value: object, scope: Scope) -> GgufKeys | None:
    if not head_dim_is_named(scope):
        return None
    return GgufKeys({f"attention.{name}_length": ("u32", scope.h.head_dim) for name in ("key", "value")})


def _head_dim_from(value: object, scope: Scope) -> object:
    scope.h.head_dim = as_int(value, "attention.key_length")
    return _head_dim_settle(value, scope)


def _post_norm_settle(value: object, scope: Scope) -> bool:
    """Which of two networks of one class: the name of its code, in `auto_map`, tells."""
    return value is True or any("qk-post-norm" in str(code) for code in as_mapping(value).values())


def _two_thirds_to(value: object, scope: Scope) -> int | None:
    """NeoBERT's width: a third of what the config says is the gate's."""
    width = as_int(value, scope.name)
    return None if width is None else 2 * width // 3


def _two_thirds_from(value: object, scope: Scope) -> object:
    width = as_int(value, scope.key.gguf)
    return DEFAULT if width is None else width * 3 // 2


def _folded_to(value: object, scope: Scope) -> None:
    """A GGUF of these holds an embedding that is computed, of which the checkpoint cannot be made again."""
    raise RefusedError(
        f"llama.cpp's {scope.row.gguf} wants the embedding with the projection behind it multiplied in, which no "
        "checkpoint holds and nothing brings back",
        hint="an .apr or a folder holds the model as it is; for a GGUF take llama.cpp's convert_hf_to_gguf.py",
    )


def _as_deep_to(value: object, scope: Scope) -> object:
    """Layers of the decoder: the runtime keeps room for as many as the encoder has."""
    depth, encoder = as_int(value, scope.name), scope.h.num_layers
    if depth is not None and encoder is not None and depth > encoder:
        raise RefusedError(
            f"{scope.name} is {depth}, and the encoder has {encoder} layers: llama.cpp's {scope.row.gguf} loads no "
            "decoder that is deeper than its encoder"
        )
    return depth


def _gated_proj_from(value: object, scope: Scope) -> object:
    """T5's two MLPs, by whether one has a gate."""
    return DEFAULT if not scope.names else "gated-gelu" if "enc.blk.0.ffn_gate.weight" in scope.names else "relu"


def _has_switch(scope: Scope) -> bool:
    """Whether the family has a switch beside the window, `use_sliding_window`."""
    return "use_sliding_window" in scope.defaults


def window_to(value: object, scope: Scope) -> int | None:
    """The window, None where the network does not use one."""
    window, used = as_int(value, "sliding_window"), scope.h.extra.get("use_sliding_window")
    return None if used is False or (_has_switch(scope) and not used) else window or None


def _window_from(value: object, scope: Scope) -> object:
    window = as_int(value, "sliding_window") or None
    if _has_switch(scope):
        return ConfigKeys({scope.name: window, "use_sliding_window": window is not None})
    return window


def yarn_log(scale: float) -> Converter:
    """`mscale_all_dim` of a yarn dict, times `scale`."""

    def to_gguf(value: object, scope: Scope) -> float | None:
        scaling = as_mapping(scope.h.extra.get("rope_scaling"))
        number = as_float(scaling.get("mscale_all_dim"), "mscale_all_dim")
        return scale * number if number else None

    def from_gguf(value: object, scope: Scope) -> object:
        number = from_f32(value, scope.key.gguf)
        scaling = scope.h.extra.get("rope_scaling")
        if number and isinstance(scaling, dict):
            scaling["mscale_all_dim"] = shorten(number / scale)
            scaling.setdefault("mscale", scaling["mscale_all_dim"])
        return DEFAULT

    return Converter(to_gguf, from_gguf)


def unless_named(otherwise: object) -> Converter:
    """The same on both sides; a GGUF without the key means `otherwise`."""
    return Converter(from_gguf=lambda value, scope: otherwise if value is None else value)


def times_hidden(factor: object, scope: Scope) -> int | None:
    """A factor of the hidden size as a width."""
    number, hidden = as_float(factor, scope.name), scope.h.hidden_size
    return None if number is None or hidden is None else int(number * hidden)


def over_hidden(width: int | None, scope: Scope) -> object:
    """A width as a factor of the hidden size, a whole one where it can be."""
    hidden = scope.h.hidden_size
    if not width or not hidden:
        return DEFAULT
    return width // hidden if width % hidden == 0 else width / hidden


WINDOW = Converter(window_to, _window_from)
YARN_LOG = yarn_log(1.0)


# --- Llama and its relatives ---

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
            f"{scope.name}: llama.cpp's {scope.row.gguf} leaves exactly every fourth layer without rotation"
        )


def _whole_heads_to(value: object, scope: Scope) -> None:
    """The runtime has no other size of the projections than hidden_size."""
    h = scope.h
    if h.head_dim and h.hidden_size and h.num_heads and h.num_heads * h.head_dim != h.hidden_size:
        raise RefusedError(
            f"{h.num_heads} heads of {h.head_dim} values do not make up the hidden size, {h.hidden_size}, which "
            f"llama.cpp's {scope.row.gguf} expects"
        )


def _some_conv_to(value: object, scope: Scope) -> None:
    """The runtime's memory of a hybrid asserts that both kinds of layers are there."""
    kinds = layer_kinds(scope.h.extra, scope.h.num_layers)
    if kinds and len({kind in _ATTENTION for kind in kinds}) == 1:
        raise RefusedError(
            f"all layers are of one kind, {kinds[0]}: llama.cpp's {scope.row.gguf} loads networks that mix attention "
            "and convolutions only"
        )


def _every_layer_to(value: object, scope: Scope) -> object:
    """The step between layers with experts, which the runtime takes for 1."""
    if value not in (None, 1):
        raise RefusedError(f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} looks for experts in every layer")
    return value


def _equal_heads_to(value: object, scope: Scope) -> None:
    h = scope.h
    if h.num_kv_heads != h.num_heads:
        raise RefusedError(
            f"{h.num_kv_heads} key-value heads for {h.num_heads} heads: llama.cpp's {scope.row.gguf} has equally many"
        )


_NORMED_LAYERS = 64
"""From so many layers on llama.cpp's command-r wants norms of Q and K, and knows none before."""


def _large_qk_norm_to(value: object, scope: Scope) -> None:
    normed, n_layers = bool(value), scope.h.num_layers or 0
    if normed != (n_layers >= _NORMED_LAYERS):
        raise RefusedError(
            f"use_qk_norm is {normed} in a network of {n_layers} layers: llama.cpp's {scope.row.gguf} norms Q and K "
            f"from {_NORMED_LAYERS} layers on, and only then"
        )


def _twice_to(value: object, scope: Scope) -> object:
    """The width of a Mamba layer, of which the runtime knows one."""
    width, hidden = as_int(value, scope.name), scope.h.hidden_size
    if width is not None and hidden is not None and width != 2 * hidden:
        raise RefusedError(
            f"{scope.name} is {width}, {width / hidden:g} times the hidden size: llama.cpp's {scope.row.gguf} "
            "loads an expansion by 2 only"
        )
    return value


def _sliding_to(value: object, scope: Scope) -> object:
    """A network without a window has no pattern of windows."""
    return layer_types_to(value, scope) if window_to(scope.h.extra.get("sliding_window"), scope) else None


def _sliding_from(value: object, scope: Scope) -> object:
    if value is None and not scope.gguf("attention.sliding_window"):
        return [FULL] * (scope.h.num_layers or 0)
    return layer_types_from(value, scope)


_BETA, _PADDING = "llama_4_scaling_beta", "tokenizer.ggml.padding_token_id"


def _temperature_length(value: object, scope: Scope) -> int | None:
    """After how many positions queries grow, where they do."""
    scaling = scaling_of(scope.h)
    key = "original_max_position_embeddings"
    return as_int(scaling.get(key), key) if scaling.get(_BETA) else None


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
    return scope.h.plain_head_dim if wide else scope.h.head_dim


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


# --- GPT-2 and its relatives, encoders ---

_MODERNBERT_PERIOD = 3
"""Of the layers of a ModernBERT that names no layer types: each third from the first on sees everything."""


def _multi_query_settle(value: object, scope: Scope) -> int | None:
    """KV heads by the switch: transformers does not look at the number that may stand in the config."""
    return scope.h.num_heads if scope.config("multi_query") is False else 1


def _falcon_kv_settle(value: object, scope: Scope) -> int | None:
    """KV heads: one where attention is multi-query, but for the new decoder, which goes by its number."""
    new, multi = scope.config("new_decoder_architecture"), scope.config("multi_query")
    if multi and not new:
        return 1
    return as_int(value, scope.name) or scope.h.num_heads


def _falcon_kind_from(value: object, scope: Scope) -> object:
    """Which of the three Falcons: by the KV heads and the norms of a layer."""
    heads, kv_heads = scope.h.num_heads, scope.h.num_kv_heads
    if not scope.names or kv_heads is None:
        return DEFAULT
    norms = 2 if "blk.0.attn_norm_2.weight" in scope.names else 1
    new = norms == 2 or 1 < kv_heads != heads
    return ConfigKeys(
        new_decoder_architecture=new, multi_query=kv_heads == 1, num_ln_in_parallel_attn=norms if new else None
    )


def _has_groups(scope: Scope) -> bool:
    return scope.h.num_kv_heads != scope.h.num_heads


def _alibi_to(value: object, scope: Scope) -> float | None:
    return 0.0 if scope.config("attn_config.alibi") is False else as_float(value, scope.name)


def _alibi_from(value: object, scope: Scope) -> object:
    bias = as_float(value, scope.key.gguf)
    if bias is None and not scope.kv:
        return DEFAULT
    usual = scope.defaults.get(scope.name)
    shown = usual if not bias else int(bias) if bias.is_integer() else bias
    return ConfigKeys({"attn_config.alibi": bool(bias), scope.name: shown})


def _offset_positions_to(value: object, scope: Scope) -> int | None:
    """Positions that a text can have: RoBERTa counts from the id of the padding token on, plus one."""
    positions, padding = as_int(value, scope.name), scope.size("pad_token_id")
    if positions is None or padding is None:
        return positions
    if positions <= padding + 1:
        raise RefusedError(f"{positions} positions leave none after the padding token, {padding}")
    return positions - padding - 1


def _offset_positions_from(value: object, scope: Scope) -> object:
    key = "tokenizer.ggml.padding_token_id"
    positions = as_int(value, scope.key.gguf)
    padding = as_int(scope.kv.get(key, scope.defaults.get("pad_token_id")), key)
    return DEFAULT if positions is None or padding is None else positions + padding + 1


def _modernbert_to(value: object, scope: Scope) -> object:
    """Period of the layers that see everything, the first among them; a list where there is none."""
    if not isinstance(value, list):
        raise CorruptError("layer_types is not a list")
    full = [i for i, kind in enumerate(value) if kind == FULL]
    period = full[1] if len(full) > 1 else len(value)
    if value == kinds_of(periodic(period, len(value), first=0)):
        return period
    return GgufKeys({scope.key.gguf: ("bool[]", [kind == SLIDING for kind in value])})


def _modernbert_from(value: object, scope: Scope) -> object:
    if isinstance(value, list):
        return kinds_of([bool(item) for item in value])
    period = as_int(value, scope.key.gguf) or _MODERNBERT_PERIOD
    return kinds_of(periodic(period, scope.h.num_layers, first=0)) if scope.h.num_layers else DEFAULT


def _modernbert_fill(scope: Scope) -> list[str] | None:
    period = as_int(scope.h.extra.pop("global_attn_every_n_layers", None), "global_attn_every_n_layers")
    n_layers = scope.h.num_layers
    return kinds_of(periodic(period or _MODERNBERT_PERIOD, n_layers, first=0)) if n_layers else None


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
    count = scope.size("moe_num_shared_experts") or scope.size("num_shared_experts")
    return count * scope.h.moe_intermediate_size if count and scope.h.moe_intermediate_size else None


def _lite_drafts_to(value: object, scope: Scope) -> object:
    """llama.cpp's converter leaves the draft layers of DeepSeek-V3 itself aside, and writes those of GLM-4.7-Flash."""
    return value or None if scope.h.hf_model_type == "glm4_moe_lite" else None


def _lite_drafts_from(value: object, scope: Scope) -> object:
    if value:  # only the GGUF of GLM-4.7-Flash has any
        scope.h.hf_model_type = "glm4_moe_lite"
    return value or 0


def _last_layer_to(value: object, scope: Scope) -> None:
    """Up to which layer there are experts: a GGUF has no key for it, it is always the last."""
    if value not in (None, -1) and scope.h.num_layers is not None and value != scope.h.num_layers - 1:
        raise RefusedError(
            f"{scope.name} is {value}, but a GGUF of {scope.row.gguf!r} has experts up to the last layer"
        )


def _dense_first(value: object, scope: Scope) -> object:
    """How many layers at the beginning are dense, of a list that says it of each; one where nothing says it."""
    if not isinstance(value, list):
        return DEFAULT if scope.config("first_k_dense_replace") is not None else ConfigKeys(first_k_dense_replace=1)
    count = next((n for n, kind in enumerate(value) if kind != "dense"), len(value))
    return ConfigKeys(mlp_layer_types=value, first_k_dense_replace=count)


def _dense_first_to(value: object, scope: Scope) -> None:
    if isinstance(value, list) and "dense" in value[scope.size("first_k_dense_replace") or 0 :]:
        raise RefusedError(
            f"{scope.name} has dense layers after sparse ones, which a GGUF of {scope.row.gguf!r} cannot have"
        )


def _listed_dense_from(value: object, scope: Scope) -> object:
    """The same list, for classes that know no number of dense layers."""
    first, n_layers = scope.size("first_k_dense_replace"), scope.h.num_layers
    return DEFAULT if first is None else ["dense" if i < first else "sparse" for i in range(n_layers or 0)]


def _dense_list_from(value: object, scope: Scope) -> object:
    """The same of a config that knows no other key for it."""
    n_layers, dense = scope.h.num_layers or 0, _gguf_int(scope, "leading_dense_block_count")
    return ["dense" if i < dense else "sparse" for i in range(n_layers)]


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
_ATTENTION = (FULL, SLIDING, "attention")


def _kinds(scope: Scope) -> list[object]:
    kinds = layer_kinds(scope.h.extra, scope.h.num_layers)
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
    interval = interval or scope.h.extra.get("full_attention_interval", scope.defaults["full_attention_interval"])
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
    sees = SLIDING if scope.gguf("attention.sliding_window") else FULL
    return [sees if n else _other(scope) for n in heads]


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
        raise CorruptError(f"hybrid_override_pattern {pattern!r:.40} may only have the letters {''.join(_BLOCK_OF)}")
    return [_BLOCK_OF[letter] for letter in pattern]


def _block_types_from(value: object, scope: Scope) -> object:
    """By the KV heads and the widths of the MLPs: a layer that has neither is a state-space one."""
    heads, widths = scope.gguf("attention.head_count_kv"), scope.gguf("feed_forward_length")
    if not isinstance(heads, list) or not isinstance(widths, list):
        return DEFAULT
    mlp = "moe" if scope.gguf("expert_count") else "mlp"
    return ["full_attention" if n else mlp if width else LINEAR for n, width in zip(heads, widths, strict=False)]


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


def _depth_scale_to(value: object, scope: Scope) -> float | None:
    """MiniCPM's residual scale: scale_depth over the square root of the number of layers."""
    depth = as_float(value, scope.name)
    return None if depth is None or not scope.h.num_layers else depth / math.sqrt(scope.h.num_layers)


def _depth_scale_from(value: object, scope: Scope) -> object:
    scale = as_float(value, scope.key.gguf)
    return DEFAULT if scale is None or not scope.h.num_layers else round(scale * math.sqrt(scope.h.num_layers), 6)


def _base_width_to(value: object, scope: Scope) -> float | None:
    """MiniCPM's logits are divided by how many times wider than `dim_model_base` the network is."""
    base = as_int(value, scope.name)
    return scope.h.hidden_size / base if base and scope.h.hidden_size else None


def _base_width_from(value: object, scope: Scope) -> object:
    times = as_float(value, scope.key.gguf)
    return round(scope.h.hidden_size / times) if times and scope.h.hidden_size else DEFAULT


_TEXT: dict[str, Converter] = {
    "": Converter(),
    "rope": Converter(lambda value, scope: GgufKeys(rope.to_gguf(scope.h, scope.row)), _rope_from),
    "rotary_dim": Converter(lambda value, scope: rope.rotary_dim(scope.h), _rotary_dim_from),
    "shared_rotary_dim": Converter(lambda value, scope: rope.rotary_dim(scope.h), _rotary_dim_from),
    "head_dim": Converter(_head_dim_to, _head_dim_from, settle=_head_dim_settle),
    "window": WINDOW,
    "gating": words({"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}),
    "qk_post_norm": Converter(
        nothing, lambda value, scope: "blk.0.attn_q_norm.weight" in scope.names, settle=_post_norm_settle
    ),
    "two_thirds": Converter(_two_thirds_to, _two_thirds_from),
    # Files of llama.cpp's converter, which do not say it, have the checkpoint's order.
    "by_head": Converter(
        lambda value, scope: None if value else False,
        lambda value, scope: value is None or bool(value),
        settle=lambda value, scope: False,
    ),
    "folded": Converter(_folded_to, default),
    "gated_proj": Converter(nothing, _gated_proj_from),
    "as_deep": Converter(_as_deep_to, fill=lambda scope: scope.h.num_layers),
    "yarn_log": YARN_LOG,
    "yarn_log_tenth": yarn_log(0.1),
    "four_hidden": Converter(fill=lambda scope: times_hidden(4, scope)),
    "every_fourth": Converter(_rotated_to, lambda value, scope: _rotated_fill(scope), _rotated_fill),
    "whole_heads": Converter(_whole_heads_to, default),
    "sliding_layers": Converter(_sliding_to, _sliding_from, layer_types_fill),
    "pad_token": Converter(nothing, lambda value, scope: as_id(scope.kv.get(_PADDING), _PADDING)),
    "llama_4_scaling": Converter(
        lambda value, scope: as_float(scaling_of(scope.h).get(_BETA), _BETA) or None, _temperature_from
    ),
    "llama_4_length": Converter(_temperature_length, lambda value, scope: DEFAULT),
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
    "multi_query": Converter(nothing, lambda value, scope: scope.h.num_kv_heads == 1 if scope.kv else DEFAULT),
    "multi_query_kv": Converter(settle=_multi_query_settle),
    "falcon_kv": Converter(settle=_falcon_kv_settle),
    "falcon_kind": Converter(nothing, _falcon_kind_from),
    "expansion": Converter(
        nothing, lambda value, scope: over_hidden(scope.h.intermediate_size if scope.kv else None, scope)
    ),
    "expansion_width": Converter(fill=lambda scope: times_hidden(scope.config("expansion_ratio"), scope)),
    "kv_named": Converter(
        nothing, lambda value, scope: scope.h.num_kv_heads if scope.kv and _has_groups(scope) else DEFAULT
    ),
    "kv_if_named": Converter(
        lambda value, scope: scope.h.num_kv_heads if _has_groups(scope) else None,
        settle=lambda value, scope: scope.size("attn_config.kv_n_heads") or scope.h.num_heads,
    ),
    "alibi_bias": Converter(_alibi_to, _alibi_from),
    "offset_positions": Converter(_offset_positions_to, _offset_positions_from),
    "no_rope_scaling": Converter(lambda value, scope: None if scope.h.extra.get("rope_scaling") else "none", default),
    "modernbert_layers": Converter(_modernbert_to, _modernbert_from, _modernbert_fill),
    "absent_false": unless_named(False),
    "absent_null": unless_named(None),
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
    "drafts": Converter(from_gguf=lambda value, scope: value or 0),
    "in_rope": Converter(nothing, lambda value, scope: DEFAULT),
    "other_drafts": Converter(nothing, lambda value, scope: value or DEFAULT),
    "some_drafts": Converter(lambda value, scope: value or None, lambda value, scope: value or DEFAULT),
    "lite_drafts": Converter(_lite_drafts_to, _lite_drafts_from),
    "last_layer": Converter(_last_layer_to),
    "leading_dense_list": Converter(_dense_first_to, _dense_list_from, settle=_dense_first),
    "leading_dense": Converter(_dense_first_to, default, settle=_dense_first),
    "listed_dense": Converter(_dense_first_to, _listed_dense_from, settle=_dense_first),
    "odd_layer_types": replace(LAYER_TYPES, to_gguf=_odd_layer_types),
    "untruncated": Converter(nothing, _untruncated_from),
    "mscales": Converter(nothing, _mscales_from),
    "group_choice": Converter(nothing, _group_choice_from),
    "expand": Converter(times_hidden, lambda value, scope: over_hidden(as_int(value, scope.key.gguf), scope)),
    "if_given": Converter(),
    "expanded_twice": Converter(
        _twice_to, fill=lambda scope: times_hidden(scope.h.extra.get("expand", scope.defaults.get("expand")), scope)
    ),
    "some_conv": Converter(_some_conv_to, default),
    "every_layer": Converter(_every_layer_to),
    "equal_heads": Converter(_equal_heads_to, default),
    "large_qk_norm": Converter(_large_qk_norm_to),
    "lfm2_width": Converter(settle=_lfm2_width),
    "never_adjusted": Converter(nothing, lambda value, scope: False),
    "number_of": Converter(
        fill=lambda scope: 0, settle=lambda value, scope: len(value) if isinstance(value, list) else DEFAULT
    ),
    "auto_rank": Converter(
        fill=_rank_fill, settle=lambda value, scope: _rank_fill(scope) if value == "auto" else DEFAULT
    ),
    "inner_size": Converter(_inner_to, _inner_from),
    "recurrent_layers": Converter(_recurrent_to, _recurrent_from, _every_fourth),
    "attention_layers": Converter(lambda value, scope: _per_layer(value, scope, *_ATTENTION), _most),
    "most": Converter(from_gguf=_most),
    "mixed_layers": Converter(nothing, _mixed_from, _mixed_fill),
    "block_types": Converter(nothing, _block_types_from, settle=_block_types),
    "listed_layers": Converter(fill=_count_layers),
    "mlp_layers": Converter(lambda value, scope: _per_layer(value, scope, "mlp"), _most),
    "moe_layers": Converter(lambda value, scope: _per_layer(scope.h.moe_intermediate_size or 0, scope, "moe"), default),
    "lone_width": Converter(_lone_width_to),
    "some_experts": Converter(from_gguf=lambda value, scope: value or 0),
    # The runtime refuses more used experts than there are.
    "used_experts": Converter(lambda value, scope: value if scope.h.num_experts else None),
    "rope_switch": Converter(_rope_switch_to, lambda value, scope: "rope" if value else None),
    "depth_scale": Converter(_depth_scale_to, _depth_scale_from),
    "base_width": Converter(_base_width_to, _base_width_from),
    "qwen3_5_sections": Converter(_sections_to, default),
    "attending_layers": with_plain_kinds(Converter(_recurrent_to, _recurrent_from, _every_fourth)),
    **NGRAMS,
    **HEADS,
    **HYBRID,
    **RWKV,
    **REMOTE,
    **PROJECTORS,
    **EXPERTS,
    **WINDOWS,
    **SPARSE,
    **COMPRESSED,
    **DRAFTS,
    **LAYER_CONVERTERS,
}


class _Converters(Mapping[str, Converter]):
    """Those of texts, and behind them those of towers, which are imported when one is asked for."""

    def __getitem__(self, via: str) -> Converter:
        found = _TEXT.get(via)
        return self._of_towers()[via] if found is None else found

    def __iter__(self) -> Iterator[str]:
        return iter({**_TEXT, **self._of_towers()})

    def __len__(self) -> int:
        return len({**_TEXT, **self._of_towers()})

    @staticmethod
    def _of_towers() -> dict[str, Converter]:
        from aprfmt.arch.values_towers import TOWER_CONVERTERS

        return TOWER_CONVERTERS


CONVERTERS: Mapping[str, Converter] = _Converters()
"""What a Key's `via` names."""
