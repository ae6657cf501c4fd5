"""Cases of towers of Qwen's kind."""

from __future__ import annotations

from typing import Any

from tower_models import TEXT, TowerCase

_SEES = {
    **{"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 16},
    **{"out_hidden_size": 64, "num_position_embeddings": 64},
}
_GRID = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
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


CASES = (
    _qwen3("", "Qwen3VL", {}, {"deepstack_visual_indexes": [1, 2]}),
    _qwen3("moe", "Qwen3VLMoe", _MOE, {"deepstack_visual_indexes": [0, 2]}),
    _qwen3("3_5", "Qwen3_5", _DELTA, {}),
    _qwen3("3_5_moe", "Qwen3_5Moe", {**_DELTA, **_MOE}, {}),
)
