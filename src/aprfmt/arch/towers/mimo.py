"""Towers of MiMo: one that sees through windows of rows and columns, and one that hears in codes. Data only."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope
from aprfmt.arch.converters.towers import book_sizes
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import OPTIONAL, REQUIRED, Key, TensorRow, Tower
from aprfmt.arch.rows.parts import linear, norm, tensor
from aprfmt.arch.towers.parts import (
    IMAGE,
    SILU,
    WIDTH,
    hears,
    layers,
    mlp,
    norms,
    patches_in_time,
    preprocessor,
    projector,
    sees,
    sizes,
)
from aprfmt.arch.towers.whisper import whisper
from aprfmt.errors import RefusedError

_WHOLE, _WINDOW = -1, 0
"""How a GGUF marks layers that attend to all of a sound, and those that attend to what is near."""


def _numbers(value: object, scope: Scope) -> list[int]:
    """A list of numbers. Raises RefusedError for anything else."""
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise RefusedError(f"{scope.name} is {value!r:.40}, not a list of whole numbers")
    return list(value)


def _beside(scope: Scope, name: str) -> str:
    return f"{scope.name.rpartition('.')[0]}.{name}"


def _book_sizes_to(value: object, scope: Scope) -> object:
    return book_sizes(value, scope.size(_beside(scope, "num_quantizers")) or 0)


def _whole_to(value: object, scope: Scope) -> object:
    """Every so many layers the last attends to all of the sound."""
    step, depth = as_int(value, scope.name) or 1, scope.size(_beside(scope, "encoder_layers")) or 0
    return [_WHOLE if layer % step == step - 1 else _WINDOW for layer in range(depth)]


def _whole_from(value: object, scope: Scope) -> object:
    marks = _numbers(value, scope)
    step = marks.index(_WHOLE) + 1 if _WHOLE in marks else len(marks) + 1
    if [_WHOLE if layer % step == step - 1 else _WINDOW for layer in range(len(marks))] != marks:
        raise RefusedError(
            f"{scope.row.gguf}.{scope.key.gguf} is {marks!r:.60}: layers that attend to all at unequal distances",
            hint="no config.json of the family can say that; check the program that wrote the GGUF",
        )
    return ConfigKeys({scope.name: step, _beside(scope, "hybrid_attention"): True})


def _behind_to(value: object, scope: Scope) -> object:
    sides = _numbers(value, scope)
    if len(sides) != 2 or sides[0] <= 0 or sides[1] != 0:
        raise RefusedError(
            f"{scope.name} is {value!r:.40}; llama.cpp's network looks back alone, [number, 0]",
            hint="an .apr or a folder can hold the model: -o NAME.apr, or -o NAME --format hf",
        )
    return sides[0]


def _behind_from(value: object, scope: Scope) -> object:
    side = as_int(value, scope.name)
    return [side, 0] if side is not None else DEFAULT


_CODE_BOOKS = "audio_tokenizer.num_quantizers"


def _channels(value: object, scope: Scope) -> object:
    channels, books = as_int(value, scope.name), scope.size(_CODE_BOOKS)
    if channels is not None and books is not None and channels != books:
        raise RefusedError(
            f"{scope.name} is {channels}, and audio_tokenizer/config.json has {books} codebooks",
            hint="the files belong to different models; fetch the repository again",
        )
    return DEFAULT if channels is None else channels


codebook_sizes = Converter(_book_sizes_to)
whole_after_windows = Converter(_whole_to, _whole_from)
channels_of_books = Converter(normalize=_channels, derive=lambda scope: scope.size(_CODE_BOOKS))
behind_only = Converter(_behind_to, _behind_from)

_V = "visual."
_T = "audio_tokenizer.encoder."
_L = "audio_encoder.input_local_transformer."
_VISION, _AUDIO, _TOKENIZER = "vision_config", "audio_config", "audio_tokenizer"
_Q, _KV = (f"{name}*qk_channels" for name in ("num_heads", "num_key_value_heads"))
_SQUARE = f"4*{WIDTH}"
_BOOKS = f"{_T}quantizer.vq.layers"
_FFN = "input_local_intermediate_size"
_FIXED: dict[str, object] = {
    f"{_TOKENIZER}.encoder_skip_layer_id": 3,
    f"{_TOKENIZER}.rope_theta": 10000,
    f"{_TOKENIZER}.stride_size": 2,
    f"{_TOKENIZER}.avg_pooler": 2,
    f"{_TOKENIZER}.encoder_causal": True,
    f"{_TOKENIZER}.scale_embedding": False,
    f"{_AUDIO}.rope_theta": 640000,
    f"{_AUDIO}.partial_rotary_factor": 1,
    f"{_AUDIO}.input_full_attention": True,
    f"{_AUDIO}.add_post_norm": True,
    f"{_AUDIO}.projection_layers": 2,
}
"""What llama.cpp's network takes for granted, as no key tells it."""


def _local() -> tuple[TensorRow, ...]:
    """The small transformer over a group of steps, whose heads llama.cpp counts as the tokenizer's."""
    return (
        *layers(
            *norm("input_layernorm", "ln1", "d_model"),
            *(
                row
                for letter in "qkv"
                for row in linear(f"self_attn.{letter}_proj", f"attn_{letter}", "d_model,d_model", REQUIRED)
            ),
            *linear("self_attn.o_proj", "attn_out", "d_model,d_model"),
            *norm("post_attention_layernorm", "ln2", "d_model"),
            *mlp("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj", bias=False, width="d_model", ffn=_FFN),
            hf=f"{_L}layers.{{n}}.",
            gguf="mm.a.local_blk.{n}.",
            depth="input_local_layers",
        ),
        *norm(f"{_L}norm", "mm.a.local_norm", "d_model"),
        *linear("audio_encoder.projection.mlp.0", "mm.a.mlp.1", "any_wide,group_size*d_model"),
        *linear("audio_encoder.projection.mlp.2", "mm.a.mlp.2", "hidden,any_wide"),
    )


