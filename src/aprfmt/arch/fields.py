"""The field table: hyper-parameters by their APR, Hugging Face and GGUF names; readers of single values."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aprfmt.errors import CorruptError, RefusedError

GgufKey = tuple[str, str, Any]
"""(key, type name as in GgufType, value)."""


@dataclass(frozen=True, slots=True)
class Field:
    """One number of Hyperparams and its spellings.

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
"""In the order in which llama.cpp's converter writes them."""

HF_EXTRA = (
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "hidden_act",
    "attention_bias", "mlp_bias", "partial_rotary_factor", "pad_token_id",
    "quantization_config", "num_nextn_predict_layers",
)  # fmt: skip
"""config.json keys, beside the fields, that change what the network computes; kept in Hyperparams.extra."""

HF_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
"""What an absent config.json key means, by model type (transformers 5); see COMMON_DEFAULTS."""

COMMON_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""Absent config.json keys of every family of the table; what no entry names stays unknown."""


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


def _short(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return "an integer of many digits"
    text = repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."
