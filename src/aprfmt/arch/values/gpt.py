"""Converters of hyper-parameters that GPT-2's kin and encoders have, beside those of arch.values."""

from __future__ import annotations

from typing import Any

from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.values.base import DEFAULT, Converter, Side
from aprfmt.errors import CorruptError, RefusedError

_GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "gelu_accurate")
_GLUS = ("gelu", "silu")
_MODERNBERT_PERIOD = 3
"""Of the layers of a ModernBERT that names no layer types: each third from the first on sees everything."""


def _refuse(value: Any, side: Side, known: tuple[Any, ...]) -> None:
    """Raises RefusedError for a config value that llama.cpp's network does not compute."""
    if value is not None and value not in known:
        raise RefusedError(
            f"{side.key.hf[0]} is {value!r:.40}; llama.cpp's {side.row.gguf} network knows only "
            f"{' and '.join(map(repr, known[:2]))}"
        )


def _gelu_to(value: Any, side: Side) -> None:
    _refuse(value, side, _GELUS)


def _glu_to(value: Any, side: Side) -> Any:
    _refuse(value, side, _GLUS)
    return value


def _nothing_to(value: Any, side: Side) -> None:
    _refuse(value, side, (None,))


def _multi_query_from(value: Any, side: Side) -> Any:
    return side.h.num_kv_heads == 1 if side.kv else DEFAULT


def _multi_query_settle(value: Any, side: Side) -> int | None:
    """KV heads by the switch: transformers does not look at the number that may stand in the config."""
    return side.h.num_heads if side.config("multi_query") is False else 1


def _falcon_kv_settle(value: Any, side: Side) -> int | None:
    """KV heads: one where attention is multi-query, but for the new decoder, which goes by its number."""
    new, multi = side.config("new_decoder_architecture"), side.config("multi_query")
    if multi and not new:
        return 1
    return as_int(value, side.key.hf[0]) or side.h.num_heads


def _falcon_kind_from(value: Any, side: Side) -> Any:
    """Which of the three Falcons: by the KV heads and the norms of a layer."""
    heads, kv_heads = side.h.num_heads, side.h.num_kv_heads
    if not side.names or kv_heads is None:
        return DEFAULT
    norms = 2 if "blk.0.attn_norm_2.weight" in side.names else 1
    new = norms == 2 or 1 < kv_heads != heads
    return {
        "new_decoder_architecture": new,
        "multi_query": kv_heads == 1,
        "num_ln_in_parallel_attn": norms if new else None,
    }


def _expansion_fill(side: Side) -> int | None:
    factor = as_float(side.config("expansion_ratio"), "expansion_ratio")
    return int(factor * side.h.hidden_size) if factor and side.h.hidden_size else None


def _expansion_from(value: Any, side: Side) -> Any:
    ffn, hidden = side.h.intermediate_size, side.h.hidden_size
    if not side.kv or not ffn or not hidden:
        return DEFAULT
    return ffn // hidden if ffn % hidden == 0 else ffn / hidden


def _kv_if_named_to(value: Any, side: Side) -> int | None:
    return side.h.num_kv_heads if side.h.num_kv_heads != side.h.num_heads else None


def _kv_if_named_settle(value: Any, side: Side) -> int | None:
    named = as_int(side.config("attn_config.kv_n_heads"), "attn_config.kv_n_heads")
    return named or side.h.num_heads


def _kv_named_from(value: Any, side: Side) -> Any:
    kv_heads = side.h.num_kv_heads
    return kv_heads if side.kv and kv_heads != side.h.num_heads else DEFAULT


def _alibi_to(value: Any, side: Side) -> float | None:
    return 0.0 if side.config("attn_config.alibi") is False else as_float(value, side.key.hf[0])


def _alibi_from(value: Any, side: Side) -> Any:
    bias = as_float(value, side.key.gguf)
    if bias is None and not side.kv:
        return DEFAULT
    usual = side.defaults.get(side.key.hf[0])
    shown = usual if not bias else int(bias) if bias.is_integer() else bias
    return {"attn_config.alibi": bool(bias), side.key.hf[0]: shown}


