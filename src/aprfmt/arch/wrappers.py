"""Wrappers: networks that contain a language model of the table besides towers, projectors and codecs. Data only.

If a config.json has a nested config for the language model (arch.converter.language_part), that decides the row,
whether the wrapper is listed here or not. The list covers names, and what the nested config does not state.
"""

from __future__ import annotations

from aprfmt.arch.row import Wrapper

BEGINNINGS = (
    *("language_model.", "model.language_model.", "model.text_model.", "thinker.", "llm.", "text_decoder."),
    *("transformer.", "pretrained_model.", "lfm."),
)
"""Name prefixes of a wrapper's language model, and of classes with another head."""
WRAPPERS: tuple[Wrapper, ...] = (
    Wrapper("Qwen2AudioForConditionalGeneration", "qwen2_audio", "qwen2"),
    Wrapper("AudioFlamingo3ForConditionalGeneration", "audioflamingo3", "qwen2"),
    Wrapper("Mistral3ForConditionalGeneration", "mistral3", "mistral3", {"mistral": "mistral3"}),
    Wrapper("LlavaForConditionalGeneration", "llava", "llama"),
    Wrapper("VoxtralForConditionalGeneration", "voxtral", "llama"),
    Wrapper("JanusForConditionalGeneration", "janus", "llama", beside=("model.generation_",)),
    Wrapper("UltravoxModel", "ultravox", "llama"),
    Wrapper("Sarashina2VisionForCausalLM", "sarashina2_vision", "llama", beside=("norm.",)),
    Wrapper("StepVLForConditionalGeneration", "step_robotics", "qwen3"),
    Wrapper("BailingMoeV3VLForConditionalGeneration", "bailing_moe_v3_vl", "bailing_moe_v3"),
    Wrapper("Exaone4_5_ForConditionalGeneration", "exaone4_5", "exaone4"),
    Wrapper("MiniCPMV4_6ForConditionalGeneration", "minicpmv4_6", "qwen3_5_text"),
    Wrapper("Granite4VisionForConditionalGeneration", "granite4_vision", "granite"),
    Wrapper("Qwen3ASRForConditionalGeneration", "qwen3_asr", "qwen3_vl", {"qwen3": "qwen3_vl"}),
    Wrapper("Glm4vForConditionalGeneration", "glm4v", "glm4v"),
    Wrapper("GlmOcrForConditionalGeneration", "glm_ocr", "glm4v"),
    Wrapper("Glm4vMoeForConditionalGeneration", "glm4v_moe", "glm4_moe"),
    Wrapper("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe"),
    Wrapper("Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe", "qwen3_vl_moe"),
    Wrapper("Qwen2_5OmniModel", "qwen2_5_omni", "qwen2_vl"),
    Wrapper("Qwen2_5OmniForConditionalGeneration", "", "qwen2_vl"),
    Wrapper("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", "minimax_m3"),
    Wrapper("PaddleOCRVLForConditionalGeneration", "paddleocr_vl", "paddleocr"),
    Wrapper("HunYuanVLForConditionalGeneration", "hunyuan_vl", "hunyuan_vl"),
    Wrapper("KimiVLForConditionalGeneration", "kimi_vl", "deepseek_v3"),
    Wrapper("KimiK25ForConditionalGeneration", "kimi_k25", "deepseek_v3"),
    Wrapper("YoutuVLForConditionalGeneration", "youtu_vl", "youtu"),
    Wrapper("DeepseekOCRForCausalLM", "deepseek_vl_v2", "deepseek_ocr", {"deepseek_v2": "deepseek_ocr"}),
    Wrapper("DeepseekOCR2ForCausalLM", "", "deepseek_ocr", {"deepseek_v2": "deepseek_ocr"}),
    Wrapper("UnlimitedOCRForCausalLM", "", "deepseek_ocr", {"deepseek_v2": "deepseek_ocr"}),
    Wrapper("DotsOCRForCausalLM", "dots_ocr", "qwen2"),
    Wrapper("Phi4ForCausalLMV", "phi4-siglip", "phi3"),
    Wrapper("LlavaStableLMEpochForCausalLM", "llava_stablelm_epoch", "stablelm"),
    Wrapper("Glm5NextForConditionalGeneration", "glm5_next", "glm5_next"),
    Wrapper("Dots3NoteForConditionalGeneration", "", "dots3_note"),
    Wrapper("Step3p7ForConditionalGeneration", "step3p7", "step3p5"),
    Wrapper("LightOnOCRForConditionalGeneration", "lighton_ocr", "qwen3"),
    Wrapper("MERaLiON2ForConditionalGeneration", "meralion2", "gemma2", beside=("ln_speech.",)),
    Wrapper("Glm5vForConditionalGeneration", "glm5v", "glm_moe_dsa"),
    Wrapper("Lfm2VlForConditionalGeneration", "lfm2_vl", "lfm2"),
    Wrapper("Lfm2AudioForConditionalGeneration", "lfm2_audio", "lfm2"),
    Wrapper("Llama4ForConditionalGeneration", "llama4", "llama4_text"),
    Wrapper("Gemma3nForConditionalGeneration", "gemma3n", "gemma3n_text"),
    Wrapper("MuseGlimmerForConditionalGeneration", "muse_glimmer", "muse_glimmer_text"),
    Wrapper("Gemma4ForConditionalGeneration", "gemma4", "gemma4_text"),
    Wrapper("Gemma4UnifiedForConditionalGeneration", "gemma4_unified", "gemma4_text"),
    Wrapper("Qwen3TTSForConditionalGeneration", "qwen3_tts", "qwen3_tts_talker"),
)
