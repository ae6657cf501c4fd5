"""Cases of towers that other towers do not look like."""

from __future__ import annotations

from tower_cases_moon import WHOLE
from tower_models import IMAGES, TowerCase

_DOTS3 = {
    "vision_config": {
        **{"embed_dim": 32, "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 24},
        **{"num_hidden_layers": 4, "num_attention_heads": 4, "patch_size": 14, "spatial_merge_size": 2},
        **{"rms_norm_eps": 1e-5, "temporal_patch_size": 1, "use_bias": False, "use_qk_norm": True},
        **{"adapter_type": "patch_merger", "pre_pixel_shuffle": True, "router_scoring_func": "sigmoid"},
        **{"router_scale": 1.0, "pyramid_num_routed": [-1, 2, 0, 4], "capacity_factor": 2},
    },
    "audio_config": {
        **{"use_conv2d_stem": True, "use_rope": True, "use_rms_norm": True, "use_causal": False},
        **{"merge_factor": 1, "chunk_seconds": 60, "downsample_hidden_size": 24},
        "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0},
        "whisper_config": {
            **{"d_model": 32, "encoder_ffn_dim": 48, "encoder_layers": 3, "encoder_attention_heads": 4},
            **{"num_mel_bins": 128, "activation_function": "swiglu"},
        },
    },
}
_PIXELS = {"vision_config": {**IMAGES, "min_pixels": 3136, "max_pixels": 11289600}}
_P = "model.vision_tower.vision_tower.vision_model."
_LAYER = {
    **{f"layer_norm{n}.{end}": (32,) for n in (1, 2) for end in ("weight", "bias")},
    **{f"self_attn.{name}_proj.weight": (32, 32) for name in ("q", "k", "v", "out")},
    **{f"self_attn.{name}_proj.bias": (32,) for name in ("q", "k", "v", "out")},
    **{"mlp.fc1.weight": (48, 32), "mlp.fc1.bias": (48,), "mlp.fc2.weight": (32, 48), "mlp.fc2.bias": (32,)},
}

CASES = (
    TowerCase(
        "dots3_note_towers",
        "Dots3NoteForCausalLM",
        {**WHOLE["dots3_note/causal"], "model_type": "dots3_note", **_DOTS3},
        preprocessor=_PIXELS,
    ),
    TowerCase(
        "dots3_note_towers/whole",
        "Dots3NoteForConditionalGeneration",
        {"model_type": "dots3_note", "text_config": WHOLE["dots3_note"], **_DOTS3},
        preprocessor=_PIXELS,
    ),
    TowerCase(
        "phi4_vision",
        "Phi4ForCausalLMV",
        {
            **WHOLE["phi3/phi4_vision"],
            "vision_config": {
                **{"model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 48},
                **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_patches": 64, "layer_norm_eps": 1e-6},
            },
        },
        preprocessor={**IMAGES, "patch_size": 16, "min_num_patches": 256, "max_num_patches": 3600},
        extra={
            **{f"{_P}encoder.layers.3.{name}": shape for name, shape in _LAYER.items()},
            **{f"{_P}post_layernorm.{end}": (32,) for end in ("weight", "bias")},
            f"{_P}head.probe": (1, 1, 32),
        },
        lost=r"layers\.3\.|post_layernorm|\.head\.",
    ),
)
