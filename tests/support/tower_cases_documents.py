"""Cases of towers that read documents."""

from __future__ import annotations

import arch_cases_compressed
from arch_cases_multimodal import CASES as MULTIMODAL
from tower_cases_moon import WHOLE, at_size
from tower_models import IMAGES, TEXT, TowerCase

_PIXELS = {**IMAGES, "min_pixels": 3136, "max_pixels": 1048576}
_SAM = {**{"width": 32, "heads": 4, "layers": 3, "downsample_channels": [40, 48], "global_attn_indexes": [2, 5, 8, 11]}}
_EXTRA = {
    "model.sam_model.pos_embed": (1, 4, 4, 32),
    "model.sam_model.net_2.weight": (40, 256, 3, 3),
    **{f"model.sam_model.blocks.{n}.attn.rel_pos_{axis}": (7 if n == 2 else 5, 8) for n in range(3) for axis in "hw"},
}
_OCR_VISION = {
    "model_type": "vision",
    "model_name": "deeplip_b_l",
    "image_size": 1024,
    "mlp_ratio": 3.7362,
    "width": {
        "sam_vit_b": _SAM,
        "clip-l-14-224": {"width": 48, "heads": 4, "layers": 4, "image_size": 56, "patch_size": 14},
    },
}


def _ocr(id: str, model_class: str, text: str) -> TowerCase:
    return TowerCase(
        id,
        model_class,
        {**WHOLE[text], "vision_config": _OCR_VISION, "projector_config": {"n_embed": 64, "input_dim": 96}},
        preprocessor={},
        processor={**IMAGES, "patch_size": 16, "downsample_ratio": 4},
        extra={**_EXTRA, "model.sam_model.net_3.weight": (48, 40, 3, 3), "model.projector.layers.weight": (64, 96)},
    )


_V4 = next(case for case in arch_cases_compressed.CASES if "dspark_block_size" in case.config)
_HUNYUAN = next(case for case in MULTIMODAL if case.id == "hunyuan_vl")

CASES = (
    _ocr("deepseek_ocr_vision", "DeepseekOCRForCausalLM", "deepseek_ocr"),
    _ocr("unlimited_ocr_vision", "UnlimitedOCRForCausalLM", "deepseek_ocr/unlimited"),
    TowerCase(
        "deepseek_ocr2_vision",
        "DeepseekOCR2ForCausalLM",
        {
            **WHOLE["deepseek_ocr"],
            "vision_config": {
                **{"model_type": "vision", "model_name": "deepencoderv2", "image_size": 1024, "mlp_ratio": 3.7362},
                # What the published config leaves to the class.
                **{"layers": 4, "patch_size": 16, "intermediate_size": 64, "num_attention_heads": 4},
                "width": {"sam_vit_b": _SAM, "qwen2-0-5b": {"dim": 48}},
            },
            "projector_config": {"n_embed": 64, "input_dim": 48},
        },
        preprocessor={},
        processor={**IMAGES, "patch_size": 16, "downsample_ratio": 4},
        extra={**_EXTRA, "model.sam_model.net_3.weight": (48, 40, 3, 3), "model.projector.layers.weight": (64, 48)},
    ),
    TowerCase(
        "hunyuan_vl_vision",
        "HunYuanVLForConditionalGeneration",
        {
            "text_config": {**TEXT, **at_size(_HUNYUAN.config["text_config"])},
            "vision_config": {
                **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
                **{"patch_size": 16, "max_image_size": 64, "spatial_merge_size": 2, "text_hidden_size": 64},
            },
        },
        "HunYuanVLConfig",
        preprocessor=_PIXELS,
        lost=r"position_embedding",
        feed="rows_of_flat_patches",
        images=((512, 512), (256, 1024), (1024, 256)),
    ),
    TowerCase(
        "deepseek_v4_vision",
        "DeepseekV4ForCausalLM",
        {
            **{key: value for key, value in at_size(_V4.config).items() if "dspark" not in key},
            "num_hash_layers": 0,
            **{"vision_n_layers": 3, "vision_dim": 32, "vision_n_heads": 4, "vision_inter_dim": 48},
            **{"vision_patch_size": 14, "vision_downsample_ratio": 3, "vision_min_pixels": 3136},
            **{"vision_max_n_token": 384, "vision_max_wh_ratio": 8, "vision_rope_theta": 10000.0},
        },
        preprocessor={},
        extra={"aligner.w1.weight": (80, 32 * 9), "aligner.w1.bias": (80,), "aligner.w2.weight": (64, 80)},
    ),
    TowerCase(
        "minimax_m3_vision",
        "MiniMaxM3SparseForConditionalGeneration",
        {
            "model_type": "minimax_m3_vl",
            "text_config": at_size(WHOLE["minimax_m3"]),
            "projector_hidden_size": 96,
            "vision_config": {
                **{"hidden_size": 160, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2},
                **{"patch_size": 14, "image_size": 56, "layer_norm_eps": 1e-5},
                "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
            },
        },
    ),
)
