"""Tiny multimodal models, of which the language model is taken. The row of a case is that of the language model."""

from __future__ import annotations

from typing import Any

from arch_models import ArchCase

VOCAB = 320
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 2e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DELTA: dict[str, Any] = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
_SEES: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "patch_size": 4,
}
_GRID = {"num_position_embeddings": 16}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def _case(name: str, row: str, text: dict[str, Any], vision: dict[str, Any], **whole: Any) -> ArchCase:
    whole = {"image_token_id": 300, "pad_token_id": 0} | whole
    return ArchCase(
        name.lower(),
        row,
        f"{name}Config",
        f"{name}ForConditionalGeneration",
        {"text_config": _TEXT | text, "vision_config": vision, **whole},
        tokenizer="bytes",
    )


_SIGLIP = {"model_type": "siglip_vision_model", **_TOWER}
_CLIP = {"model_type": "clip_vision_model", **_TOWER}
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
_TIED = {"tie_word_embeddings": True}

CASES: tuple[ArchCase, ...] = (
    _case("Qwen3_5", "qwen3_5_text", DELTA, _SEES | _GRID),
    _case("Qwen3_5Moe", "qwen3_5_moe_text", DELTA | _EXPERTS, _SEES | _GRID),
    _case(
        "Qwen2VL",
        "qwen2_vl",
        {"rope_parameters": _MROPE},
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4},
    ),
    _case("Qwen2_5_VL", "qwen2_vl", {"rope_parameters": _MROPE}, {**_SEES, "fullatt_block_indexes": [0]}, **_TIED),
    _case(
        "Qwen3VL",
        "qwen3_vl",
        {"head_dim": 16, "rope_parameters": _MROPE},
        {**_SEES, **_GRID, "deepstack_visual_indexes": [0]},
    ),
    _case(
        "Gemma3",
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
        _SIGLIP,
        mm_tokens_per_image=4,
    ),
    _case(
        "Mistral3",
        "mistral",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        {"model_type": "pixtral", **_TOWER},
    ),
    _case("Llava", "llama", {"model_type": "llama"}, _CLIP),
    _case("LlavaNext", "llama", {"model_type": "llama"}, _CLIP),
    _case("LlavaOnevision", "qwen2", {"model_type": "qwen2"}, _SIGLIP),
    _case(
        "InternVL",
        "qwen2",
        {"model_type": "qwen2"},
        {"model_type": "internvl_vision", **_TOWER, "image_size": [16, 16], "patch_size": [8, 8]},
    ),
    _case("Idefics3", "llama", {"model_type": "llama"}, _TOWER),
    _case("SmolVLM", "llama", {"model_type": "llama"}, _TOWER),
    _case(
        "Lfm2Vl",
        "lfm2",
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
        {"model_type": "siglip2_vision_model", **_TOWER},
    ),
)
