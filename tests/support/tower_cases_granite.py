"""Cases of Granite's towers that see."""

from __future__ import annotations

from typing import Any

from tower_models import IMAGES, TEXT, TowerCase

_TEXT = {key: value for key, value in TEXT.items() if key != "head_dim"} | {
    **{"num_hidden_layers": 6, "architectures": ["GraniteForCausalLM"], "embedding_multiplier": 2.0},
    **{"residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.25},
}
_SEES: dict[str, Any] = {
    **{"model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7},
    **{"num_attention_heads": 4, "image_size": 32, "patch_size": 4, "vision_use_head": False},
}
_ASKS = {"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 80, "layer_norm_eps": 1e-12}


def _granite(name: str, maps: dict[str, Any], **more: Any) -> TowerCase:
    config = {
        **{
            "text_config": _TEXT,
            "vision_config": _SEES | more.pop("vision", {}),
            "qformer_config": _ASKS,
            "downsample_rate": "2/4",
        },
        **{
            "image_grid_pinpoints": [[32, 32], [64, 32]],
            "image_token_index": 5,
            "vision_feature_select_strategy": "full",
        },
        **maps,
    }
    return TowerCase(
        f"granite4_vision{name}",
        "Granite4VisionForConditionalGeneration",
        config,
        "Granite4VisionConfig",
        preprocessor={**IMAGES, "image_grid_pinpoints": [[32, 32], [64, 32]]},
        renames=((r"model\.vision_tower\.", "model.vision_tower.vision_model."),),
        feed="tiles",
        images=((32, 32),) * 3,
        **more,
    )


CASES = (
    _granite(
        "",
        {
            **{"deepstack_layer_map": [[-4, 3], [-2, 0]], "spatial_target_layers": [1, 2, 4, 5]},
            "spatial_vision_layer": -3,
        },
    ),
    _granite(
        "/counted",
        {
            **{"deepstack_layer_map": [[2, -1], [6, -6]], "spatial_target_layers": [4, 1, 3, 2]},
            "spatial_vision_layer": 5,
        },
        vision={"vision_use_head": True},
        differs={
            "feature_layer": "a layer that config.json counts from the beginning is the one before it in transformers"
        },
    ),
)
