"""Cases of towers: one of each kind of network."""

from __future__ import annotations

from tower_models import IMAGES, TEXT, TowerCase

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 14,
    "image_size": 56,
}
_PIXTRAL = {"model_type": "pixtral", **_VISION, "head_dim": 8}
_MROPE = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_QWEN = ((112, 224), (168, 168), (224, 112))
_NO_BREAK = "the converter passes over the language model's tensors, and mtmd does not load what it writes"
_SOUNDS = ((320000,), (200000,))

CASES = (
    TowerCase(
        "gemma3_vision",
        "Gemma3ForConditionalGeneration",
        {"text_config": {**TEXT, "query_pre_attn_scalar": 16}, "vision_config": _VISION, "mm_tokens_per_image": 4},
        "Gemma3Config",
        preprocessor={**IMAGES, "image_seq_length": 4},
        renames=((r"^vision_tower\.", "vision_tower.vision_model."),),
        drops=r"vision_model\.head\.",
        feed="pixels",
    ),
    TowerCase(
        "qwen2_vl_vision",
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": _MROPE,
            "vision_config": {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "patch_size": 14},
        },
        "Qwen2VLConfig",
        feed="merged",
        images=_QWEN,
    ),
    TowerCase(
        "qwen2_5_vl_vision",
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": _MROPE,
            "vision_config": {
                **{"depth": 3, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 4},
                **{"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]},
            },
        },
        "Qwen2_5_VLConfig",
        feed="merged",
        images=_QWEN,
    ),
    TowerCase(
        "pixtral_vision",
        "LlavaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": {**_PIXTRAL, "patch_size": 16, "image_size": 96, "hidden_act": "silu"},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        "LlavaConfig",
        tokens=("[IMG_BREAK]",),
        differs={r"token_embd\.img_break": _NO_BREAK},
        feed="sized",
        images=((64, 64), (96, 48), (48, 96)),
    ),
    TowerCase(
        "mistral3_vision",
        "Mistral3ForConditionalGeneration",
        {"text_config": {**TEXT, "model_type": "mistral"}, "vision_config": {**_PIXTRAL, "image_size": 168}},
        "Mistral3Config",
        tokens=("[IMG_BREAK]",),
        differs={r"token_embd\.img_break": _NO_BREAK},
        feed="sized",
        images=((112, 112), (84, 112), (56, 168)),
    ),
    TowerCase(
        "qwen2_audio_tower",
        "Qwen2AudioForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "audio_config": {
                **{"d_model": 32, "encoder_ffn_dim": 48, "encoder_layers": 3, "encoder_attention_heads": 4},
                "num_mel_bins": 128,
            },
        },
        "Qwen2AudioConfig",
        feed="mel",
        images=_SOUNDS,
    ),
    TowerCase(
        "voxtral_tower",
        "VoxtralForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "audio_config": {
                **{"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4},
                "num_mel_bins": 128,
            },
        },
        "VoxtralConfig",
        feed="mel",
        images=_SOUNDS,
        mtmd_cannot="it averages pairs of frames, which the network does not, and crashes on the remaining half",
    ),
)
