"""Typed numbers by their APR, Hugging Face and GGUF names; readers and writers of single values."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aprfmt.errors import CorruptError, RefusedError

GgufKey = tuple[str, str | tuple[str, str], Any]
"""(key, type name as in GgufType or ("ARRAY", element type name), value)."""


@dataclass(frozen=True, slots=True)
class Field:
    """One number of Hyperparams and its spellings where no row of the table tells them.

    Attributes:
        name: attribute of Hyperparams, and typed key of APR metadata.
        gguf: suffix of the GGUF key after the architecture.
        hf: config.json keys, the current one first.
        aliases: further keys in APR metadata, in the reference's order.
        is_float: float32 instead of an unsigned integer.
    """

    name: str
    gguf: str
    hf: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    is_float: bool = False


FIELDS: tuple[Field, ...] = (
    Field("num_layers", "block_count", ("num_hidden_layers", "n_layer", "num_layers"),
          ("num_hidden_layers", "n_layers", "n_layer")),
    Field("max_position_embeddings", "context_length", ("max_position_embeddings", "n_positions", "n_ctx"),
          ("max_seq_len", "context_length", "n_ctx")),
    Field("hidden_size", "embedding_length", ("hidden_size", "n_embd", "n_embed", "d_model"),
          ("hidden_dim", "d_model", "n_embd")),
    Field("intermediate_size", "feed_forward_length", ("intermediate_size", "n_inner", "ffn_dim"),
          ("ffn_dim", "intermediate_dim", "n_inner")),
    Field("num_heads", "attention.head_count", ("num_attention_heads", "n_head", "num_heads"),
          ("num_attention_heads", "n_heads", "n_head")),
    Field("num_kv_heads", "attention.head_count_kv", ("num_key_value_heads",),
          ("num_key_value_heads", "n_kv_heads")),
    Field("rope_theta", "rope.freq_base", ("rope_theta",), is_float=True),
    Field("rms_norm_eps", "attention.layer_norm_rms_epsilon",
          ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"), ("layer_norm_eps", "norm_eps"),
          is_float=True),
    Field("num_experts", "expert_count", ("num_local_experts", "num_experts", "n_routed_experts")),
    Field("num_experts_per_tok", "expert_used_count", ("num_experts_per_tok", "num_experts_per_token")),
    Field("moe_intermediate_size", "expert_feed_forward_length", ("moe_intermediate_size",)),
    Field("head_dim", "attention.key_length", ("head_dim",)),
    Field("vocab_size", "vocab_size", ("vocab_size",), ("n_vocab",)),
)  # fmt: skip
"""The numbers that typed APR metadata holds, in the order in which llama.cpp's converter writes them."""

BY_NAME = {f.name: f for f in FIELDS}

KEPT = (
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "hidden_act",
    "attention_bias", "mlp_bias", "pad_token_id", "quantization_config", "num_nextn_predict_layers",
    "original_max_position_embeddings",
)  # fmt: skip
"""config.json keys, beside those of a row, that are kept in Hyperparams.extra where a config has them."""


def as_int(value: Any, key: str) -> int | None:
    """`value` as a non-negative integer, None for None. Raises CorruptError for anything else."""
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise CorruptError(f"{key} is {_short(value)}, not a size")
    return value


def as_float(value: Any, key: str) -> float | None:
    """`value` as a finite float, None for None. Raises CorruptError for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CorruptError(f"{key} is {_short(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise CorruptError(f"{key} is {_short(value)}, not a finite number")
    return number


def from_f32(value: Any, key: str) -> float | None:
    """A number stored as float32 by its shortest digits: 9.99999997e-07 is 1e-06. Raises CorruptError."""
    number = as_float(value, key)
    if number is None or abs(number) > 3.4e38 or struct.unpack("<f", struct.pack("<f", number))[0] != number:
        return number
    for digits in range(1, 9):
        short = float(f"{number:.{digits}g}")
        if abs(short) < 3.4e38 and struct.pack("<f", short) == struct.pack("<f", number):
            return short
    return number


def shortest(number: float) -> float:
    """The shortest digits that give the same float32 as `number`."""
    try:
        stored = struct.unpack("<f", struct.pack("<f", number))[0]
    except (OverflowError, ValueError):
        return number
    return from_f32(stored, "") or 0.0 if math.isfinite(stored) else number


def as_id(value: Any, key: str) -> int | None:
    """A token id, of a list the first; null, [] and -1 (a spelling of none) are None. Raises CorruptError."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, int) and not isinstance(value, bool) and value < 0:
        return None
    return as_int(value, key)


