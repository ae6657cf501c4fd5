"""Cases of latent attention with a dense MLP."""

from __future__ import annotations

from typing import Any

from arch_cases_common import LINEAR, UNTIED, family, rope
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

CASES: tuple[ArchCase, ...] = (
    *family("minicpm3", "MiniCPM3", {**_LATENT, "q_lora_rank": 40, "v_head_dim": 16}, {
        "untied": UNTIED, "linear": LINEAR, "longrope": rope(**_FACTORS),
        "longrope_long": rope(**{**_FACTORS, "original_max_position_embeddings": 16}),
        "v_head_dim": {"v_head_dim": 24},
        "no_q_rank": ({"q_lora_rank": None}, "its loader insists on queries of low rank"),
        "scales": ({"scale_emb": 1, "scale_depth": 2.0, "dim_model_base": 64}, _SCALES),
    }),
    *family("youtu", "Youtu", {**_LATENT, "head_dim": 8, "q_lora_rank": 40, "pad_token_id": 2, "v_head_dim": 16}, {
        "untied": UNTIED, "mha_theta": rope(50000.0),
    }),
    # As PLM-Team/PLM-1.8B-Instruct has them.
    *remote("plm", "PLMForCausalLM", {
        **{key: value for key, value in DIMS.items() if key != "head_dim"}, **_LATENT, "v_head_dim": 12,
        "attention_bias": False, "hidden_act": "relu2", "q_lora_rank": None, "rope_scaling": None,
        "rope_theta": 100000.0, "tie_word_embeddings": True, "vocab_size": VOCAB,
    }),
)  # fmt: skip
