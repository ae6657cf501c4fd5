"""Cases of hybrids and of linear attention that transformers does not have, as published but for the sizes."""

from __future__ import annotations

from typing import Any

from arch_cases_common import NO_WINDOW
from arch_cases_remote import remote
from arch_models import VOCAB, ArchCase

_SIZES: dict[str, Any] = {
    "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 64, "max_position_embeddings": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": VOCAB,
}  # fmt: skip
# As MiniMaxAI/MiniMax-Text-01 has them.
_MINIMAX: dict[str, Any] = {
    **_SIZES, "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1], "head_dim": 32, "hidden_act": "silu", "intermediate_size": 48,
    "layernorm_full_attention_alpha": 3.5565588200778455, "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 3.5565588200778455, "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": 3.5565588200778455, "layernorm_mlp_beta": 1.0, "num_experts_per_tok": 2,
    "num_hidden_layers": 8, "num_local_experts": 4, "postnorm": True, "rope_theta": 10000000, "rotary_dim": 16,
    "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
# As pfnet/plamo-2-1b has them.
_PLAMO2: dict[str, Any] = {
    **_SIZES, "attention_window_size": 2048, "full_attention_idx": None, "hidden_size_per_head": 16,
    "intermediate_size": 96, "mamba_chunk_size": 256, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_enabled": True,
    "mamba_num_heads": 8, "mamba_step": 2, "num_hidden_layers": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
# As pfnet/plamo-3-nict-2b-base has them.
_PLAMO3: dict[str, Any] = {
    **_SIZES, "head_dim": 16, "intermediate_size": 96, "num_hidden_layers": 3, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "rope_local_theta": 10000, "sliding_window_pattern": 2, "window_size": 64,
    "tie_word_embeddings": False,
}  # fmt: skip

# As inclusionAI/Ling-3.0-tiny has them.
_LING: dict[str, Any] = {
    **_SIZES, "num_key_value_heads": 4, "model_type": "bailing_moe_v3", "first_k_dense_replace": 1,
    "gated_attention_proj_granularity_type": "head_wise", "head_dim": 16, "hidden_act": "silu",
    "intermediate_size": 96, "kda_lower_bound": -5.0, "kda_safe_gate": True, "kv_lora_rank": 24, "layer_group_size": 3,
    "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 40, "n_group": 2, "no_kda_lora": True,
    "norm_topk_prob": True, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4,
    "num_shared_experts": 1, "q_lora_rank": None, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "rope_theta": 6000000, "routed_scaling_factor": 2.5, "score_function": "sigmoid",
    "short_conv_kernel_size": 4, "tie_word_embeddings": False, "topk_group": 1, "use_qkv_bias": False,
    "v_head_dim": 16,
}  # fmt: skip
_LING_LIMITS: dict[str, Any] = {
    "q_lora_rank": 20, "expert_swiglu_limit_list": [None, 7.0, 7.0, 7.0],
    "share_expert_swiglu_limit_list": [None, 5.0, 5.0, 5.0],
}  # fmt: skip


# As openjev/openjev has its language model; llama.cpp's converter writes the same from build 11434 on.
_JEV: dict[str, Any] = {
    **_SIZES, "attention_bias": False, "full_attention_interval": 2, "head_dim": 16, "hidden_act": "silu",
    "intermediate_size": 96, "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 16,
    "model_type": "qwen3_5_text", "num_hidden_layers": 2, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25
    },
}  # fmt: skip

# As ibm-granite/granite-switch-4.1-3b-preview has them.
_SWITCH: dict[str, Any] = {
    **_SIZES, "model_type": "granite_switch", "adapter_substitute_token_ids": [5, 6, 7],
    "adapter_token_ids": [20, 21, 22],
    "attention_multiplier": 0.25, "control_token_gain": 15.0, "embedding_multiplier": 12.0, "hidden_act": "silu",
    "intermediate_size": 96, "logits_scaling": 10.0, "max_lora_rank": 8, "num_adapters": 3, "num_experts_per_tok": 0,
    "num_hidden_layers": 4, "num_local_experts": 0, "residual_multiplier": 0.22, "rope_theta": 10000000,
    "shared_intermediate_size": 96, "tie_word_embeddings": True,
}  # fmt: skip


def _other(id: str, model_class: str, config: dict[str, Any]) -> ArchCase:
    """A variant under another name of the class."""
    row = id.partition("/")[0]
    return ArchCase(id, row, "", model_class, {"model_type": row, **config})


CASES: tuple[ArchCase, ...] = (
    *remote("bailing_moe_v3", "BailingMoeV3ForCausalLM", _LING, {"limits": _LING_LIMITS}),
    ArchCase(
        "bailing_moe_v3/vl", "bailing_moe_v3", "", "BailingMoeV3VLForConditionalGeneration",
        {
            "model_type": "bailing_moe_v3_vl", "text_config": _LING | {"mrope_section": [2, 1, 1]},
            "vision_config": {"hidden_size": 32},
        },
        wrapped=True, beside={"model.visual.merger.norm.weight": (32,), "linear_proj.0.weight": (64, 32)},
    ),
    *remote("minimax_text_01", "MiniMaxText01ForCausalLM", _MINIMAX, {
        "pattern": {"attn_type_list": [0, 1, 0, 1], "num_hidden_layers": 4},
    }),
    _other(
        "minimax_text_01/m1", "MiniMaxM1ForCausalLM", _MINIMAX | {"model_type": "minimax_m1", "num_key_value_heads": 4}
    ),
    *remote("plamo2", "Plamo2ForCausalLM", _PLAMO2, {
        "step": {"mamba_step": 4, "num_hidden_layers": 6},
        "last": {"mamba_step": 8, "num_hidden_layers": 3},
        "heads": {"hidden_size_per_head": 24, "mamba_num_heads": 6, "num_key_value_heads": 4},
    }),
    ArchCase(
        "plamo2/window", "plamo2", "", "Plamo2ForCausalLM",
        {"model_type": "plamo2", **_PLAMO2, "attention_window_size": 8}, llama_cpp_cannot=NO_WINDOW,
    ),
    _other("plamo2/head", "PLaMo2ForCausalLM", _PLAMO2 | {"tie_word_embeddings": False}),
    *remote("openjev", "OpenJevModel", _JEV),
    *remote("granite_switch", "GraniteSwitchForCausalLM", _SWITCH, {
        "mha": {"num_key_value_heads": 4, "num_adapters": 1, "adapter_token_ids": [30],
                "adapter_substitute_token_ids": [3], "control_token_gain": 20.0},
        "untied": {"tie_word_embeddings": False},
    }),
    *remote("plamo3", "Plamo3ForCausalLM", _PLAMO3),
    _other("plamo3/tied", "PLaMo3ForCausalLM", _PLAMO3 | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
)  # fmt: skip
