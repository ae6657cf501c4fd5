"""Cases of Qwen and other dense decoders that rotate halves."""

from __future__ import annotations

from arch_cases_common import (
    ATTENTION_BIAS,
    LINEAR,
    LLAMA3,
    MHA,
    NO_FACTORS,
    NO_MLP_BIAS,
    NO_O_BIAS,
    NO_WINDOW,
    PLAIN_HEADS,
    TIED,
    UNTIED,
    WIDE_HEADS,
    YARN,
    YARN_FACTOR,
    family,
    rope,
)
from arch_models import ArchCase

_ONE_THETA = "its graph uses one rope_theta for sliding and full layers"
_HYBRID = {"sliding_window": 8, "layer_types": None}
_OLMO3 = {"num_hidden_layers": 4, "sliding_window": 8}

QWEN4 = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "hidden_size": 64,
    "shared_expert_intermediate_size": 40,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "hc_count": 2,
    "hc_lowrank": 24,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 512,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "ple_layer_ids": [2],
    "ngram_vocab_size_base": 100,
    "heads_per_ngram": 2,
    "split_ngram_parts": 4,
    **rope(part=0.5, mrope_section=[2, 1, 1]),
}

CASES: tuple[ArchCase, ...] = (
    *family("qwen4_exp_text", "Qwen4Exp", QWEN4, {
        "tied": TIED, "mha": MHA, "streams": {"hc_count": 3},
        "chosen": ({"indexer_budget": 8}, "it selects more positions"),
        "no_table": {"ple_layer_ids": []}, "ngrams": {"ngram_size": 2, "heads_per_ngram": 4, "split_ngram_parts": 1},
        "gate": ({"output_gate_type": None}, "its output gate is a sigmoid"),
    }, config_class="Qwen4ExpTextConfig"),
    *family("qwen2", "Qwen2", TIED, {
        "untied": UNTIED, "mha": MHA, "linear": LINEAR, "yarn": YARN, "yarn_factor": YARN_FACTOR,
        "llama3": (LLAMA3, NO_FACTORS), "head_dim": (WIDE_HEADS, PLAIN_HEADS),
        "window": ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, NO_WINDOW),
    }),
    *family("qwen3", "Qwen3", {**TIED, "head_dim": 32}, {
        "untied": UNTIED, "mha": MHA, "plain_heads": {"head_dim": 16}, "linear": LINEAR, "yarn": YARN,
        "attention_bias": (ATTENTION_BIAS, NO_O_BIAS),
        "window": ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, NO_WINDOW),
    }),
    *family("seed_oss", "SeedOss", {"head_dim": 32}, {
        "tied": TIED, "mha": MHA, "no_bias": {"attention_bias": False}, "linear": LINEAR, "yarn": YARN,
        "out_bias": ({"attention_out_bias": True}, NO_O_BIAS),
        "mlp_bias": ({"mlp_bias": True}, NO_MLP_BIAS),
    }),
    *family("exaone4", "Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, {
        "tied": TIED, "mha": MHA, "linear": LINEAR, "llama3": LLAMA3,
        "hybrid": {**_HYBRID, "num_hidden_layers": 64},
        "hybrid_llama3": {**_HYBRID, "num_hidden_layers": 64, **LLAMA3},
        "hybrid_small": ({**_HYBRID, "num_hidden_layers": 4},
            "its loader enables the sliding window for 64 layers only"),
        "head_dim": (WIDE_HEADS, PLAIN_HEADS),
    }),
    *family("hunyuan_v1_dense", "HunYuanDenseV1", TIED, {
        "untied": UNTIED, "mha": MHA, "head_dim": WIDE_HEADS,
        "alpha": rope(rope_type="dynamic", alpha=1000.0, factor=1.0), "attention_bias": (ATTENTION_BIAS, NO_O_BIAS),
    }),
    *family("ernie4_5", "Ernie4_5", {**TIED, "head_dim": 32}, {
        "untied": UNTIED, "mha": MHA, "plain_heads": {"head_dim": 16}, "linear": LINEAR, "yarn": YARN,
        "biases": ({"use_bias": True}, NO_MLP_BIAS),
    }),
    *family("olmo2", "Olmo2", {}, {
        "tied": TIED, "mha": MHA, "linear": LINEAR, "yarn": YARN,
        "attention_bias": (ATTENTION_BIAS, NO_O_BIAS),
    }),
    *family("olmo3", "Olmo3", _OLMO3, {
        "mha": MHA, "layer_types": {"layer_types": ["full_attention", "sliding_attention"] * 2},
        "yarn": {"rope_parameters": {
            "full_attention": YARN["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        "two_thetas": ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}}}, _ONE_THETA),
        "tied": TIED,
    }),
)  # fmt: skip
