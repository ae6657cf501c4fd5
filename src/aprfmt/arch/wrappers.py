"""Wrappers: networks that contain a language model of the table besides towers, projectors and codecs. Data only.

If a config.json has a nested config for the language model (arch.converter.language_part), that decides the row,
whether the wrapper is listed here or not. The list covers names, and what the nested config does not state.
"""

from __future__ import annotations

from aprfmt.arch.row import Wrapper

BEGINNINGS = (
    *("language_model.", "model.language_model.", "model.text_model.", "thinker.", "llm.", "text_decoder."),
    *("transformer.", "pretrained_model.", "lfm.", "text_model."),
)
"""Name prefixes of a wrapper's language model, and of classes with another head."""
_QUERIES = ("language_projection.", "query_tokens")
"""Of BLIP-2: what joins the Q-Former and the language model."""
_MERGER = ("patch_merger.", "pre_mm_projector_norm.", "vision_encoder.", "vision_language_adapter.")
"""Of Mistral Large 4, whose language model has no prefix: what joins it to its tower, and the tower."""
_SWIGLU = "a SwiGLU projector behind a pixel shuffle"
_Q_FORMER = "the Q-Former between tower and language model"
_CODES = "images as codes of a VQ network"
_PROJECTED = "a linear layer behind the merger of Qwen2.5-VL's tower"
_NEWLINE = "image_newline at the end of each row of tiles, and cropping their padding"
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
    Wrapper("AyaVisionForConditionalGeneration", "aya_vision", "cohere2", lacks=_SWIGLU),
    Wrapper("Cohere2VisionForConditionalGeneration", "cohere2_vision", "cohere2", lacks=_SWIGLU),
    Wrapper("DeepseekVLForConditionalGeneration", "deepseek_vl", "llama"),
    Wrapper(
        "DeepseekVLHybridForConditionalGeneration",
        "deepseek_vl_hybrid",
        "llama",
        beside=("model.high_res_",),
        lacks="its projector, which joins SigLIP and SAM",
    ),
    Wrapper("FastVlmForConditionalGeneration", "fast_vlm", "qwen2", lacks="its convolutional tower (FastViT)"),
    Wrapper("GotOcr2ForConditionalGeneration", "got_ocr2", "qwen2", lacks="a SAM tower by itself"),
    Wrapper("Glm46VForConditionalGeneration", "glm46v", "glm4v"),
    Wrapper("Idefics2ForConditionalGeneration", "idefics2", "mistral", lacks="its perceiver resampler"),
    Wrapper("Idefics3ForConditionalGeneration", "idefics3", "llama"),
    Wrapper("SmolVLMForConditionalGeneration", "smolvlm", "llama"),
    Wrapper("InternVLForConditionalGeneration", "internvl", "qwen2"),
    Wrapper("LightOnOcrForConditionalGeneration", "", "qwen3"),
    Wrapper("LlavaNextForConditionalGeneration", "llava_next", "llama", lacks=_NEWLINE),
    Wrapper("LlavaNextVideoForConditionalGeneration", "llava_next_video", "llama", lacks=_NEWLINE),
    Wrapper("LlavaOnevisionForConditionalGeneration", "llava_onevision", "qwen2", lacks=_NEWLINE),
    Wrapper("VideoLlavaForConditionalGeneration", "video_llava", "llama", lacks="its second tower, for video"),
    Wrapper(
        "VipLlavaForConditionalGeneration",
        "vipllava",
        "llama",
        lacks="the norm of its projector's input, states of several layers",
    ),
    Wrapper("MiniCPMOcrForConditionalGeneration", "minicpm_ocr", "qwen3_5_text"),
    Wrapper(
        "MiniCPMV4_7ForConditionalGeneration",
        "minicpmv4_7",
        "qwen3_5_text",
        lacks="M-RoPE positions of slices of images",
    ),
    Wrapper(
        "Ovis2ForConditionalGeneration",
        "ovis2",
        "qwen2",
        beside=("model.visual_embeddings_table.",),
        lacks="its table of visual tokens",
    ),
    Wrapper(
        "PaliGemmaForConditionalGeneration",
        "paligemma",
        "gemma",
        lacks="a projector of a single linear layer without a norm",
    ),
    Wrapper(
        "PerceptionLMForConditionalGeneration", "perception_lm", "llama", lacks="average pooling behind its projector"
    ),
    Wrapper("QianfanOCRForConditionalGeneration", "qianfan_ocr", "qwen3"),
    Wrapper("VideoLlama3ForConditionalGeneration", "video_llama_3", "qwen2"),
    Wrapper("Qwen2_5OmniThinkerForConditionalGeneration", "qwen2_5_omni_thinker", "qwen2_vl"),
    Wrapper("Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_thinker", "qwen3_vl_moe"),
    Wrapper("Kimi_K25ForConditionalGeneration", "", "deepseek_v3"),
    Wrapper("NemotronH_Omni_Reasoning_V3", "nemotron_h_omni", "nemotron_h_moe"),
    Wrapper("GlmAsrForConditionalGeneration", "glmasr", "llama"),
    Wrapper("GraniteSpeechForConditionalGeneration", "granite_speech", "granite"),
    Wrapper("GraniteSpeechPlusForConditionalGeneration", "granite_speech_plus", "granite"),
    Wrapper(
        "MusicFlamingoForConditionalGeneration",
        "musicflamingo",
        "qwen2",
        lacks="rotary time embeddings of audio frames",
    ),
    Wrapper(
        "MossTranscribeDiarizeForConditionalGeneration",
        "moss_transcribe_diarize",
        "qwen3",
        lacks="the norm of its projector's output",
    ),
    Wrapper("OmniASRForConditionalGeneration", "omniasr", "llama", lacks="its wav2vec 2.0 encoder"),
    Wrapper(
        "VibeVoiceAsrForConditionalGeneration",
        "vibevoice_asr",
        "qwen2",
        lacks="its acoustic and semantic audio encoders",
    ),
    Wrapper(
        "Emu3ForConditionalGeneration",
        "emu3",
        "llama",
        beside=("model.vqmodel.", "model.vocabulary_mapping."),
        lacks=_CODES,
    ),
    Wrapper("Apertus1p5ForConditionalGeneration", "apertus1p5", "apertus", lacks=_CODES),
    Wrapper("HyperCLOVAXVisionV2ForConditionalGeneration", "hyperclovax_vision_v2", "hyperclovax", lacks=_PROJECTED),
    Wrapper(
        "AriaForConditionalGeneration",
        "aria",
        "aria_text",
        lacks="its projector of learned queries with cross-attention",
    ),
    Wrapper("Blip2ForConditionalGeneration", "blip-2", "opt", beside=_QUERIES, lacks=_Q_FORMER),
    Wrapper("InstructBlipForConditionalGeneration", "instructblip", "opt", beside=_QUERIES, lacks=_Q_FORMER),
    Wrapper("InstructBlipVideoForConditionalGeneration", "instructblipvideo", "opt", beside=_QUERIES, lacks=_Q_FORMER),
    Wrapper(
        "GraniteDoclingForConditionalGeneration",
        "granite_docling",
        "granite",
        lacks="position embeddings behind its pixel shuffle",
    ),
    Wrapper(
        "InklingForConditionalGeneration",
        "inkling_mm_model",
        "inkling_text",
        lacks="its tower, which folds patches by linear layers",
    ),
    Wrapper("Inkling2ForConditionalGeneration", "inkling2", "inkling2_text"),
    Wrapper("Inkling2LoopForConditionalGeneration", "inkling2_loop", "inkling2_loop_text"),
    Wrapper(
        "Lfm3VlForConditionalGeneration", "lfm3_vl", "lfm3", lacks="gated convolutions over the patches in its tower"
    ),
    Wrapper(
        "MllamaForConditionalGeneration",
        "mllama",
        "mllama_text_model",
        lacks="cross-attention of the language model to images",
    ),
    Wrapper("HCXVisionV2ForCausalLM", "", "hyperclovax", lacks=_PROJECTED),
    Wrapper("MuseSparkForConditionalGeneration", "muse_spark", "muse_spark_text"),
    Wrapper("MistralLarge4ForConditionalGeneration", "mistral_large4", "mistral_large4_text", beside=_MERGER),
)
