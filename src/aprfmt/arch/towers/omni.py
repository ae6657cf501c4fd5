"""Towers of Qwen's omni models, which see and hear. Data only."""

from __future__ import annotations

from aprfmt.arch.converters.towers import window_pattern
from aprfmt.arch.row import REQUIRED, Key, Tower
from aprfmt.arch.rows.parts import linear, norm
from aprfmt.arch.towers.parts import (
    IMAGE,
    SILU,
    WIDTH,
    attention,
    hears,
    layers,
    mlp,
    norms,
    patches_in_time,
    projector,
    sees,
    sizes,
)
from aprfmt.arch.towers.whisper import whisper

_V = "thinker.visual."
_A = "thinker.audio_tower."
_VISION = "thinker_config.vision_config"
_AUDIO = "thinker_config.audio_config"
_SQUARE = f"4*{WIDTH}"

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="qwen2_5_omni_towers",
        gguf="clip",
        hf_class="Qwen2_5OmniModel",
        model_type="qwen2_5_omni",
        hf_classes=("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"),
        model_types=("qwen2_5_omni",),
        inside=("thinker_config", "qwen2_5_omni_thinker"),
        when="projector_type=qwen2.5o",
        text="thinker.",
        prefixes=(("visual.", _V), ("audio_tower.", _A)),
        tensors=(
            *patches_in_time(f"{_V}patch_embed.proj"),
            *layers(
                *norms("norm1", "norm2", bias=False),
                *attention("attn", names=("q", "k", "v", "proj")),
                *mlp("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"),
                hf=f"{_V}blocks.{{n}}.",
                depth="depth",
            ),
            *norm(f"{_V}merger.ln_q", "v.post_ln", WIDTH),
            *linear(f"{_V}merger.mlp.0", "mm.0", f"{_SQUARE},{_SQUARE}", REQUIRED),
            *linear(f"{_V}merger.mlp.2", "mm.2", f"hidden,{_SQUARE}", REQUIRED),
            *whisper(_A, "d_model", "encoder_ffn_dim", "encoder_layers", positions=False, last="ln_post"),
            *linear(f"{_A}proj", "mm.a.fc", "hidden,d_model", REQUIRED),
        ),
        made={"a.position_embd.weight": "sinusoids:1500,d_model"},
        ignored=("audio_bos_eos_token.weight",),
        f32=(".position_embd.",),
        f16=(".conv1d.1.weight", ".conv1d.2.weight"),
        keys=(
            *sees(
                *sizes("vision", _VISION, block_count="depth", head_count="num_heads"),
                *IMAGE,
                projector("qwen2.5o"),
                SILU,
                Key("vision.n_wa_pattern", (f"{_VISION}.fullatt_block_indexes",), converter=window_pattern),
                Key("vision.attention.layer_norm_epsilon", ("rms_norm_eps",), "f32"),
            ),
            *hears(
                *sizes(
                    "audio",
                    _AUDIO,
                    embedding_length="d_model",
                    feed_forward_length="encoder_ffn_dim",
                    block_count="encoder_layers",
                    head_count="encoder_attention_heads",
                ),
                Key("audio.num_mel_bins", (f"{_AUDIO}.num_mel_bins",)),
                Key("audio.attention.layer_norm_epsilon", (f"{_AUDIO}.layer_norm_eps",), "f32"),
            ),
        ),
        defaults={
            "": {
                f"{_VISION}.image_size": 560,
                f"{_VISION}.depth": 32,
                f"{_VISION}.hidden_size": 1280,
                f"{_VISION}.intermediate_size": 3420,
                f"{_VISION}.num_heads": 16,
                f"{_VISION}.patch_size": 14,
                f"{_VISION}.fullatt_block_indexes": [7, 15, 23, 31],
                f"{_AUDIO}.d_model": 1280,
                f"{_AUDIO}.encoder_ffn_dim": 5120,
                f"{_AUDIO}.encoder_layers": 32,
                f"{_AUDIO}.encoder_attention_heads": 20,
                f"{_AUDIO}.num_mel_bins": 128,
                f"{_AUDIO}.layer_norm_eps": 1e-5,
                "rms_norm_eps": 1e-6,
                "preprocessor_config.image_mean": [0.48145466, 0.4578275, 0.40821073],
                "preprocessor_config.image_std": [0.26862954, 0.26130258, 0.27577711],
            }
        },
    ),
)
