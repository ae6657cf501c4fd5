"""Cases of decoders that mix layers with a window and without, most of them of routed experts."""

from __future__ import annotations

from typing import Any

from arch_cases_common import LLAMA3, MHA, TIED, UNTIED, YARN, Config, family, rope
from arch_cases_multimodal import whole
from arch_models import VOCAB, ArchCase

_S, _F = "sliding_attention", "full_attention"


def _kinds(letters: str) -> Config:
    """Layer types by letters: S sliding, F full."""
    return {"num_hidden_layers": len(letters), "layer_types": [_S if letter == "S" else _F for letter in letters]}


def _nested(theta: float = 10000.0, **full: Any) -> Config:
    plain = {"rope_type": "default", "rope_theta": theta}
    return {"rope_parameters": {_F: {"rope_type": "default", "rope_theta": 10000.0, **full}, _S: plain}}


_ROUTED: Config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LLAMA4: Config = {
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
}
_LLAMA4_TEXT: Config = {"vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
_LLAMA4_TEXT |= {"head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2}
_AFMOE: Config = {**_ROUTED, "num_hidden_layers": 4, "sliding_window": 8, "route_scale": 2.5, "mup_enabled": True}
_EXAONE: Config = {**_ROUTED, "num_hidden_layers": 4, "sliding_window": 8}
_COHERE: Config = {
    **TIED,
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "sliding_window": 8,
    "logit_scale": 0.25,
    "rms_norm_eps": None,
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
}
_MELLUM: Config = {**_ROUTED, **_kinds("SFSF"), **_nested(), "sliding_window": 8}


def _laguna_rope(**full: Any) -> Config:
    return {
        "rope_parameters": {
            _F: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5, **full},
            _S: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        }
    }


_LAGUNA: Config = {
    **_ROUTED,
    **_kinds("FSSS"),
    **_laguna_rope(),
    "num_attention_heads_per_layer": [4, 6, 6, 6],
    "sliding_window": 8,
    "shared_expert_intermediate_size": 40,
    "moe_routed_scaling_factor": 2.5,
}
_MUSE: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "max_position_embeddings": 512,
    "output_multiplier": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_MUSE_THETAS: Config = {"layer_rope_theta": [0, 10000.0, 10000.0, 0]}
_MUSE_TOWER: Config = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
_GRANITE: Config = {
    **TIED,
    **_kinds("FSSF"),
    "sliding_window": 8,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
_GRANITE_MOE: Config = {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}

CASES: tuple[ArchCase, ...] = (
    *family("llama4_text", "Llama4", _LLAMA4, {
        "all_sparse": {"interleave_moe_layer_step": 1}, "llama3": LLAMA3, "tied": TIED,
        "scout_rope": rope(500000.0, rope_type="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0,
            original_max_position_embeddings=128),
        "no_qk_norm": ({"use_qk_norm": False}, "it norms Q and K unless there are 128 experts"),
        "chunk": ({"attention_chunk_size": 8}, "its chunks are 8192 positions long"),
        "odd_layers": ({"no_rope_layers": [1, 0, 1, 0]}, "it skips RoPE in every fourth layer"),
        "listed": ({"moe_layers": [2]}, "it finds MoE layers by interleave_moe_layer_step"),
        "cold": ({"attn_temperature_tuning": False}, "it always tunes the temperature"),
        "bias": ({"attention_bias": True}, "its loader has no attention output bias"),
    }, config_class="Llama4TextConfig"),
    whole("llama4_text/whole", "Llama4", {
        "text_config": {**_LLAMA4, **_LLAMA4_TEXT},
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 8, "vision_output_dim": 32, "projector_input_dim": 32,
            "projector_output_dim": 32},
    }),
    *family("afmoe", "Afmoe", _AFMOE, {
        "tied": TIED, "all_sparse": {"num_dense_layers": 0}, "one_shared": {"num_shared_experts": 1},
        "unscaled": ({"mup_enabled": False}, "it scales the embedding by sqrt(hidden_size)"),
        "odd_layers": (_kinds("SFSF"), "it has full attention in exactly every fourth layer"),
        "bias": ({"attention_bias": True}, "its loader has no attention output bias"),
    }),
    *family("exaone_moe", "ExaoneMoe", _EXAONE, {
        "layer_types": _kinds("SFFS"), "llama3": LLAMA3, "tied": TIED, "two_dense": {"first_k_dense_replace": 2},
        "no_norm_topk": {"norm_topk_prob": False}, "groups": {"n_group": 2, "topk_group": 1},
        "late_dense": ({"first_k_dense_replace": 0, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
            "its dense layers come first"),
    }),
    *family("cohere2_moe", "Cohere2Moe", _COHERE, {
        "sigmoid": {"expert_selection_fn": "sigmoid"}, "rms": {"rms_norm_eps": 1e-5}, "untied": UNTIED,
        "sigmoid_unnormed": {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
        "no_norm_topk": {"norm_topk_prob": False},
        "wide_dense": {"prefix_dense_intermediate_size": 80}, "all_sparse": {"first_k_dense_replace": 0},
        "no_shared": {"num_shared_experts": 0},
        "sum": ({"shared_expert_combination_strategy": "sum"}, "it averages the shared expert and the routed ones"),
        "odd_prefix": ({"prefix_dense_sliding_window_pattern": 2}, "it applies RoPE in every layer without experts"),
    }),
    *family("mellum", "Mellum", _MELLUM, {
        "yarn": _nested(rope_type="yarn", factor=4.0, original_max_position_embeddings=128), "tied": TIED,
        "global": {**_kinds("FF"), "sliding_window": None}, "head_dim": {"head_dim": 24},
        "theta": (_nested(20000.0), "it uses one rope_theta for all layers"),
        "dense": ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, "it needs experts in every layer"),
        "no_norm_topk": ({"norm_topk_prob": False}, "it always normalizes expert weights"),
        "bias": ({"attention_bias": True}, "its loader has no attention output bias"),
    }),
    *family("laguna", "Laguna", _LAGUNA, {
        "tied": TIED, "per_element": {"gating": "per-element"}, "one_size": {"num_attention_heads_per_layer": None},
        "layer_types": _kinds("FSSF"), "two_dense": {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
        "global": _kinds("FFFF"),
        "yarn": _laguna_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
        "late_dense": ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "its dense layers come first"),
        "capped": ({"moe_router_logit_softcapping": 4.0}, "it does not cap router scores"),
        "bias": ({"attention_bias": True}, "its loader has no attention output bias"),
    }),
    *(
        whole("muse_glimmer_text" + name, "MuseGlimmer", {"text_config": _MUSE | text, "vision_config": _MUSE_TOWER},
            llama_cpp_cannot=why)
        for name, text, why in (
            ("", {}, ""), ("/layer_types", _kinds("FSSF") | _MUSE_THETAS, ""),
            ("/thetas", {"layer_rope_theta": [10000.0] * 4}, "it applies RoPE in sliding-window layers only"),
            ("/eps", {"post_norm_eps": 1e-6}, "it has one constant for the norms after attention and MLP"),
        )
    ),
    *family("granite_swa", "GraniteSWA", _GRANITE, {
        "untied": UNTIED, "mha": MHA, "bias": {"attention_bias": True, "mlp_bias": True}, "llama3": LLAMA3,
        "yarn": YARN, "nope": {"layer_rope_theta": [10000.0, 0, 10000.0, 0]},
        "thetas": ({"layer_rope_theta": [10000.0, 20000.0, 10000.0, 0]}, "it has one rope_theta"),
    }),
    *family("granitemoe_swa", "GraniteMoeSWA", _GRANITE_MOE, {
        "shared": {"shared_intermediate_size": 40}, "untied": UNTIED,
        "nope": {"layer_rope_theta": [0, 10000.0, 10000.0, 0]},
    }),
)  # fmt: skip
