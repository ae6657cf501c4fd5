"""Cases of networks that mlx_lm alone runs, with the keys of config.json that it reads."""

from __future__ import annotations

from typing import Any

from arch_models import VOCAB, ArchCase

CANNOT = "it has no such network"
_LLAMA: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "vocab_size": VOCAB,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip
_LILLE: dict[str, Any] = {
    "block_size": 512, "layer_norm_eps": 1e-5, "n_embd": 96, "n_head": 3, "n_kv_heads": 1, "n_layer": 2,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "vocab_size": VOCAB,
}  # fmt: skip
_PHI3: dict[str, Any] = {
    "hidden_size": 64, "ff_intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "layer_norm_epsilon": 1e-5, "hidden_act": "gegelu",
    "gegelu_limit": 20.0, "dense_attention_every_n_layers": 2, "blocksparse_block_size": 64,
    "blocksparse_num_local_blocks": 16, "blocksparse_vert_stride": 8, "mup_attn_multiplier": 1.0,
    "mup_embedding_multiplier": 10.0, "mup_use_scaling": True, "mup_width_multiplier": 8.0,
    "rope_embedding_base": 1000000, "rope_position_scale": 1.0, "tie_word_embeddings": True, "vocab_size": VOCAB,
}  # fmt: skip
_BAILING: dict[str, Any] = _LLAMA | _EXPERTS | {
    "num_hidden_layers": 4, "first_k_dense_replace": 1, "layer_group_size": 2, "group_norm_size": 2, "n_group": 1,
    "topk_group": 1, "norm_head": False, "num_shared_experts": 1, "routed_scaling_factor": 2.5,
    "score_function": "sigmoid", "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True,
    "moe_router_enable_expert_bias": True,
}  # fmt: skip
_BIASES = {f"model.layers.{layer}.mlp.gate.expert_bias": (4,) for layer in (1, 2, 3)}


def _case(row: str, name: str, config: dict[str, Any], **more: Any) -> ArchCase:
    return ArchCase(row, row, "", name, {"model_type": row, **config}, llama_cpp_cannot=CANNOT, **more)


CASES: tuple[ArchCase, ...] = (
    _case("klear", "KlearMoeForCausalLM", _LLAMA | _EXPERTS | {
        "model_type": "Klear", "num_hidden_layers": 3, "attention_bias": False, "mlp_only_layers": [0],
        "decoder_sparse_step": 1, "n_shared_experts": 1,
    }),
    _case("lille", "LilleForCausalLM", _LILLE | {"model_type": "lille-130m"}),
    _case("phi3small", "Phi3SmallForCausalLM", _PHI3),
    _case("bailing_moe_linear", "BailingMoeLinearV2ForCausalLM", _BAILING, optional=_BIASES),
    _case("bailing_moe_v2_5", "BailingMoeV2_5ForCausalLM", _BAILING | {
        "model_type": "bailing_hybrid", "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "moe_shared_expert_intermediate_size": 32,
        "num_nextn_predict_layers": 0, "rope_interleave": True, "num_key_value_heads": 4,
    }, optional=_BIASES),
    _case("phixtral", "PhiForCausalLM", {
        "model_type": "phi-msft", "num_vocab": VOCAB, "vocab_size": VOCAB, "model_dim": 64, "num_heads": 4,
        "num_layers": 2, "n_positions": 512, "rotary_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
    }),
    _case("gear", "GearForCausalLM", _LLAMA | {
        "num_hidden_layers": 3, "layer_types": ["conv_mixer", "sliding_attention", "full_attention"],
        "conv_L_cache": 3, "sliding_window": 8, "attention_bias": False,
    }),
)  # fmt: skip
