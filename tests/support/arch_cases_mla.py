"""Cases of latent attention with a dense MLP."""

from __future__ import annotations

from typing import Any

from arch_cases_common import LINEAR, TIED, UNTIED, Config, family, rope
from arch_cases_multimodal import whole
from arch_cases_remote import remote
from arch_models import DIMS, VOCAB, ArchCase

_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
_FACTORS: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.25, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0],
    "original_max_position_embeddings": 512,
}

_SCALES = "its graph has the scales of MiniCPM3-4B"

_MISTRAL4: Config = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1, "num_hidden_layers": 3, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 10,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
    },
}  # fmt: skip
_NO_TEMPERATURE: Config = {"rope_parameters": {**_MISTRAL4["rope_parameters"], "llama_4_scaling_beta": 0.0}}

CASES: tuple[ArchCase, ...] = (
    *family("minicpm3", "MiniCPM3", {**_LATENT, "q_lora_rank": 40, "v_head_dim": 16}, {
        "untied": UNTIED, "linear": LINEAR, "longrope": rope(**_FACTORS),
        "longrope_long": rope(**{**_FACTORS, "original_max_position_embeddings": 16}),
        "v_head_dim": {"v_head_dim": 24},
        "no_q_rank": ({"q_lora_rank": None}, "its loader needs low-rank queries"),
        "scales": ({"scale_emb": 1, "scale_depth": 2.0, "dim_model_base": 64}, _SCALES),
    }),
    *family("youtu", "Youtu", {**_LATENT, "head_dim": 8, "q_lora_rank": 40, "pad_token_id": 2, "v_head_dim": 16}, {
        "untied": UNTIED, "mha_theta": rope(50000.0),
    }),
    *family("mistral4", "Mistral4", _MISTRAL4, {
        "groups": {"n_group": 4, "topk_group": 2}, "no_norm_topk": {"norm_topk_prob": False}, "tied": TIED,
        "scaled": {"routed_scaling_factor": 2.5, "n_shared_experts": 2}, "no_temperature": _NO_TEMPERATURE,
        "all_sparse": {"first_k_dense_replace": 0},
    }),
    whole("mistral4/whole", "Mistral3", {
        "text_config": {**_MISTRAL4, **{key: value for key, value in DIMS.items() if key not in _MISTRAL4},
                        "model_type": "mistral4", "vocab_size": VOCAB},
        "vision_config": {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
                          "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "head_dim": 16},
        "image_token_index": 5,
    }),
    # As PLM-Team/PLM-1.8B-Instruct has them.
    *remote("plm", "PLMForCausalLM", {
        **{key: value for key, value in DIMS.items() if key != "head_dim"}, **_LATENT, "v_head_dim": 12,
        "attention_bias": False, "hidden_act": "relu2", "q_lora_rank": None, "rope_scaling": None,
        "rope_theta": 100000.0, "tie_word_embeddings": True, "vocab_size": VOCAB,
    }),
)  # fmt: skip
