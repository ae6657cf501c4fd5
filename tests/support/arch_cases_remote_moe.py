"""Cases of decoders with routed experts whose code came with their checkpoints, as published but for the sizes."""

from __future__ import annotations

from typing import Any

from arch_cases_remote import remote
from arch_models import VOCAB, ArchCase

_SIZES: dict[str, Any] = {
    "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 64, "max_position_embeddings": 512,
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "vocab_size": VOCAB,
}  # fmt: skip
_WIDTH = {"intermediate_size": 96}
_SILU = {"hidden_act": "silu"}

# As keyfan/grok-1-hf has them.
_GROK: dict[str, Any] = {
    **_SIZES, **_WIDTH, "model_type": "grok-1", "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "attn_output_multiplier": 0.25, "embedding_multiplier_scale": 8.0, "output_multiplier_scale": 0.577,
    "max_attn_value": 30.0, "tie_word_embeddings": True,
}  # fmt: skip
# As xai-org/grok-2 has them, but for the base frequency, whose digits no float32 holds. Its checkpoint cuts each tensor
# in files of the same names, which must be joined first.
_GROK2: dict[str, Any] = {
    **_SIZES, **_WIDTH, "model_type": "git", "head_dim": 16, "moe_intermediate_size": 48, "num_local_experts": 4,
    "num_experts_per_tok": 2, "residual_moe": True, "embedding_multiplier_scale": 8.0, "output_multiplier_scale": 0.5,
    "final_logit_softcapping": 50, "attn_logit_softcapping": 30.0, "router_logit_softcapping": 30.0,
    "rope_theta": 208000000, "attn_temperature_len": 1024, "sliding_window_size": -1, "global_attn_every_n": 1,
    "rope_type": "original", "original_max_position_embeddings": 128, "scaling_factor": 4.0,
    "extrapolation_factor": 1.0, "attn_factor": 1.0, "beta_fast": 8, "beta_slow": 1,
}  # fmt: skip
# As Snowflake/snowflake-arctic-instruct has them.
_ARCTIC: dict[str, Any] = {
    **_SIZES, **_WIDTH, **_SILU, "max_sequence_length": 512, "moe_layer_frequency": 1, "num_experts_per_tok": 2,
    "num_local_experts": 4, "parallel_attn_mlp_res": True, "rope_theta": 10000, "sliding_window": None,
    "use_residual": True,
}  # fmt: skip
# As inclusionAI/GroveMoE-Inst has them.
_GROVE: dict[str, Any] = {
    **_SIZES, **_WIDTH, **_SILU, "model_type": "grove_moe", "attention_bias": False, "decoder_sparse_step": 1,
    "head_dim": 16, "max_window_layers": 2, "mlp_only_layers": [], "moe_intermediate_size": 24, "norm_topk_prob": True,
    "num_experts": 8, "num_experts_per_tok": 2, "rope_scaling": None, "rope_theta": 10000000.0,
    "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
_GROVE_GRAPH = "its graph feeds the chunk experts the routed experts' output"
# As PowerInfer/SmallThinker-4BA0.6B-Instruct has them; the larger model has windows.
_SMALL: dict[str, Any] = {
    **_SIZES, "num_hidden_layers": 4, "head_dim": 16, "moe_enable_early_router": True,
    "moe_enable_secondary_experts": False, "moe_ffn_hidden_size": 24, "moe_layer_layout": [1] * 4,
    "moe_num_active_primary_experts": 2, "moe_num_primary_experts": 4, "moe_primary_router_apply_softmax": False,
    "moe_shared_primary_experts": 0, "rope_layout": [1] * 4, "rope_scaling": None, "rope_theta": 1500000.0,
    "sliding_window_layout": [0] * 4, "sliding_window_size": 4096, "use_qk_norm": False,
}  # fmt: skip
_LAYOUT = [0, 1, 1, 1]
# As deepgrove/maple-preview has them.
_MAPLE: dict[str, Any] = {
    **_SIZES, **_SILU, "num_hidden_layers": 4, "head_dim": 16, "use_bias": False, "rope_theta": 10000.0,
    "rope_scaling": None, "partial_rotary_factor": 0.5, "num_experts": 4, "num_experts_per_tok": 2,
    "num_shared_experts": 0, "moe_intermediate_size": 24, "norm_topk_prob": True, "sliding_window": 8,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "nope_on_global_attention": True,
}  # fmt: skip
# As inclusionAI/Ling-lite-1.5 has them.
_BAILING: dict[str, Any] = {
    **_SIZES, **_WIDTH, **_SILU, "embedding_dropout": 0.0, "first_k_dense_replace": 0, "head_dim": 16,
    "max_window_layers": 2, "moe_intermediate_size": 24, "norm_head": False, "norm_softmax": False,
    "norm_topk_prob": True, "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 2,
    "rope_scaling": None, "rope_theta": 600000, "use_bias": False, "use_qkv_bias": False,
}  # fmt: skip
# As inclusionAI/Ling-mini-2.0 has them.
_BAILING_V2: dict[str, Any] = {
    **_SIZES, **_WIDTH, **_SILU, "first_k_dense_replace": 1, "head_dim": 16, "model_type": "bailing_moe_v2",
    "moe_intermediate_size": 24, "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 24,
    "n_group": 2, "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 2, "num_nextn_predict_layers": 0,
    "num_shared_experts": 1, "partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 600000,
    "routed_scaling_factor": 2.5, "score_function": "sigmoid", "topk_group": 1, "use_bias": False,
    "use_qk_norm": True, "use_qkv_bias": False,
}  # fmt: skip
# As sarvamai/sarvam-30b has them.
_SARVAM: dict[str, Any] = {
    **{key: value for key, value in _BAILING_V2.items() if key != "partial_rotary_factor"},
    "model_type": "sarvam_moe", "n_group": 1, "rope_theta": 8000000.0,
}  # fmt: skip
PARAM2 = {**_SARVAM, "model_type": "param2moe"}

CASES: tuple[ArchCase, ...] = (
    *remote("grok", "GrokForCausalLM", _GROK),
    *remote("grok2", "Grok1ForCausalLM", _GROK2),
    *remote("arctic", "ArcticForCausalLM", _ARCTIC),
    *remote("grovemoe", "GroveMoeForCausalLM", _GROVE, llama_cpp_cannot=_GROVE_GRAPH),
    ArchCase("grovemoe/module", "grovemoe", "", "modeling_grove_moe.GroveMoeForCausalLM", _GROVE,
        llama_cpp_cannot=_GROVE_GRAPH),
    *remote("smallthinker", "SmallThinkerForCausalLM", _SMALL, {
        "windows": {"sliding_window_layout": _LAYOUT, "rope_layout": _LAYOUT, "moe_primary_router_apply_softmax": True},
        "tied": {"tie_word_embeddings": True},
    }),
    *remote("maple", "MapleForCausalLM", _MAPLE),
    *remote("bailing_moe", "BailingMoeForCausalLM", _BAILING, {
        "plain_sum": {"norm_topk_prob": False}, "norm_head": {"norm_head": True},
    }),
    *remote("bailing_moe_v2", "BailingMoeV2ForCausalLM", _BAILING_V2, {
        "no_bias": {"moe_router_enable_expert_bias": False},
    }),
    ArchCase("bailing_moe_v2/sarvam", "bailing_moe_v2", "", "SarvamMoEForCausalLM", _SARVAM),
    ArchCase("bailing_moe_v2/sarvam_module", "bailing_moe_v2", "", "modeling_sarvam_moe.SarvamMoEForCausalLM", _SARVAM),
)  # fmt: skip
