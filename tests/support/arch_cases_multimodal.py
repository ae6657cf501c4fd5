"""Wrappers that transformers has: tiny models that also see or hear, of which the row is that of the language model."""

from __future__ import annotations

from typing import Any

from arch_cases_qwen import QWEN4
from arch_models import VOCAB, ArchCase

Config = dict[str, Any]

TEXT: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 2e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DELTA: Config = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS: Config = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
SEES: Config = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "patch_size": 4,
}
_GRID = {"num_position_embeddings": 16}
TOWER: Config = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def whole(case_id: str, name: str, config: Config, *, end: str = "ForConditionalGeneration", **fields: Any) -> ArchCase:
    """A case of a wrapper, its row before the slash of its id; `name` is how transformers begins its classes."""
    row = case_id.partition("/")[0]
    return ArchCase(case_id, row, f"{name}Config", name + end, config, wrapped=True, **fields)


def sees(
    case_id: str,
    name: str,
    text: Config,
    vision: Config,
    *,
    swapped: str = "",
    renames: tuple[tuple[str, str], ...] = (),
    **more: Any,
) -> ArchCase:
    """One that has a `text_config` and a `vision_config`."""
    ids = {"image_token_id": 5, "pad_token_id": 0}
    config = {"text_config": TEXT | text, "vision_config": vision, **ids, **more}
    return whole(case_id, name, config, swapped=swapped, renames=renames)


def hears(case_id: str, name: str, text: Config, audio: Config, **more: Any) -> ArchCase:
    """One that has a `text_config` and an `audio_config`."""
    return whole(case_id, name, {"text_config": TEXT | text, "audio_config": audio, **more})


_WHISPER = {
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "max_source_positions": 16,
}
MEL = {
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "output_dim": 64,
    "downsample_hidden_size": 8,
}
ENCODER = {
    "num_mel_bins": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "hidden_size": 32,
    "max_source_positions": 16,
}
DEEPSTACK = {**SEES, **_GRID, "deepstack_visual_indexes": [0]}
QWEN3_MOE = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]},
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "tie_word_embeddings": False,
}
_GLM_SEES = {**SEES, "image_size": 16}
_GLM_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER}
CLIP = {"model_type": "clip_vision_model", **TOWER}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
_XDROPE = {
    "rope_type": "dynamic",
    "rope_theta": 10000.0,
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "mrope_section": [2, 2, 2, 2],
}
_MULTIPLIED: Config = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
    "logits_scaling": 2.0,
}
_TIED: Config = {"tie_word_embeddings": True}

