"""Further wrappers that transformers has, with small towers: what is compared is the language model inside."""

from __future__ import annotations

from dataclasses import replace

from arch_cases_multimodal import (
    CLIP,
    DEEPSTACK,
    DELTA,
    ENCODER,
    MEL,
    MROPE,
    QWEN3_MOE,
    SIGLIP,
    TEXT,
    TOWER,
    Config,
    hears,
    sees,
    whole,
)
from arch_cases_wrappers import EXPERTS, LATENT, inside
from arch_models import ArchCase

_LLAMA: Config = {"model_type": "llama"}
_QWEN2: Config = {"model_type": "qwen2"}
_QWEN3: Config = {"model_type": "qwen3", "head_dim": 16}
_VIDEO: Config = {"video_token_id": 6}
_COHERE2: Config = {
    "model_type": "cohere2",
    "head_dim": 16,
    "sliding_window": 8,
    "logit_scale": 1.0,  # which transformers' wrappers, other than the language model alone, do not apply
    "layer_types": ["sliding_attention", "full_attention"],
}
_CLIPS: Config = {"image_token_index": 5, "video_token_index": 6}
_SAM: Config = {**TOWER, "output_channels": 16, "global_attn_indexes": [0], "window_size": 2, "mlp_dim": 48}
_QFORMER: Config = {
    "model_type": "blip_2_qformer",
    "num_hidden_layers": 1,
    "intermediate_size": 48,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "encoder_hidden_size": 32,
}
_OPT: Config = {**TEXT, "model_type": "opt", "ffn_dim": 96, "tie_word_embeddings": True}
_CONFORMER: Config = {
    "num_layers": 1,
    "hidden_dim": 32,
    "num_heads": 2,
    "dim_head": 16,
    "input_dim": 16,
    "output_dim": 8,
}
_MULTIPLIED: Config = {
    "model_type": "granite",
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
    "logits_scaling": 1.0,  # which transformers' wrappers, other than the language model alone, do not apply
}
_MAMBA: Config = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 3,
    "layers_block_type": ["mamba", "attention", "moe"],
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 8,
}
_SOUNDS: Config = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1], "hidden_size": 8}