def int_key(key: str, value: Any) -> GgufKey:
    """A UINT32 key-value pair. Raises RefusedError beyond 32 bits."""
    number = as_int(value, key)
    if number is None or number >= 1 << 32:
        raise RefusedError(f"{key} is {_short(value)}, which a GGUF cannot hold")
    return key, "UINT32", number


def float_key(key: str, value: Any) -> GgufKey:
    """A FLOAT32 key-value pair. Raises RefusedError beyond float32."""
    number = as_float(value, key)
    if number is None or abs(number) > 3.4e38:
        raise RefusedError(f"{key} is {_short(value)}, which a GGUF cannot hold")
    return key, "FLOAT32", number


_TYPES = {"u32": "UINT32", "i32": "INT32", "f32": "FLOAT32", "bool": "BOOL", "str": "STRING"}


def typed_key(key: str, kind: str, value: Any) -> GgufKey:
    """A key-value pair of a `kind` of row.Key. A list for a number becomes an array of INT32, or of its kind.

    Raises CorruptError for a value that is none of the kind, RefusedError for one that a GGUF cannot hold.
    """
    if isinstance(value, list | tuple):
        inner = kind.removesuffix("[]")
        inner = "i32" if inner == kind == "u32" else inner
        return key, ("ARRAY", _TYPES[inner]), [typed_key(key, inner, item)[2] for item in value]
    kind = kind.removesuffix("[]")
    if kind == "u32":
        return int_key(key, value)
    if kind == "f32":
        return float_key(key, value)
    if kind == "i32":
        if isinstance(value, bool) or not isinstance(value, int):
            raise CorruptError(f"{key} is {_short(value)}, not a whole number")
        if not -(1 << 31) <= value < 1 << 31:
            raise RefusedError(f"{key} is {_short(value)}, which a GGUF cannot hold")
    elif not isinstance(value, bool if kind == "bool" else str):
        raise CorruptError(f"{key} is {_short(value)}, not a {'truth value' if kind == 'bool' else 'string'}")
    return key, _TYPES[kind], value


def untyped(key: str, kind: str, value: Any) -> Any:
    """A GGUF value as its config.json value: float32 by shortest digits, arrays as lists. Raises CorruptError."""
    value = listed(key, value)
    if isinstance(value, list):
        return [untyped(key, kind.removesuffix("[]"), item) for item in value]
    kind = kind.removesuffix("[]")
    if value is None:
        return None
    if kind == "f32":
        return from_f32(value, key)
    if kind == "u32":
        return as_int(value, key)
    wanted: dict[str, type] = {"i32": int, "bool": int, "str": str}
    if not isinstance(value, wanted[kind]):
        raise CorruptError(f"{key} is {_short(value)}, not of type {kind}")
    return bool(value) if kind == "bool" else value


def checked(key: str, kind: str, value: Any) -> Any:
    """A GGUF value for a converter: as it is, but of the kind's type. Raises CorruptError.

    A list for one number is what all its items are; a number may stand for a list, as the runtime has it too, and
    flags for the period of layers.
    """
    value = listed(key, value)
    inner = kind.removesuffix("[]")
    if isinstance(value, list):
        items = [checked(key, inner, item) for item in value]
        if inner != kind or (items and all(isinstance(item, bool) for item in items)):
            return items
        if not items or items.count(items[0]) != len(items):
            raise CorruptError(f"{key} differs from layer to layer")
        return items[0]
    if value is None or (inner == "str" == kind and isinstance(value, str)):
        return value
    if inner == "f32":
        return as_float(value, key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str if inner == "str" == kind else int) or (inner == "str" and inner != kind):
        raise CorruptError(f"{key} is {_short(value)}, not of type {kind}")
    return value


def listed(key: str, value: Any) -> Any:
    """A GGUF value with an array as a list. Raises CorruptError for what is neither number, string nor array."""
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise CorruptError(f"{key} is no value of a known type")
    return [item.item() if hasattr(item, "item") else item for item in value]


def _short(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return "an integer of many digits"
    text = repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."
