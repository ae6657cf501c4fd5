"""Cases of diffusion language models, which transformers does not have: config.json as published but for the sizes."""

from __future__ import annotations

from arch_cases_remote import Config, remote
from arch_models import DIMS, VOCAB

_SIZES: Config = {key: value for key, value in DIMS.items() if key not in ("head_dim", "pad_token_id")}
_LLADA: Config = {
    "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "attention_dropout": 0.0,
    "attention_layer_norm": False, "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama",
    "bos_token_id": 1, "d_model": 64, "embedding_size": VOCAB, "eos_token_id": 2, "include_bias": False,
    "include_qkv_bias": False, "input_emb_norm": False, "layer_norm_type": "rms", "layer_norm_with_affine": True,
    "mask_token_id": 5, "max_sequence_length": 512, "mlp_hidden_size": 96, "mlp_ratio": 4, "multi_query_attention":
    None, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2, "pad_token_id": 2, "rms_norm_eps": 1e-5, "rope": True,
    "rope_theta": 500000.0, "scale_logits": False, "vocab_size": VOCAB, "weight_tying": False,
}  # fmt: skip
_QWEN: Config = {
    **_SIZES, "hidden_act": "silu", "vocab_size": VOCAB, "tie_word_embeddings": False, "rope_scaling": None,
    "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False, "mask_token_id": 5,
}  # fmt: skip
_LLADA_MOE: Config = {
    **{key: value for key, value in _SIZES.items() if key != "intermediate_size"},
    "attention_bias": False, "dense_intermediate_size": 96, "expert_intermediate_size": 48, "hidden_act": "silu",
    "moe_layer_freq": [1, 1], "moe_router_enable_expert_bias": False, "moe_router_score_function": "softmax",
    "norm_topk_prob": None, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4,
    "partial_rotary_factor": 1, "qk_layernorm": True, "rope_scaling": None, "rope_theta": 50000,
    "shared_expert_intermediate_size": None, "tie_word_embeddings": False, "vocab_size": VOCAB,
}  # fmt: skip
_RND1: Config = {
    **_QWEN, "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 16, "max_window_layers": 2,
    "mlp_only_layers": [], "moe_intermediate_size": 48, "norm_topk_prob": True, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip

CASES = (
    # As GSAI-ML/LLaDA-8B-Instruct has them; its relatives with fewer key-value heads or biases are LLaDA-1.5's options.
    *remote("llada", "LLaDAModelLM", _LLADA, {"gqa": {"n_kv_heads": 2}, "qkv-bias": {"include_qkv_bias": True}}),
    # As inclusionAI/LLaDA-MoE-7B-A1B-Instruct has them.
    *remote("llada_moe", "LLaDAMoEModelLM", {**_LLADA_MOE, "model_type": "lladamoe"}),
    # As Dream-org/Dream-v0-Instruct-7B has them.
    *remote("dream", "DreamModel", {**_QWEN, "model_type": "Dream", "max_window_layers": 2}),
    # As radicalnumerics/RND1-Base-0910 has them.
    *remote("rnd1", "RND1", _RND1, {"wide-heads": {"head_dim": 24}}),
)
