"""Cases of networks that transformers does not have: config.json as published but for the sizes, tensors by the row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arch_models import DIMS, VOCAB, ArchCase

Config = dict[str, Any]

_SIZES: Config = {key: value for key, value in DIMS.items() if key != "head_dim"}
_PLAIN: Config = {**_SIZES, "hidden_act": "silu", "vocab_size": VOCAB, "tie_word_embeddings": False}
LLAMA3: Config = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def remote(
    row: str, model_class: str, config: Config, variants: Mapping[str, Config] = {}, **fields: Any
) -> tuple[ArchCase, ...]:
    """The base case of a row that transformers does not have, and its variants: what differs from `config`."""
    base = {"model_type": row, **config}
    cases = {row: base} | {f"{row}/{name}": base | variant for name, variant in variants.items()}
    return tuple(ArchCase(name, row, "", model_class, values, **fields) for name, values in cases.items())


_MHA: Config = {"num_key_value_heads": 4}

CASES: tuple[ArchCase, ...] = (
    *remote("internlm2", "InternLM2ForCausalLM", {**_PLAIN, "bias": False, "rope_theta": 1000000}, {"mha": _MHA}),
    *remote("orion", "OrionForCausalLM", {**_PLAIN, "max_sequence_length": 512}, {"mha": _MHA}),
    *remote("xverse", "XverseForCausalLM", {**_PLAIN, **_MHA}),
    *remote(
        "baichuan",
        "BaichuanForCausalLM",
        {
            **{k: v for k, v in _PLAIN.items() if k not in ("num_key_value_heads", "max_position_embeddings")},
            "model_max_length": 512,
        },
    ),
    *remote(
        "exaone",
        "ExaoneForCausalLM",
        {
            **{k: v for k, v in _PLAIN.items() if k not in ("num_hidden_layers", "rms_norm_eps", "hidden_act")},
            "num_layers": 2,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "silu",
            "head_dim": 16,
            "rope_theta": 1000000,
        },
        {"llama3": {"rope_scaling": LLAMA3}, "tied": {"tie_word_embeddings": True}},
    ),
    *remote("maincoder", "MaincoderForCausalLM", {**_PLAIN, "head_dim": 16, "rope_theta": 1000000.0}),
    *remote(
        "pangu_embedded",
        "PanguEmbeddedForCausalLM",
        {**_PLAIN, "model_type": "PanguEmbedded", "bias": True, "rope_theta": 16000000.0},
    ),
    *remote(
        "qwen",
        "QWenLMHeadModel",
        {
            **{k: v for k, v in _SIZES.items() if k not in ("num_key_value_heads", "rms_norm_eps")},
            "layer_norm_epsilon": 1e-6,
            "rotary_emb_base": 10000,
            "no_bias": True,
            "seq_length": 512,
            "tie_word_embeddings": False,
            "vocab_size": VOCAB,
        },
    ),
    *remote(
        "codeshell",
        "CodeShellForCausalLM",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "num_query_groups": 2,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_pytorch_tanh",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "vocab_size": VOCAB,
        },
        {"tied": {"tie_word_embeddings": True}},
    ),
    *remote(
        "nanbeige",
        "NanbeigeForCausalLM",
        {**_PLAIN, "num_loops": 2, "skip_loop_final_norm": True, "rope_theta": 70000000.0},
        {"once": {"num_loops": 1}},
    ),
    *remote(
        "minicpm",
        "MiniCPMForCausalLM",
        {
            **_PLAIN,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 16,
            "tie_word_embeddings": True,
            "rope_theta": 10000.0,
        },
    ),
)
