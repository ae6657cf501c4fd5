"""Wrappers that transformers does not have, and networks that are one of the table under a name of their own.

Their config.json and the names of their tensors are those of the published model that a comment names, at small sizes;
of each tower there are a few tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arch_models import DIMS, VOCAB, ArchCase

Config = dict[str, Any]

PLAIN: Config = {
    **{key: value for key, value in DIMS.items() if key != "head_dim"},
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}
LATENT: Config = {
    **PLAIN,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "attention_bias": False,
}
EXPERTS: Config = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
_MROPE = {"type": "mrope", "mrope_section": [4, 2, 2]}
_LANGUAGE = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}


def _without(config: Config, *names: str) -> Config:
    return {key: value for key, value in config.items() if key not in names}


def alias(case_id: str, model_class: str, model_type: str, config: Config) -> ArchCase:
    """A network of a row under another name."""
    return ArchCase(case_id, case_id.partition("/")[0], "", model_class, {"model_type": model_type, **config})


def inside(
    case_id: str, model_class: str, model_type: str, config: Config, *beside: str, begins: Mapping[str, str] = {}
) -> ArchCase:
    """A wrapper: names of tensors that are none of the language model, and beginnings of the row's names in it."""
    shapes = {name: (64,) if name.endswith((".bias", "norm.weight")) else (32, 64) for name in beside}
    config = {"model_type": model_type, **config}
    row = case_id.partition("/")[0]
    return ArchCase(case_id, row, "", model_class, config, wrapped=True, begins=begins, beside=shapes)


def _ocr(case_id: str, model_class: str, **more: Any) -> ArchCase:
    text = {
        **_without(PLAIN, "rms_norm_eps", "hidden_act"),
        **_without(EXPERTS, "num_nextn_predict_layers"),
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "kv_lora_rank": None,
        "q_lora_rank": None,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "v_head_dim": 0,
        "use_mla": False,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    }
    return inside(
        case_id,
        model_class,
        "deepseek_vl_v2",
        {"language_config": text | more, "vision_config": {"image_size": 1024}, "projector_config": {"n_embed": 64}},
        "model.sam_model.blocks.0.attn.qkv.weight",
        "model.vision_model.transformer.layers.0.mlp.fc1.weight",
        "model.projector.layers.weight",
        "model.image_newline",
        "model.view_seperator",
    )


