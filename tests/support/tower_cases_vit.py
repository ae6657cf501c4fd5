"""Cases of towers that are plain vision transformers."""

from __future__ import annotations

from tower_models import IMAGES, TEXT, VOCAB, TowerCase

_VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_LLAMA = {**TEXT, "model_type": "llama"}
_SMOL = {
    "text_config": _LLAMA,
    "vision_config": {**_VIT, "patch_size": 14, "image_size": 56},
    "scale_factor": 2,
    "vocab_size": VOCAB,
}
_MINICPM = {
    "text_config": {
        **TEXT,
        **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    },
    "vision_config": {**_VIT, "patch_size": 14, "image_size": 980},
    "insert_layer_id": 1,
}

CASES = (
    TowerCase(
        "idefics3_vision",
        "Idefics3ForConditionalGeneration",
        _SMOL,
        "Idefics3Config",
        preprocessor={**IMAGES, "size": {"longest_edge": 112}},
    ),
    TowerCase(
        "idefics3_vision/smolvlm", "SmolVLMForConditionalGeneration", _SMOL, "SmolVLMConfig", feed="overview_and_tile"
    ),
    TowerCase(
        "intern_vision",
        "InternVLChatModel",
        {
            "model_type": "internvl_chat",
            "downsample_ratio": 0.5,
            "min_dynamic_patch": 1,
            "max_dynamic_patch": 12,
            "llm_config": {**TEXT, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6},
            "vision_config": {
                **_VIT,
                "num_hidden_layers": 4,
                **{"architectures": ["InternVisionModel"], "model_type": "intern_vit_6b", "patch_size": 14},
                **{"image_size": 56, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "qk_normalization": False},
            },
        },
    ),
    TowerCase(
        "intern_vision/qianfan",
        "QianfanOCRForConditionalGeneration",
        {
            "model_type": "qianfan_ocr",
            "downsample_ratio": 0.5,
            "text_config": {**TEXT, "model_type": "qwen3", "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
            "vision_config": {
                **_VIT,
                **{"architectures": ["InternVisionModel"], "image_size": [56, 56], "patch_size": [14, 14]},
                **{"num_hidden_layers": 4, "hidden_act": "gelu", "layer_norm_eps": 1e-6},
            },
        },
    ),
    TowerCase(
        "internvl_vision",
        "InternVLForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {
                **_VIT,
                **{"architectures": ["InternVisionModel"], "image_size": [56, 56], "patch_size": [14, 14]},
                **{"attention_bias": True, "num_hidden_layers": 4},
            },
        },
        "InternVLConfig",
        renames=((r"^(?=vision_tower\.|multi_modal_projector\.)", "model."),),
        feed="pixels",
        mtmd_cannot="it puts the class token behind the patches, but adds the first position to the first patch; with "
        "positions moved by one in transformers, three images agree",
    ),
    TowerCase(
        "janus_vision",
        "JanusForConditionalGeneration",
        {
            "text_config": _LLAMA,
            "vision_config": {
                **{"hidden_size": 32, "mlp_ratio": 2.0, "num_hidden_layers": 3, "num_attention_heads": 4},
                **{"patch_size": 14, "image_size": 56, "projection_dim": 64},
            },
            "vq_config": {
                **{"embed_dim": 4, "num_embeddings": 16, "base_channels": 32, "channel_multiplier": [1, 1]},
                **{"num_res_blocks": 1, "latent_channels": 32, "projection_dim": 64, "image_token_embed_dim": 64},
            },
        },
        "JanusConfig",
        drops=r"^model\.(generation_|vqmodel\.)",
    ),
    TowerCase(
        "deepseek_vl_vision",
        "DeepseekVLForConditionalGeneration",
        {
            "text_config": _LLAMA,
            "vision_config": {"model_type": "siglip_vision_model", **_VIT, "patch_size": 14, "image_size": 56},
        },
        "DeepseekVLConfig",
        drops=r"vision_model\.head\.",
        converter_cannot="it does not know the class",
        feed="pixels",
    ),
    TowerCase(
        "llama4_vision",
        "Llama4ForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                **{"intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1},
                **{"interleave_moe_layer_step": 2, "num_hidden_layers": 4},
            },
            "vision_config": {
                **{"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4},
                **{"patch_size": 14, "image_size": 56, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 40},
                **{"projector_output_dim": 40, "vision_output_dim": 40},
            },
        },
        "Llama4Config",
        renames=((r"^model\.", ""),),
        differs={
            r"\.(ln2|attn_post_norm)\.": "its names for Gemma 4 took the second norm, which llama.cpp reads as ln2"
        },
        feed="columns",
    ),
    TowerCase(
        "lfm2_vl_vision",
        "Lfm2VlForConditionalGeneration",
        {
            "text_config": {
                **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
                **{"num_key_value_heads": 2, "vocab_size": VOCAB, "full_attn_idxs": [1], "conv_L_cache": 3},
                **{"block_ff_dim": 96, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]},
            },
            "vision_config": {**_VIT, "patch_size": 16, "num_patches": 64},
            "downsample_factor": 2,
            "projector_hidden_size": 80,
        },
        "Lfm2VlConfig",
        renames=((r"^model\.vision_tower\.(?!vision_model)", "model.vision_tower.vision_model."),),
        drops=r"vision_model\.head\.",
    ),
    TowerCase(
        "youtu_vl_vision",
        "YoutuVLForConditionalGeneration",
        {
            **TEXT,
            **{"model_type": "youtu_vl", "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
            **{"qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-6},
            "vision_config": {
                **_VIT,
                **{"patch_size": 14, "model_type": "siglip2_vision_model", "spatial_merge_size": 2},
                **{"window_size": 112, "fullatt_block_indexes": [1, 2], "layer_norm_eps": 1e-6},
                "hidden_act": "gelu_pytorch_tanh",
            },
        },
    ),
    TowerCase(
        "cogvlm_vision",
        "CogVLMForCausalLM",
        {
            **TEXT,
            **{"model_type": "cogvlm", "rms_norm_eps": 1e-5, "num_key_value_heads": 4},
            "vision_config": {
                **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_heads": 4},
                **{"patch_size": 14, "image_size": 56, "layer_norm_eps": 1e-6, "num_positions": 17},
            },
        },
    ),
    TowerCase(
        "lighton_ocr_vision",
        "LightOnOCRForConditionalGeneration",
        {
            "model_type": "mistral3",
            "spatial_merge_size": 2,
            "text_config": {**TEXT, "model_type": "qwen3", "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
            "vision_config": {
                **_VIT,
                **{"model_type": "pixtral", "patch_size": 14, "image_size": 56, "head_dim": 8, "hidden_act": "silu"},
            },
        },
    ),
    TowerCase(
        "lighton_ocr_vision/transformers",
        "LightOnOcrForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen3"},
            "vision_config": {"model_type": "pixtral", **_VIT, "patch_size": 14, "image_size": 56, "head_dim": 8},
        },
        "LightOnOcrConfig",
        converter_cannot="it knows the class by another spelling",
    ),
    TowerCase(
        "minicpmv4_6_vision",
        "MiniCPMV4_6ForConditionalGeneration",
        _MINICPM,
        "MiniCPMV4_6Config",
        preprocessor={**IMAGES, "scale_resolution": 448, "downsample_mode": "16x"},
    ),
    TowerCase(
        "minicpmv4_6_vision/ocr",
        "MiniCPMOcrForConditionalGeneration",
        _MINICPM,
        "MiniCPMOcrConfig",
        preprocessor={**IMAGES, "scale_resolution": 448, "downsample_mode": "4x"},
        converter_cannot="it does not know the class",
    ),
    TowerCase(
        "muse_glimmer_vision",
        "MuseGlimmerForConditionalGeneration",
        {
            "text_config": TEXT,
            "vision_config": {**_VIT, "patch_size": 14, "patch_temporal": 2, "merge_size": 2},
            **{"out_hidden_size": 128, "projector_hidden_size": 80},
        },
        "MuseGlimmerConfig",
        lost=r"patch_embedder\.patch_embedding",
    ),
)
