"""Cases of published configs of decoders with many experts that no class of transformers reads (arch_cases_remote)."""

from __future__ import annotations

from dataclasses import replace

from arch_cases_remote import remote
from arch_models import DIMS, VOCAB, ArchCase

Config = dict[str, object]

_SIZES: Config = {key: value for key, value in DIMS.items() if key not in ("head_dim", "pad_token_id")}
_PLAIN: Config = {**_SIZES, "hidden_act": "silu", "vocab_size": VOCAB, "tie_word_embeddings": False}
_LLAMA3: Config = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0}
_DEEPSEEK: Config = {
    **_PLAIN,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 2,
    "rope_scaling": None,
    "rope_theta": 10000,
    "scoring_func": "softmax",
}
_MIMO: Config = {
    **{key: value for key, value in _PLAIN.items() if key != "rms_norm_eps"},
    "model_type": "mimo_v2",
    "layernorm_epsilon": 1e-5,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "rope_theta": 10000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "attention_bias": False,
    "attention_value_scale": 0.707,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "n_shared_experts": None,
    "num_experts_per_tok": 2,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
}

_MINIMAX_M3: Config = {
    **_PLAIN,
    "model_type": "minimax_m3",
    "hidden_act": "swigluoai",
    "num_hidden_layers": 4,
    "head_dim": 24,
    "rotary_dim": 12,
    "intermediate_size": 48,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 48,
    "n_shared_experts": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.0,
    "rope_theta": 5000000,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "moe_layer_freq": [0, 1, 1, 1],
    "sparse_attention_config": {
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 32,
        "sparse_topk_blocks": 2,
        "sparse_block_size": 8,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0, 1, 1, 1],
    },
}

_KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_STEP: Config = {
    **{key: value for key, value in _PLAIN.items() if key not in ("num_key_value_heads", "hidden_act")},
    "model_type": "step3p5",
    "num_hidden_layers": 4,
    "num_attention_groups": 2,
    "head_dim": 16,
    "layer_types": _KINDS,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
    "rope_theta": [5000000.0, 10000.0, 10000.0, 5000000.0],
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": 16,
    },
    "sliding_window": 8,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_intermediate_size": 48,
    "share_expert_dim": 40,
    "moe_router_scaling_factor": 3.0,
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "moe_every_n_layer": 1,
    "moe_layers_enum": "1,2,3",
    "swiglu_limits": [None, 7.0, None, 7.0],
    "swiglu_limits_shared": [None, None, 16.0, None],
}

_GLM5_NEXT: Config = {
    **_PLAIN,
    "model_type": "glm5_next_text",
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_attn_config": {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
    "mla_use_nope": True,
    "mhc": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 0,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 8,
    "index_kpool": 4,
    "index_kpool_always_select_tail": True,
    "indexer_types": ["full", "full", "full", "shared"],
    "hc_mult": 4,
    "hc_sinkhorn_iters": 5,
    "hc_eps": 1e-6,
    "swiglu_limit": 7.0,
}

_DOTS3: Config = {
    **_PLAIN,
    "model_type": "dots3_note_text",
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 40,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 24,
    "swa_qk_rope_head_dim": 8,
    "swa_v_head_dim": 20,
    "apply_mla_qkv_lora_rescale": True,
    "use_dsa": True,
    "k_rope_only_layernorm": True,
    "attention_gate_type": "headwise",
    "swa_attention_gate_type": "headwise",
    "sliding_window_size": 8,
    "rope_theta": 80000000.0,
    "swa_rope_theta": 50000.0,
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}

_HALVES = "llama.cpp's dots3note applies NEOX-style RoPE to the indexer, transformers interleaved RoPE"


def _published(case_id: str, model_class: str, config: Config) -> ArchCase:
    """A config of another spelling than that of the class which transformers has."""
    return ArchCase(case_id, case_id.partition("/")[0], "", model_class, config)


CASES: tuple[ArchCase, ...] = (
    # As deepseek-ai/deepseek-moe-16b-chat has them.
    *remote(
        "deepseek",
        "DeepseekForCausalLM",
        _DEEPSEEK,
        {"gqa": {"num_key_value_heads": 2}, "all_sparse": {"first_k_dense_replace": 0}},
    ),
    # As XiaomiMiMo/MiMo-V2-Flash and XiaomiMiMo/MiMo-V2.5 have them.
    _published("mimo_v2_flash/published", "MiMoV2FlashForCausalLM", {**_MIMO, "model_type": "mimo_v2_flash"}),
    _published("mimo_v2_flash/v2_5", "MiMoV2ForCausalLM", {**_MIMO, "attention_projection_layout": "split"}),
    _published("mimo_v2_flash/fused", "MiMoV2ForCausalLM", {**_MIMO, "attention_projection_layout": "fused_qkv"}),
    # As MiniMaxAI/MiniMax-M3 has them, of which this is the language model.
    _published("minimax_m3", "MiniMaxM3SparseForCausalLM", _MINIMAX_M3),
    # As stepfun-ai/Step-3.5-Flash has them.
    _published("step3p5", "Step3p5ForCausalLM", _STEP),
    _published(
        "step3p5/llama3",
        "Step3p5ForCausalLM",
        {**_STEP, "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 64}},
    ),
    # As stepfun-ai/Step-3.7-Flash has them.
    ArchCase(
        "step3p5/whole",
        "step3p5",
        "",
        "Step3p7ForConditionalGeneration",
        {"model_type": "step3p7", "text_config": _STEP, "vision_config": {"model_type": "perception_encoder"}},
        wrapped=True,
        beside={"vision_model.conv1.weight": (4, 3, 2, 2), "vit_large_projector.weight": (64, 16)},
    ),
    # As zai-org/GLM-5.3-Flash has them.
    ArchCase(
        "glm5_next",
        "glm5_next",
        "",
        "Glm5NextForConditionalGeneration",
        {"model_type": "glm5_next", "text_config": _GLM5_NEXT, "vision_config": {"model_type": "glm5_next_vision"}},
        wrapped=True,
        begins={"model.": "model.language_model."},
        beside={"model.visual.blocks.0.attn.qkv.weight": (48, 16)},
    ),
    # As dots-studio/dots3-note-prev has them.
    replace(_published("dots3_note", "Dots3NoteTextForCausalLM", _DOTS3), llama_cpp_cannot=_HALVES),
    replace(
        _published("dots3_note/causal", "Dots3NoteForCausalLM", {**_DOTS3, "apply_mla_qkv_lora_rescale": False}),
        llama_cpp_cannot=_HALVES,
    ),
    ArchCase(
        "dots3_note/whole",
        "dots3_note",
        "",
        "Dots3NoteForConditionalGeneration",
        {"model_type": "dots3_note", "text_config": _DOTS3, "vision_config": {"embed_dim": 16}},
        llama_cpp_cannot=_HALVES,
        wrapped=True,
        beside={"vision_encoder.blocks.0.attn.qkv.weight": (48, 16)},
    ),
)
