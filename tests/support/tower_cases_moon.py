"""Cases of towers of MoonViT's kind."""

from __future__ import annotations

from typing import Any

import arch_cases_wrappers
import arch_models
from tower_models import IMAGES, VOCAB, TowerCase

Config = dict[str, Any]


def _at_size(config: Config) -> Config:
    return {
        key: _at_size(value) if isinstance(value, dict) else VOCAB if value == arch_models.VOCAB else value
        for key, value in config.items()
    }


WHOLE = {case.id: _at_size(case.config) for case in arch_cases_wrappers.CASES}
"""config.json of published wrappers at small sizes, by the ids of their cases."""

_MOON = {"patch_size": 14, "merge_kernel_size": [2, 2], "init_pos_emb_height": 64, "init_pos_emb_width": 64}

CASES = (
    TowerCase(
        "kimi_vl_vision",
        "KimiVLForConditionalGeneration",
        {
            **WHOLE["deepseek_v3/kimi_vl"],
            "vision_config": {
                **{"model_type": "moonvit", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
                **{"num_attention_heads": 4, **_MOON},
            },
        },
    ),
    TowerCase(
        "kimi_k25_vision",
        "KimiK25ForConditionalGeneration",
        {
            **WHOLE["deepseek_v3/kimi_k25"],
            "vision_config": {
                **_MOON,
                **{"init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4, "num_attention_heads": 4},
                # Both spellings: the converter sees transformers' defaults for its own ones where they are absent.
                **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
                **{"vt_hidden_size": 32, "vt_intermediate_size": 48, "vt_num_hidden_layers": 3},
                **{"vt_num_attention_heads": 4, "mm_hidden_size": 32, "projector_hidden_act": "gelu"},
                **{"projector_ln_eps": 1e-5, "text_hidden_size": 64, "merge_type": "sd2_tpool"},
            },
        },
        preprocessor={"media_proc_cfg": {**IMAGES, "in_patch_limit": 4096, "patch_size": 14}},
    ),
    TowerCase(
        "dots_ocr_vision",
        "DotsOCRForCausalLM",
        {
            **WHOLE["qwen2/dots_ocr"],
            "vision_config": {
                **{"embed_dim": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3},
                **{"num_attention_heads": 4, "patch_size": 14, "spatial_merge_size": 2, "rms_norm_eps": 1e-5},
                **{"temporal_patch_size": 1, "post_norm": True, "use_bias": False},
            },
        },
        preprocessor={**IMAGES, "min_pixels": 3136, "max_pixels": 11289600},
    ),
)
