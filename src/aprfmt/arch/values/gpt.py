"""Converters of hyper-parameters that GPT-2's kin and encoders have, beside those of arch.values."""

from __future__ import annotations

from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.values.base import (
    DEFAULT,
    FULL,
    SLIDING,
    ConfigKeys,
    Converter,
    GgufKeys,
    Scope,
    default,
    kinds_of,
    nothing,
    over_hidden,
    periodic,
    times_hidden,
)
from aprfmt.errors import CorruptError, RefusedError

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
        raise RefusedError(f"{positions} positions leave none behind padding token {padding}")
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
