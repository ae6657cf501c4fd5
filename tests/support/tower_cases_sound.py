"""Cases of towers that hear, behind other projectors than those of the basic cases."""

from __future__ import annotations

from tower_models import TEXT, VOCAB, TowerCase

_OWN = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_WHISPER = {
    **{"d_model": 32, "encoder_ffn_dim": 48, "encoder_layers": 4, "encoder_attention_heads": 4},
    **{"num_mel_bins": 128, "max_source_positions": 1500},
}

_CONFORMER = {
    **{"input_dim": 160, "num_layers": 3, "hidden_dim": 32, "feedforward_mult": 2, "num_heads": 4, "output_dim": 12},
    **{"context_size": 20, "max_pos_emb": 24, "conv_kernel_size": 5, "conv_expansion_factor": 2, "dim_head": 8},
}
_QFORMER = {
    **{"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"encoder_hidden_size": 32, "cross_attention_frequency": 1},
}
_GRANITE = {**TEXT, "model_type": "granite"}

CASES = (
    TowerCase(
        "audioflamingo3_tower",
        "AudioFlamingo3ForConditionalGeneration",
        {"text_config": {**TEXT, "model_type": "qwen2"}, "audio_config": {**_OWN, "num_mel_bins": 128}},
        "AudioFlamingo3Config",
    ),
    TowerCase(
        "ultravox_tower",
        "UltravoxModel",
        {
            "model_type": "ultravox",
            "hidden_size": 96,
            "stack_factor": 8,
            "projector_ln_mid": True,
            "text_config": {**TEXT, "model_type": "llama", "rms_norm_eps": 1e-5},
            "audio_config": {"model_type": "whisper", **_WHISPER},
        },
        preprocessor={},
    ),
    TowerCase(
        "meralion2_tower",
        "MERaLiON2ForConditionalGeneration",
        {
            "model_type": "meralion2",
            "speech_mlp_scale_factor": 15,
            "text_config": {**TEXT, "model_type": "gemma2", "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6},
            "speech_config": {"model_type": "whisper", **_WHISPER},
        },
        preprocessor={},
    ),
    TowerCase(
        "qwen3_asr_tower",
        "Qwen3ASRForConditionalGeneration",
        {
            "model_type": "qwen3_asr",
            "thinker_config": {
                "text_config": {
                    **TEXT,
                    **{"model_type": "qwen3", "rms_norm_eps": 1e-6},
                    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True},
                },
                "audio_config": {**_WHISPER, "downsample_hidden_size": 24, "output_dim": 64},
            },
        },
        preprocessor={},
        rounds=r"a\.position_embd",
    ),
    *(
        TowerCase(
            f"qwen3_omni_towers{name}",
            "Qwen3OmniMoeForConditionalGeneration",
            {
                "model_type": "qwen3_omni_moe",
                "thinker_config": {
                    "text_config": {
                        **TEXT,
                        **{"model_type": "qwen3_omni_moe_text", "rms_norm_eps": 1e-6, "num_experts": 4},
                        **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
                        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True},
                    },
                    "audio_config": {**_WHISPER, "downsample_hidden_size": 24, "output_dim": 64},
                    "vision_config": {
                        **{"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4},
                        **{"patch_size": 16, "spatial_merge_size": 2, "num_position_embeddings": 64},
                        **{"out_hidden_size": 64, "deepstack_visual_indexes": listed},
                    },
                },
            },
            converter_cannot="it calls the tensors that see model.visual, for which it has no names",
            feed="merged",
            inner="Qwen3OmniMoeThinkerForConditionalGeneration",
            images=((128, 96), (64, 160), (128, 128)),
            mtmd_cannot=cannot,
        )
        for name, listed, cannot in (
            ("", [0, 2], "it wants images and sounds of one width, and features of layers make images wider"),
            ("/last_layer", [], ""),
        )
    ),
    TowerCase(
        "glmasr_tower",
        "GlmasrModel",
        {
            "model_type": "Glmasr",
            "merge_factor": 4,
            "lm_config": {**TEXT, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5},
            "whisper_config": {"model_type": "whisper", **_WHISPER},
        },
        preprocessor={},
    ),
    TowerCase(
        "granite_speech_tower",
        "GraniteSpeechForConditionalGeneration",
        {
            **{"text_config": _GRANITE, "encoder_config": _CONFORMER, "projector_config": _QFORMER},
            **{"window_size": 15, "downsample_rate": 5, "has_lora_adapter": False},
        },
        "GraniteSpeechConfig",
        renames=((r"^model\.(encoder|projector)\.", r"\1."),),
        lost=r"\.batch_norm\.",
        differs={r"\.conv_norm": "it calls the folded batch norm conv_norm_var; llama.cpp reads conv_norm"},
        preprocessor={},
        feed="pairs_of_frames",
        images=((48000,), (32000,)),
    ),
    TowerCase(
        "granite_speech_plus_tower",
        "GraniteSpeechPlusForConditionalGeneration",
        {
            "text_config": _GRANITE,
            "encoder_config": {**_CONFORMER, "cat_hidden_layers": [2]},
            "projector_config": {**_QFORMER, "encoder_hidden_size": 64},
            **{"window_size": 15, "downsample_rate": 5, "has_lora_adapter": False},
        },
        "GraniteSpeechPlusConfig",
        renames=((r"^model\.(encoder|projector)\.", r"\1."),),
        lost=r"\.batch_norm\.",
        differs={r"\.conv_norm": "it calls the folded batch norm conv_norm_var; llama.cpp reads conv_norm"},
        preprocessor={},
        feed="pairs_of_frames",
        images=((48000,), (32000,)),
    ),
    TowerCase(
        "lfm2_audio_tower",
        "Lfm2AudioForConditionalGeneration",
        {
            "model_type": "lfm2_audio",
            "lfm": {
                **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
                **{"vocab_size": VOCAB, "conv_L_cache": 3, "block_ff_dim": 96, "block_auto_adjust_ff_dim": False},
                **{"layer_types": ["conv", "full_attention"], "model_type": "lfm2", "max_position_embeddings": 512},
                **{"architectures": ["Lfm2ForCausalLM"], "norm_eps": 1e-5, "intermediate_size": 96},
            },
            "encoder": {
                **{"d_model": 32, "n_layers": 7, "n_heads": 4, "feat_in": 128, "ff_expansion_factor": 4},
                **{"conv_kernel_size": 5, "subsampling_conv_channels": 16},
            },
        },
        preprocessor={},
        lost=r"\.batch_norm\.",
        rounds=r"\.conv_norm\.",
        extra={
            **{f"conformer.layers.{n}.conv.batch_norm.num_batches_tracked": () for n in range(7)},
            **{"audio_embedding.embedding.weight": (40, 64), "audio_embedding.to_logits.weight": (40, 64)},
        },
    ),
)
