"""Cases of decoders that attend to a window and to keys of many positions in one."""

from __future__ import annotations

from arch_cases_common import Config, family, renamed
from arch_cases_remote import remote
from arch_models import DIMS, VOCAB, ArchCase

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
    "moe_intermediate_size": 96,
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

# As deepseek-ai/DeepSeek-V4-Flash-DSpark has them: a draft beside its model, whose layers the config counts.
_DSPARK: Config = {
    "model_type": "deepseek_v4",
    **{key: value for key, value in DIMS.items() if key not in ("intermediate_size", "pad_token_id")},
    **_V4,
    "vocab_size": VOCAB,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
    "num_nextn_predict_layers": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {**{key: value for key, value in _YARN.items() if key != "rope_type"}, "type": "yarn"},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dspark_block_size": 5,
    "dspark_markov_rank": 16,
    "dspark_noise_token_id": 7,
    "dspark_target_layer_ids": [1, 2, 3],
}
_TARGET: Config = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", **_V4}

CASES: tuple[ArchCase, ...] = (
    *renamed(_V4_NAMES, *family("deepseek_v4", "DeepseekV4", _V4, {
        "yarn": {"rope_scaling": _YARN},
        "limit": {"swiglu_limit": 0.05},
        "chosen": {"compress_ratios": [4, 0, 4, 0]},
        "all": ({"compress_ratios": [128, 0, 0, 128]}, "llama.cpp's deepseek4 needs a layer with an indexer"),
        "no_table": {"num_hash_layers": 0},
        "scales": {"hc_sinkhorn_iters": 3, "routed_scaling_factor": 2.5},
        "two_streams": ({"hc_mult": 2}, "llama.cpp's deepseek4 supports hc_mult 4 only"),
        "tied": {"tie_word_embeddings": True},
    })),
    *remote(
        "deepseek_v4_dspark", "DeepseekV4DSparkModel", _DSPARK, kind="draft", target=_TARGET,
        optional={"mtp.2.confidence_head.proj.weight": (1, 80)},
    ),
)  # fmt: skip