TOWERS: tuple[Tower, ...] = (
    Tower(
        id="mimo_v2_towers",
        gguf="clip",
        hf_class="MiMoV2ForCausalLM",
        model_type="mimo_v2",
        hf_classes=("MiMoV2ForCausalLM",),
        model_types=("mimo_v2",),
        when="vision.projector_type=mimovl",
        text="",
        tensors=(
            *patches_in_time(f"{_V}patch_embed.proj"),
            *layers(
                *norms("norm1", "norm2", bias=False),
                *linear("attn.qkv", "attn_qkv", f"{_Q}+2*{_KV},{WIDTH}", REQUIRED),
                *linear("attn.proj", "attn_out", f"{WIDTH},{_Q}", REQUIRED),
                tensor("attn.sinks", "attn_sinks", "num_heads", OPTIONAL, layers="windowed"),
                *mlp("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"),
                hf=f"{_V}blocks.{{n}}.",
                depth="depth",
            ),
            *norm(f"{_V}merger.ln_q", "v.post_ln", WIDTH, OPTIONAL),
            *linear(f"{_V}merger.mlp.0", "mm.0", f"{_SQUARE},{_SQUARE}", OPTIONAL),
            *linear(f"{_V}merger.mlp.2", "mm.2", f"hidden,{_SQUARE}", OPTIONAL),
            *whisper(_T, "d_model", "encoder_ffn_dim", "encoder_layers", positions=False, mel="n_mels"),
            tensor(f"{_T}down_sample_layer.0.weight", "a.downsample.conv.weight", "d_model,d_model,avg_pooler"),
            *norm(f"{_T}down_sample_norm", "a.downsample.norm", "d_model", REQUIRED),
            *layers(
                TensorRow(("_codebook.embed",), (), ("any_entries,d_model",)),
                hf=f"{_BOOKS}.{{n}}.",
                depth="num_quantizers",
            ),
            TensorRow(
                ("speech_embeddings.{e}.weight",),
                ("mm.a.code_embd.weight",),
                ("any_codes,d_model",),
                count="num_quantizers",
            ),
            *_local(),
        ),
        made={"a.rvq.codebook.weight": f"padded_books:{_BOOKS},num_quantizers,{_TOKENIZER}.codebook_size"},
        ignored=("_codebook.cluster_size", "_codebook.embed_avg", "_codebook.inited"),
        f32=("^a.conv1d.", "^a.downsample.conv.", "^a.rvq.codebook.", "^mm.a.code_embd."),
        keys=(
            *sees(
                *sizes("vision", block_count="depth", head_count="num_heads"),
                *IMAGE,
                projector("mimovl", part="vision"),
                SILU,
                Key("vision.attention.head_count_kv", (f"{_VISION}.num_key_value_heads",)),
                Key("vision.spatial_merge_size", (f"{_VISION}.spatial_merge_size",), allowed=(2,)),
                Key("vision.window_size", (f"{_VISION}.visual_token_window_size",)),
                Key("vision.wa_pattern_mode", (f"{_VISION}.vit_window_attn_types",), "i32[]"),
                Key("vision.attention.layer_norm_epsilon", (f"{_VISION}.rms_norm_eps",), "f32"),
                preprocessor("vision.image_min_pixels", "min_pixels"),
                preprocessor("vision.image_max_pixels", "max_pixels"),
                Key("", (f"{_VISION}.qk_channels",)),
            ),
            *hears(
                *sizes(
                    "audio",
                    _TOKENIZER,
                    embedding_length="d_model",
                    feed_forward_length="encoder_ffn_dim",
                    block_count="encoder_layers",
                    head_count="encoder_attention_heads",
                ),
                projector("mimo_audio", part="audio"),
                Key("audio.num_mel_bins", (f"{_TOKENIZER}.n_mels",)),
                Key("audio.attention.layer_norm_epsilon", (f"{_TOKENIZER}.layer_norm_eps",), "f32"),
                Key("audio.rvq.num_quantizers", (f"{_TOKENIZER}.num_quantizers",)),
                Key("audio.rvq.codebook_size", (f"{_TOKENIZER}.codebook_size",), "i32[]", converter=codebook_sizes),
                Key("", (f"{_TOKENIZER}.hybrid_attention",), "bool", allowed=(True,)),
                Key("audio.wa_pattern_mode", (f"{_TOKENIZER}.swa_per_block",), "i32[]", converter=whole_after_windows),
                Key("audio.window_size", (f"{_TOKENIZER}.encoder_attn_window_size",), converter=behind_only),
                Key("audio.local_block_count", (f"{_AUDIO}.input_local_layers",)),
                Key("audio.local_group_size", (f"{_AUDIO}.group_size",)),
                Key("", (f"{_AUDIO}.audio_channels",), converter=channels_of_books),
                Key("", (f"{_AUDIO}.{_FFN}",)),
                *(Key("", (path,), allowed=(value,)) for path, value in _FIXED.items()),
            ),
        ),
        files={_TOKENIZER: "audio_tokenizer/config.json"},
        defaults={
            "": {
                f"{_VISION}.image_size": 560,
                f"{_VISION}.rms_norm_eps": 1e-6,
                f"{_VISION}.qk_channels": 64,
                f"{_TOKENIZER}.layer_norm_eps": 1e-5,
                f"{_TOKENIZER}.hybrid_attention": True,
                **_FIXED,
            }
        },
    ),
)