def _offset_positions_to(value: Any, side: Side) -> int | None:
    """Positions that a text can have: RoBERTa counts from the id of the padding token on, plus one."""
    positions, padding = as_int(value, side.key.hf[0]), as_int(side.config("pad_token_id"), "pad_token_id")
    if positions is None or padding is None:
        return positions
    if positions <= padding + 1:
        raise RefusedError(f"{positions} positions are none behind padding token {padding}")
    return positions - padding - 1


def _offset_positions_from(value: Any, side: Side) -> Any:
    key = "tokenizer.ggml.padding_token_id"
    positions = as_int(value, side.key.gguf)
    padding = as_int(side.kv.get(key, side.defaults.get("pad_token_id")), key)
    return DEFAULT if positions is None or padding is None else positions + padding + 1


def _no_rope_scaling_to(value: Any, side: Side) -> str | None:
    return None if side.h.extra.get("rope_scaling") else "none"


def _labels_to(value: Any, side: Side) -> list[str] | None:
    """Names of a classifier's outputs, without the two that transformers makes up."""
    if value is None or not (side.h.hf_architecture or "").endswith("ForSequenceClassification"):
        return None
    if not isinstance(value, dict):
        raise CorruptError("id2label is no object")
    labels = [str(value[key]) for key in sorted(value, key=lambda key: str(key).zfill(9))]
    return None if labels == ["LABEL_0", "LABEL_1"] else labels


def _labels_from(value: Any, side: Side) -> Any:
    return DEFAULT if value is None else {"id2label": {str(i): label for i, label in enumerate(value)}}


def _dense_first_to(value: Any, side: Side) -> Any:
    """Period of the layers that see everything, the first among them; a list where there is none."""
    if not isinstance(value, list):
        raise CorruptError("layer_types is no list")
    full = [i for i, kind in enumerate(value) if kind == "full_attention"]
    period = full[1] if len(full) > 1 else len(value)
    if value == _dense_first(period, len(value)):
        return period
    return {side.key.gguf: ("bool[]", [kind == "sliding_attention" for kind in value])}


def _dense_first(period: int, n_layers: int) -> list[str]:
    return ["sliding_attention" if i % period else "full_attention" for i in range(n_layers)]


def _dense_first_from(value: Any, side: Side) -> Any:
    if isinstance(value, list | tuple):
        return ["sliding_attention" if item else "full_attention" for item in value]
    period = as_int(value, side.key.gguf) or _MODERNBERT_PERIOD
    return _dense_first(period, side.h.num_layers) if side.h.num_layers else DEFAULT


def _dense_first_fill(side: Side) -> list[str] | None:
    period = as_int(side.h.extra.pop("global_attn_every_n_layers", None), "global_attn_every_n_layers")
    return _dense_first(period or _MODERNBERT_PERIOD, side.h.num_layers) if side.h.num_layers else None


CONVERTERS: dict[str, Converter] = {
    "gelu": Converter(_gelu_to),
    "glu": Converter(_glu_to),
    "nothing": Converter(_nothing_to),
    "multi_query": Converter(lambda value, side: None, _multi_query_from),
    "multi_query_kv": Converter(settle=_multi_query_settle),
    "falcon_kv": Converter(settle=_falcon_kv_settle),
    "falcon_kind": Converter(lambda value, side: None, _falcon_kind_from),
    "expansion": Converter(lambda value, side: None, _expansion_from),
    "expansion_width": Converter(fill=_expansion_fill),
    "kv_named": Converter(lambda value, side: None, _kv_named_from),
    "kv_if_named": Converter(_kv_if_named_to, settle=_kv_if_named_settle),
    "alibi_bias": Converter(_alibi_to, _alibi_from),
    "offset_positions": Converter(_offset_positions_to, _offset_positions_from),
    "no_rope_scaling": Converter(_no_rope_scaling_to, lambda value, side: DEFAULT),
    "labels": Converter(_labels_to, _labels_from),
    "modernbert_layers": Converter(_dense_first_to, _dense_first_from, _dense_first_fill),
}
"""What a Key's `via` names."""
