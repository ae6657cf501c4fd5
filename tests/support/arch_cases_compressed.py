"""Cases of decoders that attend to a window and to keys of many positions in one."""

from __future__ import annotations

from arch_cases_common import Config, family, renamed
from arch_models import ArchCase

_YARN: Config = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
_WINDOW, _CHOSEN, _ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
# Texts are three windows long, so that all 128 positions of a layer's last kind become a key. So many heads of the
# indexer, because the score of a position is 0 where each is below 0, and such ties are broken at random.
_V4: Config = {
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "q_lora_rank": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "compress_ratios": [0, 4, 128, 4],
    "num_hash_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 24,
    "index_n_heads": 32,
    "index_head_dim": 64,
    "index_topk": 16,
    "sliding_window": 48,
    "compress_rope_theta": 40000.0,
}
_V4_NAMES = (
    (r"^model\.embed_tokens\.", "embed."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.", ""),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
)
"""What transformers makes of its own names when it saves -> the published ones."""

CASES: tuple[ArchCase, ...] = (
    *renamed(_V4_NAMES, *family("deepseek_v4", "DeepseekV4", _V4, {
        "yarn": {"rope_scaling": _YARN},
        "limit": {"swiglu_limit": 0.05},
        "chosen": {"compress_ratios": [4, 0, 4, 0]},
        "all": ({"compress_ratios": [128, 0, 0, 128]}, "llama.cpp's deepseek4 stops where no indexer chooses"),
        "no_table": {"num_hash_layers": 0},
        "scales": {"hc_sinkhorn_iters": 3, "routed_scaling_factor": 2.5},
        "two_streams": ({"hc_mult": 2}, "llama.cpp's deepseek4 computes four streams only"),
        "tied": {"tie_word_embeddings": True},
    })),
)  # fmt: skip
