"""One row a model: its config.json, and the GGUF keys that llama.cpp's converter writes for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

DIMS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_FACTORS = [1.0, 1.0, 1.0, 1.0, 2.6945300102233887, 8.0, 8.0, 8.0]
"""rope_freqs.weight of the converter for theta 500000 and a head of 16."""

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
    "attention_factor": 1.2,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}


@dataclass(frozen=True)
class Case:
    """`config` is what transformers 5 gets; `keys` the (key, type, value) that a GGUF of it has, in order.

    `ours` are keys that only this package adds.
    """

    name: str
    arch: str
    hf_class: str
    config: dict[str, Any]
    keys: list[tuple[str, str, Any]]
    scaling: dict[str, Any] | None = None
    theta: float = 10000.0
    ours: list[tuple[str, str, Any]] = field(default_factory=list)

    @property
    def hf_config(self) -> dict[str, Any]:
        rope = {"rope_type": "default", **(self.scaling or {}), "rope_theta": self.theta}
        return {"architectures": [self.hf_class], **DIMS, **self.config, "rope_parameters": rope}


CASES = (
    Case(
        "llama3",
        "llama",
        "LlamaForCausalLM",
        {"model_type": "llama", "max_position_embeddings": 131072, "tie_word_embeddings": True,
         "head_dim": 16, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]},
        [
            ("llama.block_count", "UINT32", 2),
            ("llama.context_length", "UINT32", 131072),
            ("llama.embedding_length", "UINT32", 64),
            ("llama.feed_forward_length", "UINT32", 96),
            ("llama.attention.head_count", "UINT32", 4),
            ("llama.attention.head_count_kv", "UINT32", 2),
            ("llama.rope.freq_base", "FLOAT32", 500000.0),
            ("llama.attention.layer_norm_rms_epsilon", "FLOAT32", 1e-06),
            ("llama.attention.key_length", "UINT32", 16),
            ("llama.attention.value_length", "UINT32", 16),
            ("general.file_type", "UINT32", 32),
            ("llama.vocab_size", "UINT32", 512),
            ("llama.rope.dimension_count", "UINT32", 16),
        ],
        LLAMA3,
        500000.0,
    ),
    Case(
        "llama-linear",
        "llama",
        "LlamaForCausalLM",
        {"model_type": "llama", "rms_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
        [
            ("llama.block_count", "UINT32", 2),
            ("llama.context_length", "UINT32", 2048),
            ("llama.embedding_length", "UINT32", 64),
            ("llama.feed_forward_length", "UINT32", 96),
            ("llama.attention.head_count", "UINT32", 4),
            ("llama.attention.head_count_kv", "UINT32", 2),
            ("llama.rope.scaling.type", "STRING", "linear"),
            ("llama.rope.scaling.factor", "FLOAT32", 2.0),
            ("llama.rope.freq_base", "FLOAT32", 10000.0),
            ("llama.attention.layer_norm_rms_epsilon", "FLOAT32", 1e-05),
            ("general.file_type", "UINT32", 32),
            ("llama.vocab_size", "UINT32", 512),
            ("llama.rope.dimension_count", "UINT32", 16),
        ],
        LINEAR,
    ),
    Case(
        "mistral",
        "mistral",
        "MistralForCausalLM",
        {"model_type": "mistral", "head_dim": 32, "sliding_window": 1024, "max_position_embeddings": 131072},
        [
            ("llama.block_count", "UINT32", 2),
            ("llama.context_length", "UINT32", 131072),
            ("llama.embedding_length", "UINT32", 64),
            ("llama.feed_forward_length", "UINT32", 96),
            ("llama.attention.head_count", "UINT32", 4),
            ("llama.attention.head_count_kv", "UINT32", 2),
            ("llama.rope.freq_base", "FLOAT32", 10000.0),
            ("llama.attention.layer_norm_rms_epsilon", "FLOAT32", 1e-06),
            ("llama.attention.key_length", "UINT32", 32),
            ("llama.attention.value_length", "UINT32", 32),
            ("general.file_type", "UINT32", 32),
            ("llama.vocab_size", "UINT32", 512),
            ("llama.rope.dimension_count", "UINT32", 32),
        ],
        ours=[("llama.attention.sliding_window", "UINT32", 1024)],
    ),
    Case(
        "qwen2-yarn",
        "qwen2",
        "Qwen2ForCausalLM",
        {"model_type": "qwen2", "max_position_embeddings": 32768, "bos_token_id": 1, "eos_token_id": 2,
         "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2,
         "tie_word_embeddings": True},
        [
            ("qwen2.block_count", "UINT32", 2),
            ("qwen2.context_length", "UINT32", 32768),
            ("qwen2.embedding_length", "UINT32", 64),
            ("qwen2.feed_forward_length", "UINT32", 96),
            ("qwen2.attention.head_count", "UINT32", 4),
            ("qwen2.attention.head_count_kv", "UINT32", 2),
            ("qwen2.rope.scaling.type", "STRING", "yarn"),
            ("qwen2.rope.scaling.factor", "FLOAT32", 4.0),
            ("qwen2.rope.scaling.original_context_length", "UINT32", 32768),
            ("qwen2.rope.scaling.yarn_attn_factor", "FLOAT32", 1.2),
            ("qwen2.rope.scaling.yarn_beta_fast", "FLOAT32", 32.0),
            ("qwen2.rope.scaling.yarn_beta_slow", "FLOAT32", 1.0),
            ("qwen2.rope.freq_base", "FLOAT32", 1000000.0),
            ("qwen2.attention.layer_norm_rms_epsilon", "FLOAT32", 1e-06),
            ("general.file_type", "UINT32", 32),
        ],
        YARN,
        1000000.0,
        # The runtime multiplies it with 1 + ln(4) / 10, and takes no notice of yarn_attn_factor.
        [("qwen2.rope.scaling.attn_factor", "FLOAT32", 1.2 / (1 + 0.1 * math.log(4.0)))],
    ),
    Case(
        "qwen3",
        "qwen3",
        "Qwen3ForCausalLM",
        {"model_type": "qwen3", "head_dim": 32, "max_position_embeddings": 32768, "attention_bias": False},
        [
            ("qwen3.block_count", "UINT32", 2),
            ("qwen3.context_length", "UINT32", 32768),
            ("qwen3.embedding_length", "UINT32", 64),
            ("qwen3.feed_forward_length", "UINT32", 96),
            ("qwen3.attention.head_count", "UINT32", 4),
            ("qwen3.attention.head_count_kv", "UINT32", 2),
            ("qwen3.rope.freq_base", "FLOAT32", 10000.0),
            ("qwen3.attention.layer_norm_rms_epsilon", "FLOAT32", 1e-06),
            ("qwen3.attention.key_length", "UINT32", 32),
            ("qwen3.attention.value_length", "UINT32", 32),
            ("general.file_type", "UINT32", 32),
        ],
    ),
)  # fmt: skip
