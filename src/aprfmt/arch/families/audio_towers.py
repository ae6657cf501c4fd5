"""Whisper towers of language models from several families."""

from __future__ import annotations

from aprfmt.arch.blocks.decoder import linear, norm
from aprfmt.arch.blocks.hearing import CONVOLUTIONS, D_MODEL, HEARING_EPS, MEL, POSITIONS, keys_in, own_sizes, whisper
from aprfmt.arch.blocks.tower import hears, projector, whole
from aprfmt.arch.row import OPTIONAL, REQUIRED, Key, Tower


_MM = "multi_modal_projector."
_OWN = ("hidden_size", "intermediate_size", "num_hidden_layers")

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="audioflamingo3_tower", **whole("AudioFlamingo3ForConditionalGeneration", types=("audioflamingo3",)),
        when="projector_type=musicflamingo", prefixes=(("model.audio_tower.", "audio_tower."), (f"model.{_MM}", _MM)),
        tensors=(
            *whisper("audio_tower.", *_OWN), *linear(f"{_MM}linear_1", "mm.a.mlp.1", "hidden,hidden_size", OPTIONAL),
            *linear(f"{_MM}linear_2", "mm.a.mlp.2", "hidden,hidden", OPTIONAL),
        ),
        f32=(".position_embd.", *CONVOLUTIONS),
        keys=hears(*own_sizes("audio_config", own=True), projector("musicflamingo"), MEL, HEARING_EPS, POSITIONS),
        config={"audio_config.model_type": "audioflamingo3_encoder"},
    ),
    Tower(
        id="ultravox_tower", **whole("UltravoxModel", types=("ultravox",)), when="projector_type=ultravox",
        tensors=(
            *whisper("audio_tower.", *D_MODEL), *norm(f"{_MM}ln_pre", "mm.a.norm_pre", "stack_factor*d_model"),
            *linear(f"{_MM}linear_1", "mm.a.mlp.1", "hidden_size,stack_factor*d_model"),
            *norm(f"{_MM}ln_mid", "mm.a.norm_mid", "hidden_size/2"),
            *linear(f"{_MM}linear_2", "mm.a.mlp.2", "hidden,hidden_size/2"),
        ),
        f32=(".position_embd.",), f16=CONVOLUTIONS,
        keys=hears(
            *own_sizes("audio_config"), projector("ultravox"), MEL, HEARING_EPS,
            Key("audio.projector.stack_factor", ("stack_factor",)), Key("", ("hidden_size",)), POSITIONS,
        ),
        config={"audio_config.model_type": "whisper"},
    ),
    Tower(
        id="meralion2_tower", **whole("MERaLiON2ForConditionalGeneration", types=("meralion2",)),
        when="projector_type=meralion", text="text_decoder.",
        tensors=(
            *whisper("speech_encoder.", *D_MODEL), *norm("ln_speech", "mm.a.norm_pre", "d_model", REQUIRED),
            *(
                row
                for n, name, dims in (
                    (0, "mlp_adapter.0", "speech_mlp_scale_factor*d_model,speech_mlp_scale_factor*d_model"),
                    (1, "gate_proj", "4*d_model,speech_mlp_scale_factor*d_model"),
                    (2, "pool_proj", "4*d_model,speech_mlp_scale_factor*d_model"), (3, "out_proj", "hidden,4*d_model"),
                )
                for row in linear(f"speech_audio_adapter.{name}", f"mm.a.mlp.{n}", dims, OPTIONAL)
            ),
        ),
        f32=(".position_embd.",), f16=CONVOLUTIONS,
        keys=hears(
            *own_sizes("speech_config"), projector("meralion"), *keys_in("speech_config", MEL, HEARING_EPS),
            Key("audio.projector.stack_factor", ("speech_mlp_scale_factor",)), *keys_in("speech_config", POSITIONS),
        ),
        config={"speech_config.model_type": "whisper"},
    ),
)
