"""Cases of decoders with routed experts."""

from __future__ import annotations

from arch_cases_common import LINEAR, MHA, TIED, UNTIED, Config, family
from arch_models import ArchCase

_ROUTED: Config = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL: Config = {"num_local_experts": 4, "num_experts_per_tok": 2}
_YARN: Config = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3: Config = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MLA: Config = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "routed_scaling_factor": 1.75,
}
_GLM_LITE: Config = {key: value for key, value in _MLA.items() if key != "first_k_dense_replace"}
_GLM_LITE["n_routed_experts"] = 8
_SHARED: Config = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "routed_scaling_factor": 1.75,
    "norm_topk_prob": True,
}
_GRANITE: Config = {
    **_LOCAL,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
_ERNIE: Config = {
    "num_hidden_layers": 3,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 48,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 2,
}
# The ramp of this yarn ends just below a whole dimension, where rounding it, as llama.cpp does, changes nothing.
_GPT_OSS_YARN: Config = {
    "rope_type": "yarn",
    "rope_theta": 172300.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}
_GPT_OSS: Config = {
    **_LOCAL,
    "head_dim": 32,
    "sliding_window": 8,
    "intermediate_size": 64,
    "rope_parameters": _GPT_OSS_YARN,
}
_DEEPSEEK_YARN: Config = {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1}
_PHIMOE_ROPE: Config = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.4, 1.8, 2.2, 2.7],
    "long_factor": [1.0, 1.2, 1.6, 2.5, 4.0, 8.0, 12.0, 20.0],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 64,
}
_ONE_SOFTMAX = "llama.cpp uses RMSNorm instead of LayerNorm, and one softmax over both experts instead of sparsemixer"
_ALL_SPARSE = "its loader needs experts in every layer: GGUF has no key for mlp_only_layers and decoder_sparse_step"
_DBRX_ATTENTION: Config = {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 20000.0}
_DBRX_FFN: Config = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}
_DBRX: Config = {
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 512,
    "attn_config": _DBRX_ATTENTION,
    "ffn_config": _DBRX_FFN,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
}

