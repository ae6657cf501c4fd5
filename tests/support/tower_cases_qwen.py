"""Cases of towers of Qwen's kind."""

from __future__ import annotations

from typing import Any

from arch_cases_qwen import QWEN4
from arch_cases_remote_hybrid import _LING
from tower_models import IMAGES, TEXT, TowerCase

_SEES = {
    **{"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 16},
    **{"out_hidden_size": 64, "num_position_embeddings": 64},
}
_GRID = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
}
_IMAGES = ((128, 96), (64, 160), (128, 128))


def _qwen3(name: str, stem: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> TowerCase:
    config = {"text_config": {**TEXT, "rope_parameters": _GRID, **text}, "vision_config": {**_SEES, **vision}}
    case_id = f"qwen3_vl_vision/{name}" if name else "qwen3_vl_vision"
    return TowerCase(
        case_id, f"{stem}ForConditionalGeneration", config, f"{stem}Config", feed="merged", images=_IMAGES, **more
    )


_OLDER = "this one is older than the class"
CASES = (
    _qwen3("", "Qwen3VL", {}, {"deepstack_visual_indexes": [1, 2]}),
    _qwen3("moe", "Qwen3VLMoe", _MOE, {"deepstack_visual_indexes": [0, 2]}),
    _qwen3("3_5", "Qwen3_5", _DELTA, {}),
    _qwen3("jev", "Qwen3_5", _DELTA, {}, named="OpenJevModel", converter_cannot=_OLDER),
    _qwen3("4_exp", "Qwen4Exp", {**QWEN4, "eos_token_id": 2}, {}),
    _qwen3("3_5_moe", "Qwen3_5Moe", {**_DELTA, **_MOE}, {}),
    TowerCase(
        "exaone4_5_vision",
        "Exaone4_5_ForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                **{"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 2},
            },
            "vision_config": {
                **{"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_key_value_heads": 2},
                **{"patch_size": 14, "out_hidden_size": 64, "fullatt_block_indexes": [1, 3], "window_size": 112},
            },
        },
        "Exaone4_5_Config",
        preprocessor={**IMAGES, "min_pixels": 3136, "max_pixels": 1003520},
        feed="merged",
        images=((112, 224), (168, 168), (224, 112)),
    ),
    TowerCase(
        "sarashina2_vision",
        "Sarashina2VisionForCausalLM",
        {
            "model_type": "sarashina2_vision",
            "text_config": {**TEXT, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6},
            "vision_config": {
                **{"model_type": "qwen2_vl", "depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 4},
                **{"mlp_ratio": 4, "patch_size": 14},
            },
        },
        extra={"norm.weight": (64,), "norm.bias": (64,)},
    ),
    TowerCase(
        "ling3_vl_vision",
        "BailingMoeV3VLForConditionalGeneration",
        {
            "model_type": "bailing_moe_v3_vl",
            "text_config": _LING | {"mrope_section": [2, 1, 1], "vocab_size": -1},
            "vision_config": {**_SEES, "out_hidden_size": 128, "disable_merger_proj": True, "spatial_merge_size": 2},
        },
    ),
    TowerCase(
        "qwen2_5_omni_towers",
        "Qwen2_5OmniModel",
        {
            "model_type": "qwen2_5_omni",
            "thinker_config": {
                "model_type": "qwen2_5_omni_thinker",
                "text_config": {
                    **TEXT,
                    **{"model_type": "qwen2_5_omni_text", "rms_norm_eps": 1e-6, "rope_theta": 1e6},
                    "rope_scaling": {"type": "default", "mrope_section": [3, 3, 2]},
                },
                "vision_config": {
                    **{"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 14},
                    **{"out_hidden_size": 64, "fullatt_block_indexes": [1]},
                },
                "audio_config": {
                    **{"d_model": 32, "encoder_ffn_dim": 48, "encoder_layers": 3, "encoder_attention_heads": 4},
                    **{"num_mel_bins": 128, "output_dim": 64},
                },
            },
        },
        extra={"thinker.audio_tower.audio_bos_eos_token.weight": (2, 64)},
        rounds=r"a\.position_embd",
    ),
)
