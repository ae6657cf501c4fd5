"""Towers of Whisper's kind: a spectrogram through two convolutions and a plain transformer. Data only."""

from __future__ import annotations

from aprfmt.arch.row import REQUIRED, Key, TensorRow, Tower
from aprfmt.arch.rows.parts import linear, norm, tensor
from aprfmt.arch.towers.parts import attention, epsilon, hears, layers, mlp, norms, projector, sizes

_MM = "multi_modal_projector."
_PREFIXES = (("model.audio_tower.", "audio_tower."), (f"model.{_MM}", _MM))
CONVOLUTIONS = (".conv1d.1.weight", ".conv1d.2.weight")


def whisper(
    hf: str,
    width: str,
    ffn: str,
    depth: str,
    *,
    positions: bool = True,
    last: str = "layer_norm",
    mel: str = "num_mel_bins",
) -> tuple[TensorRow, ...]:
    """The encoder; `positions` tells whether a checkpoint holds them, though they follow from a formula."""
    table = tensor(f"{hf}embed_positions.weight", "a.position_embd.weight", f"max_source_positions,{width}")

    def convolution(n: int, n_in: str) -> tuple[TensorRow, ...]:
        return (
            tensor(f"{hf}conv{n}.weight", f"a.conv1d.{n}.weight", f"{width},{n_in},3"),
            tensor(f"{hf}conv{n}.bias", f"a.conv1d.{n}.bias", width, gguf_dims=(f"{width},1",)),
        )

    return (
        *convolution(1, mel),
        *convolution(2, width),
        *((table,) if positions else ()),
        *layers(
            *norms("self_attn_layer_norm", "final_layer_norm", width=width),
            *attention(k_bias=False, width=width),
            *mlp("fc1", "fc2", width=width, ffn=ffn),
            hf=f"{hf}layers.{{n}}.",
            gguf="a.blk.{n}.",
            depth=depth,
        ),
        *norm(f"{hf}{last}", "a.post_ln", width, REQUIRED),
    )


_D_MODEL = ("d_model", "encoder_ffn_dim", "encoder_layers")
_OWN = ("hidden_size", "intermediate_size", "num_hidden_layers")
MEL = Key("audio.num_mel_bins", ("audio_config.num_mel_bins",))
EPS = epsilon("audio", "audio_config.layer_norm_eps")
POSITIONS = Key("", ("audio_config.max_source_positions",))
_SIZES = sizes(
    "audio",
    embedding_length="d_model",
    feed_forward_length="encoder_ffn_dim",
    block_count="encoder_layers",
    head_count="encoder_attention_heads",
)
DEFAULTS = {
    "audio_config.d_model": 1280,
    "audio_config.encoder_ffn_dim": 5120,
    "audio_config.encoder_layers": 32,
    "audio_config.encoder_attention_heads": 20,
    "audio_config.num_mel_bins": 128,
    "audio_config.max_source_positions": 1500,
    "audio_config.layer_norm_eps": 1e-5,
}

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="qwen2_audio_tower",
        gguf="clip",
        hf_class="Qwen2AudioForConditionalGeneration",
        model_type="qwen2_audio",
        hf_classes=("Qwen2AudioForConditionalGeneration",),
        model_types=("qwen2_audio",),
        when="projector_type=qwen2a",
        prefixes=_PREFIXES,
        tensors=(*whisper("audio_tower.", *_D_MODEL), *linear(f"{_MM}linear", "mm.a.fc", "hidden,d_model", REQUIRED)),
        f32=(".position_embd.",),
        f16=CONVOLUTIONS,
        keys=hears(*_SIZES, projector("qwen2a"), MEL, EPS, POSITIONS),
        defaults={"": DEFAULTS},
        config={"audio_config.model_type": "qwen2_audio_encoder"},
    ),
    Tower(
        id="voxtral_tower",
        gguf="clip",
        hf_class="VoxtralForConditionalGeneration",
        model_type="voxtral",
        hf_classes=("VoxtralForConditionalGeneration",),
        model_types=("voxtral",),
        when="projector_type=voxtral",
        prefixes=_PREFIXES,
        tensors=(
            *whisper("audio_tower.", *_OWN),
            *linear(f"{_MM}linear_1", "mm.a.mlp.1", "hidden,4*hidden_size"),
            *linear(f"{_MM}linear_2", "mm.a.mlp.2", "hidden,hidden"),
        ),
        f32=(".position_embd.",),
        f16=CONVOLUTIONS,
        keys=hears(
            *sizes("audio"), projector("voxtral"), MEL, EPS, Key("audio.projector.stack_factor", constant=4), POSITIONS
        ),
        defaults={
            "": {
                "audio_config.hidden_size": 1280,
                "audio_config.intermediate_size": 5120,
                "audio_config.num_hidden_layers": 32,
                "audio_config.num_attention_heads": 20,
                "audio_config.num_mel_bins": 128,
                "audio_config.max_source_positions": 1500,
                "audio_config.layer_norm_eps": 1e-5,
            }
        },
        config={"audio_config.model_type": "voxtral_encoder"},
    ),
)
