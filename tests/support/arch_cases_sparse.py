"""Cases of decoders with latent attention, attention to chosen positions, or many experts beside a window."""

from __future__ import annotations

from dataclasses import replace

from arch_cases_common import TIED, WIDE_HEADS, YARN, Config, family, renamed
from arch_cases_multimodal import whole
from arch_models import DIMS, VOCAB, ArchCase

_YARN: Config = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
_MLA: Config = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "routed_scaling_factor": 1.75,
    "n_group": 1,
    "topk_group": 1,
}
# As published. So many heads, because the score of a position is 0 where each head is below 0, and such ties are broken
# at random; heads of 64, because llama.cpp turns keys by matrices of that size.
_INDEXED: Config = {**_MLA, "index_n_heads": 32, "index_head_dim": 64, "index_topk": 8, "scoring_func": "sigmoid"}
_SHARED: Config = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "full"]}

_HY_V3: Config = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "router_scaling_factor": 1.75,
}
_HY_V4_NAMES = (
    (r"(layers\.\d+)\.hc_pre\.(hc_\w+_layer)\.", r"\1.\2.hc_pre."),
    (r"model\.hc_pre\.", "model."),
    (r"mlp\.(.*)linear_gate", r"mlp.\1gate_proj"),
)
"""What transformers makes of its own names when it saves -> the published ones."""
_MIMO_ROPE: Config = {"rope_type": "default", "partial_rotary_factor": 0.334}
_MIMO: Config = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "scoring_func": "sigmoid",
}
_THETAS: Config = {
    "full_attention": {**_MIMO_ROPE, "rope_theta": 5000000.0},
    "sliding_attention": {**_MIMO_ROPE, "rope_theta": 10000.0},
}
_HY_V4: Config = {key: value for key, value in _INDEXED.items() if key not in ("first_k_dense_replace", "scoring_func")}
_HY_V4 |= {"mlp_layer_types": ["dense", "sparse", "sparse"], "indexer_types": ["full", "shared", "full"], "hc_mult": 3}
_M3_TEXT: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 2e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 24,
    "rotary_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "intermediate_size": 48,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk_blocks": 2,
    "index_block_size": 4,
}
_M3_VISION: Config = {
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


_STEP_TEXT: Config = {
    **{key: value for key, value in _M3_TEXT.items() if key in DIMS or key in ("vocab_size", "num_experts_per_tok")},
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "share_expert_dim": 40,
    "moe_router_scaling_factor": 1.75,
    "num_sliding_attention_heads": 6,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "rope_theta": 50000.0,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
}
_STEP_VISION: Config = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "mlp_ratio": 1.5,
}


def _step(case_id: str, **text: object) -> ArchCase:
    config = {"text_config": _STEP_TEXT | text, "vision_config": _STEP_VISION, "image_token_id": 5}
    return whole(case_id, "Step3p7", config)


def _m3(case_id: str, **text: object) -> ArchCase:
    config = {"text_config": _M3_TEXT | text, "vision_config": _M3_VISION, "image_token_index": 5}
    return replace(whole(case_id, "MiniMaxM3VL", config), model_class="MiniMaxM3SparseForConditionalGeneration")


CASES: tuple[ArchCase, ...] = (
    *family("deepseek_v32", "DeepseekV32", {**_INDEXED, "n_group": 4, "topk_group": 2}, {
        "all_seen": {"index_topk": 64}, "one_group": {"n_group": 1, "topk_group": 1},
        "yarn": {"rope_parameters": _YARN},
        "all_dense": {"first_k_dense_replace": 3}, "tied": TIED,
        "no_norm_topk": {"norm_topk_prob": False},
    }),
    *family("glm_moe_dsa", "GlmMoeDsa", _INDEXED, {
        "shared": _SHARED, "all_seen": {"index_topk": 64}, "tied": TIED,
        "groups": {"n_group": 4, "topk_group": 2}, "no_norm_topk": {"norm_topk_prob": False},
    }),
    *family("hy_v3", "HYV3", _HY_V3, {
        "tied": TIED, "head_dim": WIDE_HEADS,
        "all_sparse": {"mlp_layer_types": ["sparse"] * 3},
        "dense_between": {"mlp_layer_types": ["sparse", "dense", "sparse"]},
        "yarn": YARN,
        "bias": ({"attention_bias": True}, "its loader has no attention output bias"),
        "mlp_bias": ({"mlp_bias": True}, "its loader has no MLP biases"),
    }),
    *family("mimo_v2_flash", "MiMoV2Flash", {**_MIMO, "rope_parameters": _THETAS}, {
        "bias": ({"attention_bias": True}, "llama.cpp's mimo2 has no Q, K and V biases"),
        "no_value_scale": {"attention_value_scale": None},
        "half_rotary": {
            "rope_parameters": {kind: {**it, "partial_rotary_factor": 0.5} for kind, it in _THETAS.items()}
        },
        "tied": TIED, "all_sparse": {"mlp_layer_types": ["sparse"] * 4},
        "groups": ({"n_group": 2, "topk_group": 1}, "llama.cpp's mimo2 does not support expert groups"),
        "scaled": ({"routed_scaling_factor": 1.5}, "llama.cpp's mimo2 ignores the scale of the experts"),
        "no_norm_topk": ({"norm_topk_prob": False}, "llama.cpp's mimo2 always normalizes expert weights"),
    }),
    _step("step3p5/logits"),
    _step("step3p5/limits", swiglu_limits=[None, 0.5, None, 0.2], swiglu_limits_shared=[None, None, 0.5, None]),
    _m3("minimax_m3/whole"),
    _m3("minimax_m3/all_rotated", rotary_dim=24, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    _m3("minimax_m3/two_local", index_local_blocks=2),
    *renamed(_HY_V4_NAMES, *family("hy_v4", "HYV4", _HY_V4, {
        "all_seen": {"index_topk": 64}, "all_sparse": {"mlp_layer_types": ["sparse"] * 3},
        "no_norm_topk": {"norm_topk_prob": False}, "limit": {"swiglu_limit": 0.05}, "tied": TIED,
        "weak": {"hc_magnitude": 0.7},
    }, cannot="llama.cpp's hy_v4 applies interleaved RoPE to rows that transformers rotates NEOX-style")),
)  # fmt: skip
