"""Cases of networks that are one of the table under other names, and come back from a GGUF as that one."""

from __future__ import annotations

from dataclasses import replace

from arch_cases_common import ATTENTION_BIAS, LLAMA3, MHA, NO_WINDOW, TIED, WIDE_HEADS, YARN, Config, family
from arch_cases_multimodal import SEES, TEXT, sees, whole
from arch_cases_wrappers import PLAIN, inside
from arch_models import ArchCase

_SCALED: Config = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.125,
    "use_post_norm": False,
}

_SAME: tuple[ArchCase, ...] = (
    *family(
        "cwm",
        "Cwm",
        {**LLAMA3, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 512},
        {"tied": TIED, "head_dim": WIDE_HEADS, "window": ({"sliding_window": 8}, NO_WINDOW)},
    ),
    *family("helium", "Helium", {}, {"tied": TIED, "mha": MHA, "yarn": YARN}),
    *family("hyperclovax", "HyperCLOVAX", _SCALED, {"tied": TIED, "biases": {**ATTENTION_BIAS, "mlp_bias": True}}),
    *family("llama/emu3", "Emu3", {"pad_token_id": 0}, {}, config_class="Emu3TextConfig"),
    *family("apertus/1p5", "Apertus1p5Text", {}, {}, config_class="Apertus1p5TextConfig"),
)
_VQ: Config = {
    "codebook_size": 16, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1],
    "num_res_blocks": 1, "hidden_size": 32,
}  # fmt: skip
CASES: tuple[ArchCase, ...] = (
    *(replace(case, row=case.row.partition("/")[0]) for case in _SAME),
    sees(
        "hyperclovax/vision",
        "HyperCLOVAXVisionV2",
        _SCALED | {"model_type": "hyperclovax"},
        {**SEES, "model_type": "qwen2_5_vl_vision", "fullatt_block_indexes": [0]},
        video_token_id=6,
    ),
    sees(
        "apertus/whole1p5",
        "Apertus1p5",
        {"head_dim": 16},
        _VQ,
        image_token_offset=16,
        audio_token_offset=32,
        audio_config={
            "num_filters": 4,
            "hidden_size": 8,
            "upsampling_ratios": [2, 2],
            "decoder_hidden_size": 32,
            "decoder_intermediate_size": 32,
            "decoder_num_layers": 1,
            "codebook_size": 16,
            "codebook_dim": 8,
        },
    ),
    whole(
        "llama/emu3_whole",
        "Emu3",
        {
            "text_config": TEXT | {"pad_token_id": 0},
            "vq_config": _VQ,
            "vocabulary_map": {"<image>": 5},
            "image_token_id": 5,
        },
    ),
    inside(
        "qwen2/fast_vlm",
        "FastVlmForConditionalGeneration",
        "fast_vlm",
        {"text_config": {**PLAIN, "model_type": "qwen2"}, "vision_config": {"model_type": "timm_wrapper"}},
        "model.vision_tower.timm_model.stem.0.conv.weight",
        "model.multi_modal_projector.linear_1.weight",
        begins={"model.": "model.language_model."},
    ),
    inside(
        "llama/perception_lm",
        "PerceptionLMForConditionalGeneration",
        "perception_lm",
        {"text_config": {**PLAIN, "model_type": "llama"}, "vision_config": {"model_type": "timm_wrapper"}},
        "model.vision_tower.timm_model.blocks.0.attn.qkv.weight",
        "model.multi_modal_projector.linear_1.weight",
        begins={"model.": "model.language_model."},
    ),
)
