"""Cases of decoders with latent attention, attention to chosen positions, or many experts beside a window."""

from __future__ import annotations

from arch_cases_common import TIED, Config, family
from arch_models import ArchCase

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
)  # fmt: skip
