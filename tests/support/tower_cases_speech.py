"""Cases of codecs: what hears a voice and makes sound, beside a network that speaks."""

from __future__ import annotations

import arch_cases_remote_audio
from tower_cases_moon import at_size
from tower_models import VOCAB, TowerCase

_TALKER = next(case for case in arch_cases_remote_audio.CASES if case.id == "qwen3_tts_talker")

CASES = (
    TowerCase(
        "qwen3_tts_codec",
        "Qwen3TTSForConditionalGeneration",
        {
            **_TALKER.config,
            "talker_config": {
                **at_size(_TALKER.config["talker_config"]),
                "code_predictor_config": {
                    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
                    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 24, "rms_norm_eps": 1e-6},
                    **{"num_code_groups": 16, "rope_theta": 1000000, "model_type": "qwen3_tts_talker_code_predictor"},
                },
            },
            "speaker_encoder_config": {
                **{"enc_dim": 64, "sample_rate": 24000, "enc_channels": [32, 32, 32, 32, 96]},
                **{"enc_se_channels": 16, "enc_attention_channels": 12},
            },
        },
        preprocessor={},
        rounds=r"snake\.|\.act[12]\.",
        text_cannot="its GGUF holds the embedding behind a projection",
        files={
            "speech_tokenizer/config.json": {
                "model_type": "qwen3_tts_tokenizer_12hz",
                "decoder_config": {
                    **{"codebook_size": 24, "codebook_dim": 16, "hidden_size": 32, "latent_dim": 48, "head_dim": 2},
                    **{"intermediate_size": 40, "num_hidden_layers": 8, "num_attention_heads": 16},
                    **{"num_key_value_heads": 16, "num_quantizers": 16, "decoder_dim": 32, "rms_norm_eps": 1e-5},
                    **{"upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2], "sliding_window": 72},
                },
            }
        },
        extra={
            **{f"speaker_encoder.{name}.bias": (96,) for name in ("mfa.conv", "asp.conv")},
            "speaker_encoder.mfa.conv.weight": (96, 96, 1),
            "speaker_encoder.asp.tdnn.conv.weight": (12, 288, 1),
            "speaker_encoder.asp.conv.weight": (96, 12, 1),
            "speaker_encoder.fc.weight": (64, 192, 1),
            **{
                f"speech_tokenizer.decoder.decoder.{i + 1}.block.1.conv.weight": (32 >> i, 16 >> i, 2 * rate)
                for i, rate in enumerate((8, 5, 4, 3))
            },
            "speech_tokenizer.encoder.layers.0.conv.weight": (8, 1, 7),
        },
    ),
    TowerCase(
        "pocket_tts_codec",
        "FlowLMModel",
        {
            **{"model_type": "pockettts", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96},
            **{"num_hidden_layers": 2, "num_attention_heads": 1, "model_variant": "saved"},
            "audio_config": {
                **{"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 1},
                **{"latent_dim": 8, "flow_dim": 24, "flow_depth": 2, "flow_frequencies": 16},
                **{"inner_dim": 8, "outer_dim": 64, "n_filters": 4},
            },
        },
        preprocessor={},
        no_config=True,
        extra={"flow_lm.bos_before_voice": (1, 1, 64)},
        text_cannot="its GGUF holds the embedding behind a projection",
    ),
)
