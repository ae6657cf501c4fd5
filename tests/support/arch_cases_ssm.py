"""Cases of state-space models and of decoders that mix them, or short convolutions, with attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from arch_models import DIMS, VOCAB, ArchCase

_MAMBA: dict[str, Any] = {"pad_token_id": 0, "intermediate_size": 128, "time_step_rank": 5, "layer_norm_epsilon": 2e-5}
_MAMBA2: dict[str, Any] = {
    "pad_token_id": 0,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 2,
    "chunk_size": 8,
}
_LFM2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_multiple_of": 32,
    "norm_eps": 2e-5,
    "pad_token_id": 0,
}
_LFM2_MOE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_dense_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "pad_token_id": 0,
}
_GRANITE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
_NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
}
_NEMOTRON_MOE: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
_MORE_HEADS: dict[str, Any] = {"linear_num_key_heads": 3, "linear_num_value_heads": 9, "linear_conv_kernel_dim": 3}
_SAME_HEADS: dict[str, Any] = {"linear_num_value_heads": 2, "tie_word_embeddings": True}
_NO_TYPES: dict[str, Any] = {"layer_types": None, "num_key_value_heads": 4}
_MROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    }
}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}


def _case(base: ArchCase, variant: str, config: dict[str, Any], cannot: str = "") -> ArchCase:
    """The base case with some of its config changed."""
    return ArchCase(
        f"{base.id}/{variant}",
        base.row,
        base.config_class,
        base.model_class,
        base.config | config,
        llama_cpp_cannot=cannot,
    )


def _base(id: str, name: str, config: dict[str, Any], config_class: str = "") -> ArchCase:
    return ArchCase(id, id, config_class or f"{name}Config", f"{name}ForCausalLM", config)


_BIASED = "its loader has no bias for the mixer's projections"
_mamba = _base("mamba", "Mamba", _MAMBA)
_mamba2 = _base("mamba2", "Mamba2", _MAMBA2)
_falcon = _base("falcon_mamba", "FalconMamba", _MAMBA)
_lfm2 = _base("lfm2", "Lfm2", _LFM2)
_lfm2_moe = _base("lfm2_moe", "Lfm2Moe", _LFM2_MOE)
_granite = _base("granitemoehybrid", "GraniteMoeHybrid", _GRANITE)
_granite4 = replace(
    _granite,
    id="granite4",
    row="granite4",
    config=_GRANITE | {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"},
)
_nemotron = _base("nemotron_h", "NemotronH", _NEMOTRON)
_nemotron_moe = _base("nemotron_h_moe", "NemotronH", _NEMOTRON | _NEMOTRON_MOE)
_next = _base("qwen3_next", "Qwen3Next", _LINEAR | _EXPERTS)
_qwen35 = _base("qwen3_5_text", "Qwen3_5", _LINEAR, "Qwen3_5TextConfig")
_qwen35_moe = _base("qwen3_5_moe_text", "Qwen3_5Moe", _LINEAR | _EXPERTS, "Qwen3_5MoeTextConfig")

CASES: tuple[ArchCase, ...] = (
    _mamba,
    _case(_mamba, "untied", _UNTIED),
    _case(_mamba, "kernel", {"conv_kernel": 3, "state_size": 12, "time_step_rank": "auto"}),
    _case(_mamba, "biases", {"use_bias": True}, _BIASED),
    _mamba2,
    _case(_mamba2, "tied", _TIED),
    _case(_mamba2, "one-group", {"n_groups": 1, "num_heads": 4, "head_dim": 32}),
    _falcon,
    _case(_falcon, "untied", _UNTIED),
    _lfm2,
    replace(
        _lfm2,
        id="lfm2/bare",
        model_class="Lfm2Model",
        kind="states",
        wrapped=True,
        config={**{key: DIMS[key] for key in DIMS if key != "head_dim"}, "vocab_size": VOCAB, **_lfm2.config},
    ),
    _case(_lfm2, "untied", _UNTIED),
    _case(
        _lfm2,
        "mha",
        {
            "layer_types": ["full_attention", "conv", "conv", "conv"],
            "num_key_value_heads": 4,
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 4,
        },
    ),
    _case(
        _lfm2,
        "all-attention",
        {"layer_types": None},
        "its hybrid memory needs a layer without attention (GGML_ASSERT(buffer))",
    ),
    _case(_lfm2, "conv-bias", {"conv_bias": True}, "its loader has no bias for the short convolutions"),
    _lfm2_moe,
    _granite,
    _case(_granite, "rope", {"position_embedding_type": "rope", "attention_bias": True} | _TIED),
    _case(_granite, "dense", {"num_local_experts": 0}),
    _granite4,
    _case(_granite4, "dense", {"num_local_experts": 0}),
    _case(_granite4, "no-positions", {"num_local_experts": 0, "position_embedding_type": None}),
    _nemotron,
    _case(_nemotron, "biases", {"mlp_bias": True} | _TIED),
    _nemotron_moe,
    _case(_nemotron_moe, "latent", {"moe_latent_size": 24, "n_groups": 1}),
    _next,
    _case(_next, "heads", _MORE_HEADS),
    _case(_next, "same-heads", _SAME_HEADS),
    _case(_next, "biases", {"attention_bias": True}, "its loader has no attention bias"),
    _case(_next, "pattern", _NO_TYPES),
    _qwen35,
    _case(_qwen35, "heads", _MORE_HEADS),
    _case(_qwen35, "same-heads", _SAME_HEADS),
    _case(_qwen35, "pattern", _NO_TYPES),
    _case(_qwen35, "mrope", _MROPE | _TIED),
    _qwen35_moe,
    _case(_qwen35_moe, "heads", _MORE_HEADS),
    _case(_qwen35_moe, "mrope", _MROPE | _TIED),
)
