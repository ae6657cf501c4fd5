"""Cases of Gemma 3n and Gemma 4."""

from __future__ import annotations

from typing import Any

from arch_cases_common import MHA, TIED, UNTIED, Config, family
from arch_cases_multimodal import whole
from arch_models import DIMS, VOCAB, ArchCase

_S, _F = "sliding_attention", "full_attention"


def _kinds(letters: str) -> Config:
    """Layer types by letters: S sliding, F full."""
    return {"num_hidden_layers": len(letters), "layer_types": [_S if letter == "S" else _F for letter in letters]}


def _rope(**full: Any) -> Config:
    rope = {"rope_type": "proportional", "rope_theta": 1e6, **full}
    return {"rope_parameters": {_F: rope, _S: {"rope_type": "default", "rope_theta": 20000.0}}}


_GEMMA4: Config = {
    **TIED,
    **_kinds("SF"),
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
_DENSE: Config = {"enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None}
_PER_LAYER: Config = {"hidden_size_per_layer_input": 24}
_SHARING: Config = {**_DENSE, **_PER_LAYER, **_kinds("SFSF"), "num_kv_shared_layers": 2}
_UNIFIED: Config = {key: value for key, value in _GEMMA4.items() if key != "hidden_size_per_layer_input"}
_TEXT: Config = {
    **{key: value for key, value in DIMS.items() if key not in ("head_dim", "num_hidden_layers")},
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "pad_token_id": 0,
}
_TEXT_OF_ONE: Config = {key: value for key, value in _TEXT.items() if "per_layer" not in key}
_GEMMA4_TOWER: Config = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_EXPERTS: Config = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}

_GEMMA3N: Config = {**TIED, **_kinds("SSF"), "sliding_window": 8, "num_kv_shared_layers": 0}
# llama.cpp's deviation is that of a sample: in a wide MLP it is the same.
_GEMMA3N |= {"intermediate_size": 4096, "activation_sparsity_pattern": [0.95] * 3}
_FEW = "it supports two model sizes only"

CASES: tuple[ArchCase, ...] = (
    *family("gemma3n_text", "Gemma3n", _GEMMA3N, {
        "mha": MHA, "untied": UNTIED, "padded": {"vocab_size": 49216},
        "layer_types": {**_kinds("FSSF"), "activation_sparsity_pattern": [0.95] * 4},
        "deep": {**_kinds("SF" * 6), "activation_sparsity_pattern": None},
        "theta": {"rope_parameters": {_F: {"rope_type": "default", "rope_theta": 5e5},
            _S: {"rope_type": "default", "rope_theta": 20000.0}}},
        "dense": ({"activation_sparsity_pattern": [0.0] * 3}, _FEW), "narrow": ({"laurel_rank": 32}, _FEW),
        "per_layer": ({"hidden_size_per_layer_input": 32}, _FEW), "capped": ({"final_logit_softcapping": 4.0}, _FEW),
        "unscaled": ({"altup_correct_scale": False}, _FEW),
        "sharing": ({**_kinds("SFSF"), "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95] * 4}, _FEW),
    }, config_class="Gemma3nTextConfig"),
    *family("gemma4_text", "Gemma4", _GEMMA4 | _EXPERTS, {
        "dense": _DENSE,
        "k_eq_v": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        "per_layer": _PER_LAYER,
        "sharing": {**_SHARING, "use_double_wide_mlp": True}, "sharing_narrow": _SHARING,
        "capped": {**_DENSE, "final_logit_softcapping": 4.0},
        "rope": _DENSE | _rope(partial_rotary_factor=0.5), "whole_rope": _DENSE | _rope(),
        "untied": _DENSE | UNTIED,
        "both_ways": ({**_DENSE, "use_bidirectional_attention": "all"}, "its attention is causal"),
        "bias": ({**_DENSE, "attention_bias": True}, "its loader has no attention biases"),
        "sharing_odd": ({**_SHARING, **_kinds("SFSSF")},
            "it shares the keys and values of the last two layers that have them"),
    }, config_class="Gemma4TextConfig"),
    ArchCase("gemma4_text/unified", "gemma4_text", "Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM",
        _UNIFIED),
    whole("gemma4_text/whole", "Gemma4", {"text_config": _TEXT | _GEMMA4 | _DENSE | _PER_LAYER,
        "vision_config": _GEMMA4_TOWER, "audio_config": None}),
    whole("gemma4_text/unified_whole", "Gemma4Unified", {"text_config": _TEXT_OF_ONE | _UNIFIED}),
    # transformers builds its tower with a library of images.
    ArchCase("gemma3n_text/whole", "gemma3n_text", "", "Gemma3nForConditionalGeneration",
        {"model_type": "gemma3n", "text_config": {**_TEXT, **_GEMMA3N, "head_dim": 16, "model_type": "gemma3n_text"}},
        wrapped=True, begins={"model.": "model.language_model."},
        beside={"model.vision_tower.timm_model.conv_stem.conv.weight": (32, 3, 3, 3),
                "model.embed_vision.embedding_projection.weight": (64, 32)}),
)  # fmt: skip