CASES: tuple[ArchCase, ...] = (
    *family("mixtral", "Mixtral", _LOCAL, {
        "mha": MHA, "head_dim": {"head_dim": 24},
        "tied": TIED, "llama3": {"rope_parameters": _LLAMA3},
        "yarn": {"rope_parameters": _YARN},
        "five_experts": {"num_local_experts": 5, "num_experts_per_tok": 3},
    }),
    *family("qwen2_moe", "Qwen2Moe",
            {**_ROUTED, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80}, {
        "mha": MHA, "no_bias": {"qkv_bias": False}, "yarn": {"rope_parameters": _YARN},
        "tied": TIED,
        "norm_topk": ({"norm_topk_prob": True},
            "llama.cpp's qwen2moe never normalizes expert weights"),
        "dense_layer": ({"mlp_only_layers": [0]}, _ALL_SPARSE),
    }),
    *family("qwen3_moe", "Qwen3Moe",
            {**_ROUTED, "moe_intermediate_size": 48, "head_dim": 32, "norm_topk_prob": True}, {
        "mha": MHA, "tied": TIED,
        "yarn": {"rope_parameters": _YARN},
        "bias": ({"attention_bias": True}, "llama.cpp's qwen3moe has no attention output bias"),
        "no_norm_topk": ({"norm_topk_prob": False},
            "llama.cpp's qwen3moe always normalizes expert weights"),
        "every_second": ({"decoder_sparse_step": 2}, _ALL_SPARSE),
    }),
    *family("phimoe", "Phimoe", {**_LOCAL, "attention_bias": True, "lm_head_bias": True}, {
        "no_bias": {"attention_bias": False, "lm_head_bias": False},
        "longrope": {"rope_parameters": _PHIMOE_ROPE},
    }, cannot=_ONE_SOFTMAX),
    *family("olmoe", "Olmoe", {**_ROUTED, "num_key_value_heads": 4}, {
        "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        "gqa": ({"num_key_value_heads": 2}, "llama.cpp expects a K norm as wide as the Q norm"),
        "clip_qkv": ({"clip_qkv": 0.5}, "llama.cpp's olmoe does not clip Q, K and V"),
        "norm_topk": ({"norm_topk_prob": True},
            "llama.cpp's olmoe never normalizes expert weights"),
        "tied": TIED,
    }),
    *family("granitemoe", "GraniteMoe", {**_GRANITE, **TIED}, {
        "untied": UNTIED, "mha": MHA,
        "bias": {"attention_bias": True}, "llama3": {"rope_parameters": _LLAMA3},
    }),
    *family("granitemoeshared", "GraniteMoeShared",
            {**_GRANITE, **TIED, "shared_intermediate_size": 80}, {
        "untied": UNTIED,
    }),
    *family("ernie4_5_moe", "Ernie4_5_Moe", {**_ERNIE, **TIED}, {
        "untied": UNTIED, "no_shared": {"moe_num_shared_experts": 0},
        "all_layers": {"moe_layer_start_index": 0},
        "bias": ({"use_bias": True}, "llama.cpp's ernie4_5-moe has no biases in attention output and MLPs"),
        "every_second": ({"moe_layer_interval": 2},
            "its loader needs experts in every layer after the leading dense ones"),
        "dense_end": ({"moe_layer_end_index": 1},
            "its loader needs experts in every layer after the leading dense ones"),
    }),
    *family("dbrx", "Dbrx", _DBRX, {
        "other_norm": ({"ffn_config": {**_DBRX_FFN, "moe_normalize_expert_weights": 2.0}},
            "llama.cpp's dbrx normalizes expert weights by their sum"),
    }),
    *family("gpt_oss", "GptOss", _GPT_OSS, {
        "plain_rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "layer_types": {"layer_types": ["full_attention", "sliding_attention"]},
        "ragged_yarn": ({"rope_parameters": {**_GPT_OSS_YARN, "rope_theta": 150000.0}},
            "llama.cpp always rounds the bounds of YaRN's ramp (truncate)"),
        "beta": ({"rope_parameters": {**_GPT_OSS_YARN, "beta_slow": 2.0}},
            "llama.cpp ignores yarn_beta_fast and yarn_beta_slow: they are 32 and 1"),
        "no_bias": {"attention_bias": False},
        "tied": TIED,
    }),
    ArchCase("gpt_oss/bf16", "gpt_oss", "GptOssConfig", "GptOssForCausalLM", _GPT_OSS, dtype="bfloat16"),
    *family("glm4_moe", "Glm4Moe", {**_SHARED, "num_nextn_predict_layers": 0}, {
        "qk_norm": {"use_qk_norm": True}, "bias": {"attention_bias": True},
        "tied": TIED, "no_norm_topk": {"norm_topk_prob": False},
        "groups": {"n_group": 4, "topk_group": 2},
    }),
    ArchCase(
        "glm4_moe/solar_open", "glm4_moe", "SolarOpenConfig", "SolarOpenForCausalLM",
        {
            **_SHARED, "first_k_dense_replace": 0, "num_hidden_layers": 2, "intermediate_size": 96, "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0},
        },
    ),
    *family("dots1", "Dots1", {**_SHARED, "num_key_value_heads": 4}, {
        "no_norm_topk": {"norm_topk_prob": False}, "groups": {"n_group": 4, "topk_group": 2},
        "tied": TIED,
        "gqa": ({"num_key_value_heads": 2}, "llama.cpp expects K and V as wide as Q"),
        "sliding": ({"sliding_window": 8, "max_window_layers": 1}, "llama.cpp's dots1 has no sliding layers"),
    }),
    *family("minimax_m2", "MiniMaxM2", {**_LOCAL, "head_dim": 24, "rotary_dim": 12}, {
        "whole_rotary": {"rotary_dim": 24}, "tied": TIED,
    }),
    *family("hunyuan_v1_moe", "HunYuanMoEV1",
            {"num_experts": 4, "moe_topk": 2, **TIED}, {
        "untied": UNTIED, "mha": MHA,
        "topk_list": {"moe_topk": [2, 2]},
    }),
    *family("deepseek_v2", "DeepseekV2", {**_MLA, "q_lora_rank": None, "n_shared_experts": 2}, {
        "q_lora": {"q_lora_rank": 24}, "all_sparse": {"first_k_dense_replace": 0},
        "linear": LINEAR,
        "yarn": {"rope_parameters": _DEEPSEEK_YARN},
        "groups": ({"n_routed_experts": 8, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            "llama.cpp selects expert groups by the sum of their two best scores, DeepSeek V2 by the best"),
        "tied": TIED,
    }),
    *family("deepseek_v3", "DeepseekV3",
            {**_MLA, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0}, {
        "whole_q": {"q_lora_rank": None}, "linear": LINEAR,
        "yarn": {"rope_parameters": {**_DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "one_group": {"n_group": 1, "topk_group": 1}, "no_norm_topk": {"norm_topk_prob": False},
        "all_dense": {"first_k_dense_replace": 3}, "tied": TIED,
        "halves": ({"rope_interleave": False},
            "llama.cpp's deepseek2 supports interleaved RoPE only (rope_interleave)"),
    }),
    *(
        ArchCase(
            f"deepseek_v3/{name}",
            "deepseek_v3",
            "Glm4MoeLiteConfig",
            "Glm4MoeLiteForCausalLM",
            {**_GLM_LITE, **more},
        )
        for name, more in (
            ("glm4_lite", {}),
            ("glm4_lite_dense", {"mlp_layer_types": ["dense", "dense", "sparse"]}),
            ("glm4_lite_sparse", {"mlp_layer_types": ["sparse", "sparse", "sparse"]}),
        )
    ),
)  # fmt: skip
