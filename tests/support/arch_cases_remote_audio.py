"""Cases of networks that speak: config.json as published but for the sizes."""

from __future__ import annotations

from arch_cases_remote import Config, remote
from arch_cases_remote_encoder import LFM2
from arch_models import DIMS, VOCAB, ArchCase

_DETOKENIZER: Config = {"layer_types": ["conv", "sliding_attention"], "output_size": 32, "sliding_window": 30}

_WAVTOKENIZER: Config = {
    "convnext": {"n_embd": 64, "n_layer": 2}, "group_norm_epsilon": 1e-6, "group_norm_groups": 32, "hidden_size": 82,
    "layer_norm_epsilon": 1e-6, "max_position_embeddings": 8192, "n_embd_features": 32, "n_ff": 96, "n_head": 1,
    "n_layer": 6, "posnet": {"n_embd": 64, "n_layer": 6}, "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

_TALKER: Config = {
    **{key: value for key, value in DIMS.items() if key not in ("pad_token_id", "bos_token_id", "eos_token_id")},
    "attention_bias": False, "codec_bos_id": 2, "codec_eos_token_id": 3, "codec_language_id": {"english": 5},
    "hidden_act": "silu", "model_type": "qwen3_tts_talker", "num_code_groups": 16, "position_id_per_seconds": 13,
    "rope_scaling": {"interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default", "type": "default"},
    "rope_theta": 1000000, "sliding_window": None, "text_hidden_size": 48, "text_vocab_size": VOCAB,
    "use_sliding_window": False, "vocab_size": 72,
}  # fmt: skip
_COMPUTED = "its file stores the product of embedding and projection"

CASES: tuple[ArchCase, ...] = (
    # As the audio_detokenizer of LiquidAI/LFM2.5-Audio-1.5B has them.
    *remote(
        "lfm2_audio_tokenizer",
        "Lfm25AudioTokenizer",
        {**LFM2, **_DETOKENIZER},
        kind="states",
        wrapped=True,
        beside={"emb.emb.weight": (16, 64)},
    ),
    # As novateur/WavTokenizer-large-speech-75token has them, brought into a folder by llama.cpp's script.
    *remote("wavtokenizer_dec", "WavTokenizerDec", _WAVTOKENIZER, kind="encoder"),
    # As Qwen/Qwen3-TTS-12Hz-1.7B-Base has them.
    *remote(
        "qwen3_tts_talker",
        "Qwen3TTSForConditionalGeneration",
        {"model_type": "qwen3_tts", "talker_config": _TALKER, "tts_model_type": "base"},
        llama_cpp_cannot=_COMPUTED,
        wrapped=True,
        beside={"talker.code_predictor.lm_head.0.weight": (8, 8), "speaker_encoder.fc.weight": (8, 8, 1)},
    ),
    # As kyutai/pocket-tts has them, which comes without a config.json: what its tensors tell.
    *remote(
        "pocket_tts_published",
        "FlowLMModel",
        {
            **{key: DIMS[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")},
            **{
                "model_type": "pockettts",
                "vocab_size": VOCAB,
                "num_attention_heads": 1,
                "model_variant": "english_2026-04",
            },
            "audio_config": {"latent_dim": 8, "inner_dim": 8},
        },
        llama_cpp_cannot=_COMPUTED,
        wrapped=True,
        beside={"mimi.quantizer.output_proj.weight": (8, 8, 1)},
    ),
    ArchCase(
        "pocket_tts",
        "pocket_tts",
        "PocketTTSConfig",
        "PocketTTSModel",
        {
            "pad_token_id": 3,
            "latent_dim": 8,
            "layer_norm_eps": 1e-5,
            "flow_head_config": {"condition_dim": 64, "latent_dim": 8},
        },
        llama_cpp_cannot=_COMPUTED,
        kind="states",
    ),
)
