"""Cases of towers of MoonViT's kind."""

from __future__ import annotations

from typing import Any

import arch_cases_remote_sparse
import arch_cases_sparse
import arch_cases_wrappers
import arch_models
from tower_models import IMAGES, TEXT, VOCAB, TowerCase

Config = dict[str, Any]


def at_size(config: Config) -> Config:
    """A config of the cases of language models with the size of the vocabulary as cases of towers write it."""
    return {
        key: at_size(value) if isinstance(value, dict) else VOCAB if value == arch_models.VOCAB else value
        for key, value in config.items()
    }


WHOLE = {case.id: at_size(case.config) for case in (*arch_cases_wrappers.CASES, *arch_cases_remote_sparse.CASES)}
"""config.json of published wrappers at small sizes, by the ids of their cases."""

_GLM = next(case for case in arch_cases_sparse.CASES if case.id == "glm_moe_dsa")
_MOON = {"patch_size": 14, "merge_kernel_size": [2, 2], "init_pos_emb_height": 64, "init_pos_emb_width": 64}

_MOON_3D = {
    **_MOON,
    **{"init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4, "num_attention_heads": 4},
    # Both spellings: the converter sees transformers' defaults for its own ones where they are absent.
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"vt_hidden_size": 32, "vt_intermediate_size": 48, "vt_num_hidden_layers": 3},
    **{"vt_num_attention_heads": 4, "mm_hidden_size": 32, "projector_hidden_act": "gelu"},
    **{"projector_ln_eps": 1e-5, "text_hidden_size": 64, "merge_type": "sd2_tpool"},
}
_K25 = {"media_proc_cfg": {**IMAGES, "in_patch_limit": 4096, "patch_size": 14}}

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
        {**WHOLE["deepseek_v3/kimi_k25"], "vision_config": _MOON_3D},
        preprocessor=_K25,
    ),
    TowerCase(
        "glm5v_vision",
        "Glm5vForConditionalGeneration",
        {
            "model_type": "glm5v",
            "text_config": {**TEXT, **at_size(_GLM.config), "model_type": "glm_moe_dsa"},
            "vision_config": _MOON_3D,
        },
        preprocessor=_K25,
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
