"""Cases of Gemma 4's towers."""

from __future__ import annotations

from typing import Any

from tower_models import TEXT, VOCAB, TowerCase

_SMALL: dict[str, Any] = {
    **TEXT,
    **{"global_head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}
_TEXT: dict[str, Any] = {**_SMALL, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 24}
_VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "position_embedding_size": 64},
}
_AUDIO: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "output_proj_dims": 40}
_QUICK = {r"use_gelu": "it leaves the activation to llama.cpp's loader, which then takes a rougher one"}
_ROUNDED = {r"per_dim_scale": "logarithms in float32 differ in their last places from library to library"}
_AS_THEY_ARE: dict[str, Any] = {"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]}
_IMAGES = ((120, 120), (96, 144), (144, 120))

CASES = (
    TowerCase(
        "gemma4_vision",
        "Gemma4ForConditionalGeneration",
        {"text_config": _TEXT, "vision_config": {**_VISION, "standardize": True}, "audio_config": None},
        "Gemma4Config",
        preprocessor=_AS_THEY_ARE,
        feed="placed_patches",
        images=_IMAGES,
        differs=_QUICK,
    ),
    TowerCase(
        "gemma4_towers",
        "Gemma4ForConditionalGeneration",
        {"text_config": _TEXT, "vision_config": {**_VISION, "use_clipped_linears": True}, "audio_config": _AUDIO},
        "Gemma4Config",
        preprocessor=_AS_THEY_ARE,
        feed="frames",
        images=((16000,), (24000,), (16000,)),
        differs={**_QUICK, **_ROUNDED},
    ),
    TowerCase(
        "gemma4_towers/unclipped",
        "Gemma4ForConditionalGeneration",
        {"text_config": _TEXT, "vision_config": _VISION, "audio_config": {**_AUDIO, "use_clipped_linears": False}},
        "Gemma4Config",
        preprocessor=_AS_THEY_ARE,
        feed="frames",
        images=((16000,), (24000,), (16000,)),
        differs={**_QUICK, **_ROUNDED},
    ),
    TowerCase(
        "gemma4_unified_towers",
        "Gemma4UnifiedForConditionalGeneration",
        {
            "text_config": _SMALL,
            "vision_config": {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 64, "output_proj_dims": 32},
            "audio_config": {"audio_embed_dim": 48},
        },
        "Gemma4UnifiedConfig",
        preprocessor=_AS_THEY_ARE,
        feed="placed_patches",
        images=_IMAGES,
    ),
)