CASES: tuple[ArchCase, ...] = (
    sees("cohere2/aya_vision", "AyaVision", _COHERE2, SIGLIP, image_token_index=5),
    sees("cohere2/vision", "Cohere2Vision", _COHERE2, SIGLIP, alignment_intermediate_size=64),
    sees("llama/deepseek_vl", "DeepseekVL", _LLAMA, SIGLIP),
    sees(
        "llama/deepseek_vl_hybrid",
        "DeepseekVLHybrid",
        _LLAMA,
        SIGLIP,
        high_res_vision_config={"model_type": "sam_vision_model", **_SAM},
    ),
    sees("qwen2/got_ocr2", "GotOcr2", _QWEN2, _SAM, image_token_index=5),
    sees(
        "glm4v/glm46v",
        "Glm46V",
        {
            "model_type": "glm4v_text",
            "rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
        },
        {"model_type": "glm4v_vision", **DEEPSTACK, "image_size": 16},
        **_VIDEO,
    ),
    sees(
        "mistral/idefics2",
        "Idefics2",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        TOWER,
        perceiver_config={
            "hidden_size": 64,
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 4,
            "resampler_head_dim": 16,
            "num_key_value_heads": 2,
        },
    ),
    sees("qwen3/lighton_ocr", "LightOnOcr", _QWEN3, {"model_type": "pixtral", **TOWER}),
    sees("llama/llava_next_video", "LlavaNextVideo", _LLAMA, CLIP, **_CLIPS),
    sees("llama/video_llava", "VideoLlava", _LLAMA, CLIP, **_CLIPS),
    sees("llama/vip_llava", "VipLlava", _LLAMA, CLIP, image_token_index=5, vision_feature_layers=[-1, -1]),
    sees(
        "qwen3_5_text/minicpm_ocr",
        "MiniCPMOcr",
        {"model_type": "qwen3_5_text", **DELTA},
        TOWER,
        insert_layer_id=0,
        **_VIDEO,
    ),
    sees(
        "qwen3_5_text/minicpmv4_7",
        "MiniCPMV4_7",
        {"model_type": "qwen3_5_text", **DELTA},
        TOWER,
        insert_layer_id=0,
        **_VIDEO,
    ),
    sees(
        "qwen2/ovis2",
        "Ovis2",
        _QWEN2,
        {**TOWER, "vocab_size": 16, "num_visual_indicator_tokens": 2},
        visual_indicator_token_ids=[6, 7],
    ),
    sees(
        "qwen3/qianfan_ocr",
        "QianfanOCR",
        _QWEN3,
        {**TOWER, "image_size": [16, 16], "patch_size": [8, 8]},
        renames=((r"(?<=model\.)encoder\.(?=layers\.)", ""),),
    ),
    sees("qwen2/video_llama3", "VideoLlama3", _QWEN2, TOWER, **_VIDEO),
    whole(
        "qwen2_vl/omni_thinker",
        "Qwen2_5OmniThinker",
        {
            "text_config": TEXT | {"rope_parameters": MROPE, "tie_word_embeddings": False},
            "vision_config": {**DEEPSTACK, "fullatt_block_indexes": [0]},
            "audio_config": MEL,
        },
    ),
    whole(
        "qwen3_vl_moe/omni_thinker",
        "Qwen3OmniMoeThinker",
        {"text_config": TEXT | QWEN3_MOE, "vision_config": DEEPSTACK, "audio_config": MEL},
    ),
    hears("llama/glmasr", "GlmAsr", _LLAMA, ENCODER, audio_token_id=5),
    *(
        whole(
            f"granite/{name}",
            stem,
            {
                "text_config": TEXT | _MULTIPLIED,
                "encoder_config": _CONFORMER,
                "projector_config": _QFORMER,
                "audio_token_index": 5,
                "has_lora_adapter": False,
            },
        )
        for name, stem in (("speech", "GraniteSpeech"), ("speech_plus", "GraniteSpeechPlus"))
    ),
    hears(
        "qwen2/musicflamingo",
        "MusicFlamingo",
        _QWEN2,
        {"model_type": "audioflamingo3_encoder", **ENCODER},
        audio_token_id=5,
    ),
    hears("qwen3/moss_transcribe", "MossTranscribeDiarize", _QWEN3, ENCODER, audio_token_id=5),
    hears(
        "llama/omniasr",
        "OmniASR",
        _LLAMA,
        {
            **TOWER,
            "conv_dim": [32, 32],
            "conv_kernel": [4, 2],
            "conv_stride": [2, 2],
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
        },
        audio_token_id=5,
    ),
    whole(
        "qwen2/vibevoice_asr",
        "VibeVoiceAsr",
        {
            "text_config": TEXT | _QWEN2,
            "acoustic_tokenizer_encoder_config": _SOUNDS,
            "semantic_tokenizer_encoder_config": _SOUNDS,
            "audio_token_id": 5,
        },
    ),
    sees(
        "deepseek_v3/kimi_k25_hf",
        "Kimi_K25",
        {**LATENT, **EXPERTS, "model_type": "deepseek_v3"},
        {**TOWER, "pos_emb_height": 4, "pos_emb_width": 4},
        projection_hidden_size=32,
        renames=((r"(?<=language_model\.model\.)blocks\.", "layers."),),
        **_VIDEO,
    ),
    ArchCase(
        "nemotron_h_moe/omni",
        "nemotron_h_moe",
        "NemotronH_Omni_Reasoning_V3_Config",
        "NemotronH_Omni_Reasoning_V3",
        {
            "text_config": TEXT | _MAMBA,
            "vision_config": {"model_type": "radio", "video_temporal_patch_size": 2, **TOWER},
            "projector_hidden_size": 32,
            "video_temporal_patch_size": 2,
            "vision_hidden_size": 32,
        },
        wrapped=True,
    ),
    # Its prompts are seen in both directions, which llama.cpp's Gemma does not do: an export to GGUF is refused.
    replace(
        sees(
            "gemma/paligemma",
            "PaliGemma",
            {"model_type": "gemma", "head_dim": 16},
            SIGLIP,
            image_token_index=5,
            projection_dim=64,
        ),
        llama_cpp_cannot="its graph attends to earlier positions only",
    ),
    sees(
        "granite/docling",
        "GraniteDocling",
        {"model_type": "granite_docling_text", **{k: v for k, v in _MULTIPLIED.items() if k != "model_type"}},
        {**TOWER, "out_hidden_size": 64, "scale_factor": 2, "deepstack_visual_indexes": [0], "use_fine_route": False},
    ),
    # Language models that llama.cpp does not run.
    *(
        replace(case, llama_cpp_cannot="it has no such network")
        for case in (
            sees("aria_text/whole", "Aria", {"moe_num_experts": 6, "moe_topk": 2}, TOWER),
            *(
                inside(
                    f"opt/{kind}",
                    f"{stem}ForConditionalGeneration",
                    kind,
                    {"text_config": _OPT, "vision_config": {"hidden_size": 32}},
                    "vision_model.encoder.layers.0.mlp.fc1.weight",
                    "qformer.encoder.layer.0.attention.attention.query.weight",
                    "language_projection.weight",
                    begins={"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
                )
                for stem, kind in (
                    ("Blip2", "blip-2"),
                    ("InstructBlip", "instructblip"),
                    ("InstructBlipVideo", "instructblipvideo"),
                )
            ),
        )
    ),
)