CASES: tuple[ArchCase, ...] = (
    # KORMo-Team/KORMo-10B-base
    alias("kormo", "KORMoForCausalLM", "kormo", {**PLAIN, "rope_theta": 500000.0}),
    # internlm/internlm3-8b-instruct
    alias(
        "llama/internlm3",
        "InternLM3ForCausalLM",
        "internlm3",
        {**PLAIN, "head_dim": 16, "bias": False, "qkv_bias": False, "rope_theta": 50000000},
    ),
    # IQuestLab/IQuest-Coder-V1-40B-Instruct
    alias(
        "llama/iquestcoder",
        "IQuestCoderForCausalLM",
        "iquestcoder",
        {**PLAIN, "head_dim": 16, "attention_bias": False, "mlp_bias": False, "clip_qkv": None, "rope_theta": 500000.0},
    ),
    # The class of allenai/OLMo-7B before its tensors were renamed; llama.cpp's converter takes it for the later one.
    alias("olmo/olmo", "OLMoForCausalLM", "olmo", {**_without(PLAIN, "rms_norm_eps"), "clip_qkv": 8.0}),
    # nvidia/NVIDIA-Nemotron-Labs-3-Puzzle-75B-A9B-BF16
    alias(
        "nemotron_h_puzzle",
        "NemotronHPuzzleForCausalLM",
        "nemotron_h_puzzle",
        {
            **_without(PLAIN, "hidden_act", "intermediate_size", "rms_norm_eps"),
            "head_dim": 16,
            "layer_norm_epsilon": 1e-5,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "conv_kernel": 4,
            "num_hidden_layers": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 32,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
            "block_configs": [
                {"block_type": "mamba"},
                {"block_type": "moe", "moe_intermediate_size": 48, "num_experts_per_tok": 2},
                {"block_type": "attention"},
                {"block_type": "moe", "moe_intermediate_size": 24, "num_experts_per_tok": 3},
            ],
        },
    ),
    # evilfreelancer/ruGPT3XL
    *(
        ArchCase(
            f"rugpt3xl{end}",
            "rugpt3xl",
            "",
            "RuGPT3XLForCausalLM",
            {
                **_without(PLAIN, "num_key_value_heads", "rms_norm_eps"),
                "model_type": "rugpt3xl",
                "layer_norm_eps": 1e-5,
                "hidden_act": "gelu_new",
                "sparse_mode": mode,
            },
            llama_cpp_cannot=why,
            wrapped=True,  # a GGUF of it comes back as a GPT-2
        )
        for end, mode, why in (("", "none", ""), ("/sparse", "alternating", "its graph ignores sparse attention"))
    ),
    # rednote-hilab/dots.ocr
    inside(
        "qwen2/dots_ocr",
        "DotsOCRForCausalLM",
        "dots_ocr",
        {
            **PLAIN,
            "attention_bias": True,
            "use_sliding_window": False,
            "rope_theta": 1000000,
            "vision_config": {"embed_dim": 32},
        },
        "vision_tower.blocks.0.attn.qkv.weight",
        "vision_tower.blocks.0.mlp.fc1.weight",
        "vision_tower.patch_embed.patchifier.norm.weight",
        "vision_tower.merger.mlp.0.weight",
    ),
    # sbintuitions/sarashina2.2-vision-3b
    inside(
        "llama/sarashina2_vision",
        "Sarashina2VisionForCausalLM",
        "sarashina2_vision",
        {
            "text_config": {**PLAIN, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            "vision_config": {"depth": 1},
        },
        "visual.blocks.0.attn.qkv.weight",
        "visual.merger.mlp.0.weight",
        "norm.weight",
        "norm.bias",
        begins={"": "llm."},
    ),
    # HuggingFaceTB/SmolVLM2-2.2B-Instruct, which is silent about the number of its heads
    inside(
        "llama/smolvlm2",
        "SmolVLMForConditionalGeneration",
        "smolvlm",
        {
            "text_config": {
                **_without(PLAIN, "num_attention_heads"),
                "model_type": "llama",
                "architectures": ["VLlama3ForCausalLM"],
                "num_key_value_heads": 32,
                "head_dim": 16,
            },
            "vision_config": {"hidden_size": 32},
        },
        "model.vision_model.encoder.layers.0.self_attn.q_proj.weight",
        "model.connector.modality_projection.proj.weight",
        begins={"model.": "model.text_model."},
    ),
    # fixie-ai/ultravox-v0_5-llama-3_2-1b, with the language model that it names beside it
    inside(
        "llama/ultravox",
        "UltravoxModel",
        "ultravox",
        {"text_config": {**PLAIN, "model_type": "llama"}, "audio_config": {"d_model": 32}, "stack_factor": 8},
        "audio_tower.layers.0.fc1.weight",
        "multi_modal_projector.linear_1.weight",
        "multi_modal_projector.ln_pre.weight",
        begins=_LANGUAGE,
    ),
    # MERaLiON/MERaLiON-2-3B
    inside(
        "gemma2/meralion2",
        "MERaLiON2ForConditionalGeneration",
        "meralion2",
        {
            "text_config": {
                **_without(PLAIN, "hidden_act"),
                "model_type": "gemma2",
                "architectures": ["Gemma2ForCausalLM"],
                "head_dim": 16,
                "hidden_activation": "gelu_pytorch_tanh",
                "tie_word_embeddings": True,
                "sliding_window": 8,
                "query_pre_attn_scalar": 16,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            "speech_config": {"d_model": 32},
        },
        "speech_encoder.layers.0.fc1.weight",
        "ln_speech.weight",
        "speech_audio_adapter.mlp_adapter.0.weight",
        begins={"": "text_decoder."},
    ),
    # stepfun-ai/Step3-VL-10B
    inside(
        "qwen3/step_vl",
        "StepVLForConditionalGeneration",
        "step_robotics",
        {
            "text_config": {
                **PLAIN,
                "model_type": "qwen3",
                "head_dim": 16,
                "architectures": ["Qwen3ForCausalLM"],
                "attention_bias": False,
                "rope_theta": 1000000.0,
            },
            "vision_config": {"width": 32},
        },
        "vision_model.transformer.resblocks.0.mlp.c_fc.weight",
        "vit_large_projector.weight",
    ),
    # moonshotai/Kimi-VL-A3B-Instruct
    inside(
        "deepseek_v3/kimi_vl",
        "KimiVLForConditionalGeneration",
        "kimi_vl",
        {
            "text_config": {**LATENT, **EXPERTS, "model_type": "deepseek_v3", "rope_theta": 800000.0},
            "vision_config": {"hidden_size": 32},
        },
        "vision_tower.encoder.blocks.0.wqkv.weight",
        "multi_modal_projector.linear_1.weight",
        "multi_modal_projector.pre_norm.weight",
        begins=_LANGUAGE,
    ),
    # moonshotai/Kimi-K2.5
    inside(
        "deepseek_v3/kimi_k25",
        "KimiK25ForConditionalGeneration",
        "kimi_k25",
        {
            "text_config": {
                **LATENT,
                **EXPERTS,
                "model_type": "kimi_k2",
                "architectures": ["DeepseekV3ForCausalLM"],
                "rope_theta": 50000.0,
            },
            "vision_config": {"vt_hidden_size": 32},
        },
        "vision_tower.encoder.blocks.0.wqkv.weight",
        "mm_projector.proj.0.weight",
        "mm_projector.pre_norm.weight",
        begins=_LANGUAGE,
    ),
    # tencent/Youtu-VL-4B-Instruct
    inside(
        "youtu/vl",
        "YoutuVLForConditionalGeneration",
        "youtu_vl",
        {**LATENT, "rope_theta": 1600000, "rope_interleave": True, "vision_config": {"hidden_size": 32}},
        "siglip2.vision_model.encoder.layers.0.mlp.fc1.weight",
        "merger.mlp.0.weight",
    ),
    # deepseek-ai/DeepSeek-OCR, baidu/Unlimited-OCR
    _ocr("deepseek_ocr", "DeepseekOCRForCausalLM"),
    _ocr("deepseek_ocr/unlimited", "UnlimitedOCRForCausalLM", sliding_window_size=128),
    # microsoft/Phi-4-reasoning-vision-15B
    inside(
        "phi3/phi4_vision",
        "Phi4ForCausalLMV",
        "phi4-siglip",
        {
            **PLAIN,
            "original_max_position_embeddings": 512,
            "rope_theta": 500000.0,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
            "vision_config": {"hidden_size": 32},
        },
        "model.vision_tower.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
        "model.mm_projector.0.weight",
    ),
    # NousResearch/Obsidian-3B-V0.5
    inside(
        "stablelm/llava",
        "LlavaStableLMEpochForCausalLM",
        "llava_stablelm_epoch",
        {
            **_without(PLAIN, "rms_norm_eps"),
            "norm_eps": 1e-5,
            "rope_pct": 0.25,
            "rope_theta": 10000,
            "use_parallel_residual": False,
        },
        "model.mm_projector.weight",
        "model.vision_tower.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
    ),
    # Qwen/Qwen2.5-Omni-7B
    inside(
        "qwen2_vl/omni",
        "Qwen2_5OmniModel",
        "qwen2_5_omni",
        {
            "thinker_config": {
                "model_type": "qwen2_5_omni_thinker",
                "text_config": {**PLAIN, "model_type": "qwen2_5_omni_text", "rope_scaling": _MROPE},
                "vision_config": {"depth": 1},
                "audio_config": {"d_model": 32},
            },
            "talker_config": {"hidden_size": 32},
        },
        "thinker.visual.blocks.0.attn.q.weight",
        "thinker.audio_tower.layers.0.fc1.weight",
        "talker.model.layers.0.mlp.up_proj.weight",
        "talker.model.norm.weight",
        "token2wav.code2wav_dit_model.input_embed.proj.weight",
        begins={"": "thinker."},
    ),
    # the bare model of Qwen/Qwen2-VL-2B-Instruct
    inside(
        "qwen2_vl/bare",
        "Qwen2VLModel",
        "qwen2_vl",
        {**PLAIN, "rope_scaling": _MROPE, "vision_config": {"depth": 1}},
        "visual.blocks.0.attn.qkv.weight",
        "visual.merger.mlp.0.weight",
    ),
)
