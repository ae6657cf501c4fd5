"""Cases of decoders whose layers attend, or have Mamba's mixer or linear attention, each with an MLP behind it."""

from __future__ import annotations

from typing import Any

from arch_cases_common import ATTENTION_BIAS, MHA, TIED, Config, family
from arch_models import VOCAB, ArchCase

_BAMBA: Config = {
    "num_hidden_layers": 4,
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "pad_token_id": 0,
}
_JAMBA: Config = {
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 4,
    "pad_token_id": 0,
}
_LATE: Config = {"expert_layer_period": 3, "expert_layer_offset": 2, "attn_layer_period": 8, "attn_layer_offset": 2}

_FALCON: Config = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "embedding_multiplier": 5.656854249492381,
    "lm_head_multiplier": 0.3,
    "mlp_multipliers": [0.88, 1.27],
    "key_multiplier": 0.39,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9375,
    "ssm_multipliers": [0.35, 0.25, 0.7, 0.9, 1.2],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
}
_NORMED: Config = {"mamba_rms_norm": True, "mamba_norm_before_gate": False}

_KIMI: Config = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "linear_attn_config": {
        "full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4,
    },
    "mlp_layer_types": ["sparse"] * 3,
    "first_k_dense_replace": 0,
    "moe_router_activation_func": "sigmoid",
    "pad_token_id": 0,
}  # fmt: skip
_KIMI_WIDE: Config = {
    "linear_attn_config": {
        "full_attn_layers": [1, 3], "kda_layers": [2], "head_dim": 32, "num_heads": 4, "short_conv_kernel_size": 3,
    },
    "n_shared_experts": 2,
    "v_head_dim": 12,
    "qk_nope_head_dim": 8,
}  # fmt: skip

_KIMI_PUBLISHED: Config = {
    **{key: value for key, value in _KIMI.items() if key not in ("mlp_layer_types", "num_local_experts")},
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "model_max_length": 512, "num_experts": 4, "num_experts_per_token": 2,
    "num_expert_group": 1, "topk_group": 1, "num_shared_experts": 1, "moe_layer_freq": 1, "moe_renormalize": True,
    "mla_use_nope": True, "first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "rope_scaling": None,
    "rope_theta": 10000.0, "use_grouped_topk": True, "tie_word_embeddings": False, "model_type": "kimi_linear",
    "bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCAB,
}  # fmt: skip
"""As moonshotai/Kimi-Linear-48B-A3B-Instruct has it, with its dense first layer."""

_K3_TEXT: Config = {
    **{k: v for k, v in _KIMI_PUBLISHED.items() if k not in (
        "head_dim", "model_max_length", "rope_scaling", "rope_theta", "num_hidden_layers", "linear_attn_config"
    )},
    "architectures": ["KimiLinearForCausalLM"], "max_position_embeddings": 512, "num_hidden_layers": 4,
    "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "attn_res_block_size": 2,
    "latent_moe_use_norm": True, "mla_use_output_gate": True, "routed_expert_hidden_size": 32, "q_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "kv_lora_rank": 32, "num_key_value_heads": 4,
    "moe_intermediate_size": 64, "num_shared_experts": 2, "routed_scaling_factor": 1.0, "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0, "linear_attn_config": {
        "full_attn_layers": [3, 4], "kda_layers": [1, 2], "gate_lower_bound": -5.0, "head_dim": 16, "num_heads": 4,
        "short_conv_kernel_size": 4, "use_full_rank_gate": True,
    },
}  # fmt: skip
_K3: Config = {
    "model_type": "kimi_k3", "media_placeholder_token_id": 5, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "text_config": _K3_TEXT, "vision_config": {"patch_size": 14, "vt_hidden_size": 32},
}  # fmt: skip
"""As moonshotai/Kimi-K3 has it."""


def _k3(name: str = "", **text: Any) -> ArchCase:
    config = {**_K3, "text_config": _K3_TEXT | text}
    tower = {"vision_tower.patch_embed.proj.weight": (8, 12), "mm_projector.proj.0.weight": (64, 8)}
    return ArchCase(
        f"kimi_k3{name}", "kimi_k3", "", "KimiK3ForConditionalGeneration", config, wrapped=True, beside=tower
    )


_ORIGINAL: Config = {
    "model_type": "mamba", "d_model": 64, "n_layer": 2, "vocab_size": VOCAB, "ssm_cfg": {}, "rms_norm": True,
    "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 8, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""As state-spaces/mamba-130m has it, with a model type and token ids; the tokenizer comes beside it."""

CASES: tuple[ArchCase, ...] = (
    *family("bamba", "Bamba", _BAMBA, {
        "tied": TIED | {"mamba_n_groups": 1, "attn_layer_indices": [2]}, "biases": ATTENTION_BIAS | MHA,
        "mlp-bias": {"mlp_bias": True},
    }),
    *family("jamba", "Jamba", _JAMBA, {
        "tied": TIED | {"mamba_d_state": 8, "mamba_dt_rank": 5, "mamba_d_conv": 3}, "late": _LATE | MHA,
        "dense": {"num_experts": 1, "num_experts_per_tok": 1},
    }),
    *family("falcon_h1", "FalconH1", _FALCON, {
        "tied": TIED | MHA | {"lm_head_multiplier": 2.0, "embedding_multiplier": 2.0, "mamba_n_groups": 1},
        "normed": _NORMED | {"mlp_bias": True, "head_dim": 24},
        "plain": {"mamba_d_ssm": None, "mlp_multipliers": None, "mamba_n_heads": 8},
        "norm-first": ({"mamba_rms_norm": True}, "its mixer norms after the gate"),
        "biases": (ATTENTION_BIAS, "its graph skips the attention output bias"),
        "two-multipliers": (TIED, "its head is the embedding with its multiplier"),
    }),
    *family("kimi_linear", "KimiLinear", _KIMI, {
        "wide": _KIMI_WIDE,
        "low-rank": ({"q_lora_rank": 20}, "its loader ignores q_lora_rank and assumes 0"),
    }),
    _k3(),
    _k3("/plain", mla_use_output_gate=False, latent_moe_use_norm=False, moe_renormalize=False, q_lora_rank=None),
    ArchCase("kimi_linear/published", "kimi_linear", "", "KimiLinearForCausalLM", _KIMI_PUBLISHED),
    ArchCase(
        "mamba/original", "mamba", "", "MambaLMHeadModel", _ORIGINAL,
        wrapped=True,  # under other names than the row's
        begins={"backbone.embeddings.": "backbone.embedding."},
    ),
)  # fmt: skip
