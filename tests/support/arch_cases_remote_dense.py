"""Cases of dense decoders whose code came with their checkpoints, with the config.json of a published model."""

from __future__ import annotations

from typing import Any

from arch_cases_remote import remote
from arch_models import VOCAB, ArchCase

_LLAMA: dict[str, Any] = {
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
    "max_position_embeddings": 512, "num_attention_heads": 4, "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "vocab_size": VOCAB,
}  # fmt: skip

# As zai-org/chatglm3-6b has them.
_CHATGLM: dict[str, Any] = {
    "add_bias_linear": False, "add_qkv_bias": True, "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False, "attention_softmax_in_fp32": True, "ffn_hidden_size": 96,
    "hidden_size": 64, "kv_channels": 16, "layernorm_epsilon": 1e-5, "multi_query_attention": True,
    "multi_query_group_num": 2, "num_attention_heads": 4, "num_layers": 2, "original_rope": True,
    "padded_vocab_size": VOCAB, "post_layer_norm": True, "rmsnorm": True, "seq_length": 512,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# As smallcloudai/Refact-1_6B-fim has them.
_REFACT: dict[str, Any] = {
    "attention_bias_in_fp32": True, "bos_token_id": 0, "eos_token_id": 0, "layer_norm_epsilon": 1e-5,
    "multi_query": True, "n_embd": 64, "n_head": 4, "n_inner": None, "n_layer": 2, "n_positions": 512,
    "scale_attn_weights": True, "vocab_size": VOCAB,
}  # fmt: skip
# As pfnet/plamo-13b has them.
_PLAMO: dict[str, Any] = {
    **{key: value for key, value in _LLAMA.items() if key not in ("max_position_embeddings", "hidden_act")},
    "num_attention_heads": 8, "n_shared_head": 4, "pad_token_id": 3, "tokenizer_class": "PlamoTokenizer",
}  # fmt: skip
# As XHToken/Spark-X2.5-1.7B has them.
_SPARK: dict[str, Any] = {
    **_LLAMA, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "gelu",
    "gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True, "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5000000, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
# As zai-org/cogvlm-chat-hf has them, without its vision tower.
_COGVLM: dict[str, Any] = {**_LLAMA, "model_type": "cogvlm", "template_version": "chat"}

CASES: tuple[ArchCase, ...] = (
    *remote("chatglm", "ChatGLMModel", _CHATGLM, {"no_bias": {"add_qkv_bias": False}}),
    # As zai-org/glm-4-9b-chat has them.
    ArchCase("chatglm/glm4", "chatglm", "", "ChatGLMForConditionalGeneration", {
        **_CHATGLM, "model_type": "chatglm", "rope_ratio": 500, "vocab_size": VOCAB, "layernorm_epsilon": 1.5625e-07,
    }),
    *remote("refact", "GPTRefactForCausalLM", {**_REFACT, "model_type": "gpt_refact"}),
    *remote("plamo", "PlamoForCausalLM", _PLAMO),
    *remote("spark2_5", "Spark2_5ForCausalLM", _SPARK, {"tied": {"tie_word_embeddings": True}}),
    *remote("cogvlm", "CogVLMForCausalLM", _COGVLM, {"kv_heads": {"num_key_value_heads": 4}}),
)  # fmt: skip