CASES: tuple[ArchCase, ...] = (
    sees("qwen3_5_text/whole", "Qwen3_5", DELTA, SEES | _GRID),
    sees("qwen4_exp_text/whole", "Qwen4Exp", QWEN4 | {"eos_token_id": 2}, SEES | _GRID),
    sees("qwen3_5_moe_text/whole", "Qwen3_5Moe", DELTA | EXPERTS, SEES | _GRID),
    sees(
        "qwen2_vl",
        "Qwen2VL",
        {"rope_parameters": MROPE},
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4},
    ),
    sees("qwen2_vl/qwen2_5", "Qwen2_5_VL", {"rope_parameters": MROPE}, {**SEES, "fullatt_block_indexes": [0]}, **_TIED),
    sees("qwen3_vl", "Qwen3VL", {"head_dim": 16, "rope_parameters": MROPE}, DEEPSTACK),
    sees(
        "gemma3_text/whole",
        "Gemma3",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
        SIGLIP,
        mm_tokens_per_image=4,
    ),
    sees(
        "mistral3",
        "Mistral3",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        {"model_type": "pixtral", **TOWER},
    ),
    sees(
        "granite/vision",
        "Granite4Vision",
        {"architectures": ["GraniteForCausalLM"], "num_hidden_layers": 3, **_MULTIPLIED},
        {**SIGLIP, "hidden_size": 64},
        qformer_config={"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 48},
        downsample_rate="1/2",
        deepstack_layer_map=[[-1, 2]],
        spatial_target_layers=[0],
    ),
    sees("llama/llava", "Llava", {"model_type": "llama"}, CLIP),
    sees("llama/llava_next", "LlavaNext", {"model_type": "llama"}, CLIP),
    sees("qwen2/llava_onevision", "LlavaOnevision", {"model_type": "qwen2"}, SIGLIP),
    sees(
        "qwen2/internvl",
        "InternVL",
        {"model_type": "qwen2"},
        {"model_type": "internvl_vision", **TOWER, "image_size": [16, 16], "patch_size": [8, 8]},
    ),
    sees("llama/idefics3", "Idefics3", {"model_type": "llama"}, TOWER),
    sees("llama/smolvlm", "SmolVLM", {"model_type": "llama"}, TOWER),
    sees(
        "lfm2/vl",
        "Lfm2Vl",
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
        {"model_type": "siglip2_vision_model", **TOWER},
    ),
    hears("qwen2/qwen2_audio", "Qwen2Audio", {"model_type": "qwen2"}, _WHISPER, audio_token_index=5),
    hears("qwen2/audioflamingo3", "AudioFlamingo3", {"model_type": "qwen2"}, ENCODER, audio_token_id=5),
    hears(
        "llama/voxtral",
        "Voxtral",
        {"model_type": "llama", "head_dim": 16, "rope_theta": 1e8},
        {**ENCODER, "intermediate_size": 64},
        audio_token_id=5,
    ),
    sees(
        "llama/janus",
        "Janus",
        {"model_type": "llama"},
        {**TOWER, "projection_dim": 64, "num_image_tokens": 4},
        vq_config={
            "embed_dim": 8,
            "num_embeddings": 16,
            "latent_channels": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "num_patches": 4,
            "projection_dim": 64,
            "image_token_embed_dim": 64,
        },
    ),
    sees(
        "exaone4/exaone4_5",
        "Exaone4_5_",
        {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 2},
        {**SEES, "num_key_value_heads": 1, "fullatt_block_indexes": [0], "window_size": 8},
        video_token_id=6,
    ),
    sees(
        "qwen3_5_text/minicpmv4_6",
        "MiniCPMV4_6",
        {"model_type": "qwen3_5_text", **DELTA},
        {**TOWER, "insert_layer_id": 0},
        insert_layer_id=0,
        video_token_id=6,
    ),
    hears(
        "qwen3_vl/qwen3_asr",
        "Qwen3ASR",
        {"model_type": "qwen3", "head_dim": 16, "rope_parameters": MROPE},
        MEL,
        audio_token_id=5,
        timestamp_token_id=6,
        pad_token_id=0,
        eos_token_id=2,
        **_TIED,
    ),
    sees(
        "glm4v",
        "Glm4v",
        {"rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
        _GLM_SEES,
        video_token_id=6,
    ),
    sees(
        "glm4v/ocr",
        "GlmOcr",
        {"head_dim": 32, "rope_parameters": MROPE | {"mrope_section": [8, 4, 4], "partial_rotary_factor": 1.0}},
        _GLM_SEES,
        video_token_id=6,
    ),
    sees(
        "glm4_moe/glm4v",
        "Glm4vMoe",
        {
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": MROPE | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5},
            **_GLM_EXPERTS,
        },
        _GLM_SEES,
        video_token_id=6,
    ),
    sees("qwen3_vl_moe", "Qwen3VLMoe", QWEN3_MOE, DEEPSTACK),
    sees("qwen3_vl_moe/published", "Qwen3VLMoe", QWEN3_MOE, DEEPSTACK, swapped=r".*\.experts\.\w+"),
    whole(
        "qwen3_vl_moe/omni",
        "Qwen3OmniMoe",
        {
            "thinker_config": {"text_config": TEXT | QWEN3_MOE, "vision_config": DEEPSTACK, "audio_config": MEL},
            "enable_audio_output": False,
        },
    ),
    sees(
        "paddleocr",
        "PaddleOCRVL",
        {"head_dim": 16, "rope_parameters": MROPE | {"rope_theta": 5e5}},
        TOWER,
        video_token_id=6,
        **_TIED,
    ),
    sees("hunyuan_vl", "HunYuanVL", {"head_dim": 16, "rope_parameters": _XDROPE}, TOWER, **_TIED),
)
