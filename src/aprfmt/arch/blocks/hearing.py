"""Building blocks of rows: Whisper's encoder and its projectors."""

from __future__ import annotations

from aprfmt.arch.blocks.decoder import norm, tensor
from aprfmt.arch.blocks.tower import epsilon, layers, mlp, norms, sizes, tower_attention
from aprfmt.arch.row import REQUIRED, Key, TensorRow


D_MODEL = ("d_model", "encoder_ffn_dim", "encoder_layers")


def own_sizes(config: str, *, own: bool = False) -> tuple[Key, ...]:
    """Sizes of the encoder in the object `config`, under Whisper's names or the usual ones of transformers."""
    if own:
        return sizes("audio", config)
    return sizes(
        "audio", config, embedding_length="d_model", feed_forward_length="encoder_ffn_dim",
        block_count="encoder_layers", head_count="encoder_attention_heads",
    )


def keys_in(config: str, *keys: Key) -> tuple[Key, ...]:
    """Keys of audio_config as keys of another object."""
    return tuple(
        Key(key.gguf, tuple(f"{config}.{path.partition('.')[2]}" for path in key.hf), key.kind, converter=key.converter)
        for key in keys
    )


DEFAULTS = {
    "audio_config.d_model": 1280, "audio_config.encoder_ffn_dim": 5120, "audio_config.encoder_layers": 32,
    "audio_config.encoder_attention_heads": 20, "audio_config.num_mel_bins": 128,
    "audio_config.max_source_positions": 1500, "audio_config.layer_norm_eps": 1e-5,
}


def defaults(config: str) -> dict[str, object]:
    """Whisper's defaults, in the object `config` of a config.json."""
    return {f"{config}.{path.partition('.')[2]}": value for path, value in DEFAULTS.items()}


_AUDIO = "thinker_config.audio_config"
MEL = Key("audio.num_mel_bins", ("audio_config.num_mel_bins",))
HEARING_EPS = epsilon("audio", "audio_config.layer_norm_eps")
QWEN3_KEYS = (*own_sizes(_AUDIO), *keys_in(_AUDIO, MEL, HEARING_EPS, Key("", ("audio_config.downsample_hidden_size",))))
MM = "multi_modal_projector."
PREFIXES = (("model.audio_tower.", "audio_tower."), (f"model.{MM}", MM))
CONVOLUTIONS = (".conv1d.1.weight", ".conv1d.2.weight")


def whisper(
    hf: str, width: str, ffn: str, depth: str,
    *, positions: bool = True, last: str = "layer_norm", mel: str = "num_mel_bins",
) -> tuple[TensorRow, ...]:
    """The encoder; `positions` tells whether a checkpoint stores them, although a formula yields them."""
    table = tensor(f"{hf}embed_positions.weight", "a.position_embd.weight", f"max_source_positions,{width}")

    def convolution(n: int, n_in: str) -> tuple[TensorRow, ...]:
        return (
            tensor(f"{hf}conv{n}.weight", f"a.conv1d.{n}.weight", f"{width},{n_in},3"),
            tensor(f"{hf}conv{n}.bias", f"a.conv1d.{n}.bias", width, gguf_dims=(f"{width},1",)),
        )

    return (
        *convolution(1, mel), *convolution(2, width), *((table,) if positions else ()),
        *layers(
            *norms("self_attn_layer_norm", "final_layer_norm", width=width),
            *tower_attention(k_bias=False, width=width), *mlp("fc1", "fc2", width=width, ffn=ffn),
            hf=f"{hf}layers.{{n}}.", gguf="a.blk.{n}.", depth=depth,
        ),
        *norm(f"{hf}{last}", "a.post_ln", width, REQUIRED),
    )


def convolutions_2d(hf: str, *, columns: bool = False) -> tuple[TensorRow, ...]:
    """Three convolutions over time and frequency; `columns` if a GGUF has their biases as columns."""
    many = "downsample_hidden_size"
    return tuple(
        row
        for n, n_in in ((1, "1"), (2, many), (3, many))
        for row in (
            tensor(f"{hf}conv2d{n}.weight", f"a.conv2d.{n}.weight", f"{many},{n_in},3,3"),
            tensor(f"{hf}conv2d{n}.bias", f"a.conv2d.{n}.bias", many, gguf_dims=(f"{many},1,1",) if columns else ()),
        )
    )


def batch_norm(hf: str, width: str, depth: str) -> tuple[TensorRow, ...]:
    """The batch norm of a conformer's convolution, of which a GGUF has scale and shift."""
    names = ("weight", "bias", "running_mean", "running_var")
    return tuple(TensorRow((f"{hf}.{name}",), (), (width,), depth=depth) for name in names)


def scale_and_shift(hf: str) -> dict[str, str]:
    """The scale and shift of batch norms, as Tower.made."""
    return {"a.blk.{n}.conv_norm.weight": f"batch_scale:{hf}", "a.blk.{n}.conv_norm.bias": f"batch_shift:{hf}"}


POSITIONS = Key("", ("audio_config.max_source_positions",))
