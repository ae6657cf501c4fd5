"""Converters of networks of attention and one dense MLP: the families of Llama, Gemma and GPT-2, encoders."""

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
    ConfigKeys,
    Converter,
    GgufKeys,
    Scope,
    default,
    kinds_of,
    layer_types_fill,
    layer_types_from,
    layer_types_to,
    nothing,
    over_hidden,
    periodic,
    times_hidden,
    window_to,
)
from aprfmt.errors import CorruptError, RefusedError

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
        new_decoder_architecture=new,
        multi_query=kv_heads == 1,
        num_ln_in_parallel_attn=norms if new else None,
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


def _labels_to(value: object, scope: Scope) -> list[str] | None:
    """Names of a classifier's outputs, without the two that transformers makes up."""
    if value is None or not (scope.h.hf_architecture or "").endswith("ForSequenceClassification"):
        return None
    if not isinstance(value, dict):
        raise CorruptError("id2label is not an object")
    labels = [str(value[key]) for key in sorted(value, key=lambda key: str(key).zfill(9))]
    return None if labels == ["LABEL_0", "LABEL_1"] else labels


def _labels_from(value: object, scope: Scope) -> object:
    if not isinstance(value, list):
        return DEFAULT
    return {str(i): label for i, label in enumerate(value)}


def _dense_first_to(value: object, scope: Scope) -> object:
    """Period of the layers that see everything, the first among them; a list where there is none."""
    if not isinstance(value, list):
        raise CorruptError("layer_types is not a list")
    full = [i for i, kind in enumerate(value) if kind == FULL]
    period = full[1] if len(full) > 1 else len(value)
    if value == kinds_of(periodic(period, len(value), first=0)):
        return period
    return GgufKeys({scope.key.gguf: ("bool[]", [kind == SLIDING for kind in value])})


def _dense_first_from(value: object, scope: Scope) -> object:
    if isinstance(value, list):
        return kinds_of([bool(item) for item in value])
    period = as_int(value, scope.key.gguf) or _MODERNBERT_PERIOD
    return kinds_of(periodic(period, scope.h.num_layers, first=0)) if scope.h.num_layers else DEFAULT


def _dense_first_fill(scope: Scope) -> list[str] | None:
    period = as_int(scope.h.extra.pop("global_attn_every_n_layers", None), "global_attn_every_n_layers")
    n_layers = scope.h.num_layers
    return kinds_of(periodic(period or _MODERNBERT_PERIOD, n_layers, first=0)) if n_layers else None


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
    "multi_query": Converter(
        nothing, lambda value, scope: scope.h.num_kv_heads == 1 if scope.kv else DEFAULT
    ),
    "multi_query_kv": Converter(settle=_multi_query_settle),
    "falcon_kv": Converter(settle=_falcon_kv_settle),
    "falcon_kind": Converter(nothing, _falcon_kind_from),
    "expansion": Converter(
        nothing,
        lambda value, scope: over_hidden(scope.h.intermediate_size if scope.kv else None, scope),
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
    "no_rope_scaling": Converter(
        lambda value, scope: None if scope.h.extra.get("rope_scaling") else "none", default
    ),
    "labels": Converter(_labels_to, _labels_from),
    "modernbert_layers": Converter(_dense_first_to, _dense_first_from, _dense_first_fill),
}
