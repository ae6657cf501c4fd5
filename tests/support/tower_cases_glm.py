"""Cases of towers of GLM's kind, and PaddleOCR's."""

from __future__ import annotations

from arch_cases_remote_sparse import _GLM5_NEXT
from tower_models import IMAGES, TEXT, TowerCase

_SEES = {
    **{"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 14, "image_size": 56},
    "out_hidden_size": 64,
}
_GRID = {"rope_type": "default", "rope_theta": 1e4}
_IMAGES = ((112, 224), (168, 168), (224, 112))

CASES = (
    TowerCase(
        "glm4v_vision",
        "Glm4vForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "rope_parameters": {**_GRID, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
            },
            "vision_config": _SEES,
        },
        "Glm4vConfig",
        feed="merged",
        images=_IMAGES,
    ),
    TowerCase(
        "glm4v_vision/moe",
        "Glm4vMoeForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                **{"rope_parameters": {**_GRID, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
                **{"attention_bias": True, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
                **{"moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
            },
            "vision_config": _SEES,
        },
        "Glm4vMoeConfig",
        feed="merged",
        images=_IMAGES,
    ),
    TowerCase(
        "glm4v_vision/4_6",
        "Glm46VForConditionalGeneration",
        {
            "text_config": {
                **{"model_type": "glm4v_text", **TEXT},
                "rope_parameters": {**_GRID, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
            },
            "vision_config": _SEES,
        },
        "Glm46VConfig",
        converter_cannot="it does not know the class",
        feed="merged",
        images=_IMAGES,
    ),
    TowerCase(
        "glm_ocr_vision",
        "GlmOcrForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "rope_parameters": {**_GRID, "mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0},
            },
            "vision_config": _SEES,
        },
        "GlmOcrConfig",
        feed="merged",
        images=_IMAGES,
    ),
    TowerCase(
        "glm5_next_vision",
        "Glm5NextForConditionalGeneration",
        {
            "model_type": "glm5_next",
            "text_config": {**_GLM5_NEXT, "vocab_size": -1},
            "vision_config": {
                **_SEES,
                **{"model_type": "glm5_next_vision", "hidden_act": "silu", "rms_norm_eps": 1e-5, "swiglu_limit": 8.0},
                **{"projection_intermediate_size": 96, "spatial_merge_size": 2},
            },
        },
        preprocessor={**IMAGES, "patch_size": 14, "merge_size": 2, "min_image_tokens": 4, "max_image_tokens": 64},
    ),
    TowerCase(
        "paddleocr_vision",
        "PaddleOCRVLForConditionalGeneration",
        {
            "text_config": {**TEXT, "rope_parameters": {**_GRID, "rope_theta": 5e5, "mrope_section": [2, 3, 3]}},
            "vision_config": {
                **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
                **{"patch_size": 14, "image_size": 56, "architectures": ["PaddleOCRVisionModel"]},
            },
        },
        "PaddleOCRVLConfig",
        preprocessor={**IMAGES, "min_pixels": 3136, "max_pixels": 50176},
        feed="rows_of_patches",
        images=_IMAGES,
    ),
)
