"""Towers of Gemma 4: a vision transformer and a conformer, or matrices over raw patches and samples. Data only."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, Scope, or_default, same
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import REQUIRED, Key, TensorRow, Tower
from aprfmt.arch.rows.parts import linear, norm, tensor
from aprfmt.arch.towers.parts import GELU, IMAGE, epsilon, hears, layers, projector, sees, sizes

_POOLED = 3
"""How many patches llama.cpp pools in each direction where a GGUF does not say it."""


def _unless_three(value: object, scope: Scope) -> object:
    return None if value == _POOLED else value


def _four_times(value: object, scope: Scope) -> object:
    width = as_int(value, scope.name)
    return 4 * width if width is not None else None


def _quarter(value: object, scope: Scope) -> object:
    ffn = as_int(value, scope.name)
    return ffn // 4 if ffn else DEFAULT


def _as_many_heads(value: object, scope: Scope) -> object:
    return or_default(scope.gguf("vision.attention.head_count"), scope)


unless_three = Converter(_unless_three, or_default)
four_times = Converter(_four_times, _quarter)
as_many_heads = Converter(same, _as_many_heads)


def has_tensor(name: str) -> Converter:
    """A switch that is on if the GGUF has the tensor `name`; the default where its tensors are unknown."""
    return Converter(same, lambda value, scope: name in scope.names if scope.names else DEFAULT)


_V = "model.vision_tower."
_A = "model.audio_tower."
_E = "model.vision_embedder."
_VISION = "vision_config.hidden_size"
_VISION_FFN = "vision_config.intermediate_size"
_AUDIO = "audio_config.hidden_size"
_MERGED = "patch_size*pooling_kernel_size*patch_size*pooling_kernel_size"
_WIDTH = "mm_embed_dim"
_COLOURS_FIRST = (f"swap:1,{_MERGED},3",)
_FREQUENCIES = 128
"""Bands of the spectrogram, which no config tells."""


def _clipped(hf: str, gguf: str, dims: str, part: str) -> tuple[TensorRow, ...]:
    """A matrix with the bounds of what goes in and comes out, where the config of the part asks for bounds."""
    bounds = ("input_min", "input_max", "output_min", "output_max")
    return (
        tensor(f"{hf}.linear.weight", f"{gguf}.weight", dims),
        *(tensor(f"{hf}.{name}", f"{gguf}.{name}", "", f"{part}.use_clipped_linears", ("1",)) for name in bounds),
    )


def _sees(name: str, gguf: str, dims: str) -> tuple[TensorRow, ...]:
    return _clipped(name, gguf, dims, "vision_config")


def _listens(name: str, gguf: str, dims: str) -> tuple[TensorRow, ...]:
    return _clipped(name, gguf, dims, "audio_config")


def _feed_forward(name: str, end: str) -> tuple[TensorRow, ...]:
    return (
        *norm(f"{name}.pre_layer_norm", f"ffn_norm{end}", _AUDIO),
        *_listens(f"{name}.ffw_layer_1", f"ffn_up{end}", f"4*{_AUDIO},{_AUDIO}"),
        *_listens(f"{name}.ffw_layer_2", f"ffn_down{end}", f"{_AUDIO},4*{_AUDIO}"),
        *norm(f"{name}.post_layer_norm", f"ffn_post_norm{end}", _AUDIO),
    )


_SEEING = (
    tensor(
        f"{_V}patch_embedder.input_proj.weight",
        "v.patch_embd.weight",
        f"{_VISION},patch_size*patch_size*3",
        gguf_dims=(f"{_VISION},3,patch_size,patch_size",),
        columns=("swap:1,patch_size*patch_size,3",),
    ),
    tensor(
        f"{_V}patch_embedder.position_embedding_table", "v.position_embd.weight", f"2,position_embedding_size,{_VISION}"
    ),
    *layers(
        *norm("input_layernorm", "ln1", _VISION),
        *_sees("self_attn.q_proj", "attn_q", f"{_VISION},{_VISION}"),
        *_sees("self_attn.k_proj", "attn_k", f"{_VISION},{_VISION}"),
        *_sees("self_attn.v_proj", "attn_v", f"{_VISION},{_VISION}"),
        *norm("self_attn.q_norm", "attn_q_norm", "vision_config.head_dim"),
        *norm("self_attn.k_norm", "attn_k_norm", "vision_config.head_dim"),
        *_sees("self_attn.o_proj", "attn_out", f"{_VISION},{_VISION}"),
        *norm("post_attention_layernorm", "attn_post_norm", _VISION),
        *norm("pre_feedforward_layernorm", "ln2", _VISION),
        *_sees("mlp.gate_proj", "ffn_gate", f"{_VISION_FFN},{_VISION}"),
        *_sees("mlp.up_proj", "ffn_up", f"{_VISION_FFN},{_VISION}"),
        *_sees("mlp.down_proj", "ffn_down", f"{_VISION},{_VISION_FFN}"),
        *norm("post_feedforward_layernorm", "ffn_post_norm", _VISION),
        hf=f"{_V}encoder.layers.{{n}}.",
        depth="vision_config.num_hidden_layers",
    ),
    tensor(f"{_V}std_bias", "v.std_bias", _VISION, "vision_config.standardize"),
    tensor(f"{_V}std_scale", "v.std_scale", _VISION, "vision_config.standardize"),
    tensor("model.embed_vision.embedding_projection.weight", "mm.input_projection.weight", f"hidden,{_VISION}"),
)

_HEARING = (
    tensor(f"{_A}subsample_conv_projection.layer0.conv.weight", "a.conv1d.0.weight", "128,1,3,3"),
    *norm(f"{_A}subsample_conv_projection.layer0.norm", "a.conv1d.0.norm", "128"),
    tensor(f"{_A}subsample_conv_projection.layer1.conv.weight", "a.conv1d.1.weight", "32,128,3,3"),
    *norm(f"{_A}subsample_conv_projection.layer1.norm", "a.conv1d.1.norm", "32"),
    *linear(f"{_A}subsample_conv_projection.input_proj_linear", "a.input_projection", f"{_AUDIO},32*{_FREQUENCIES}/4"),
    *layers(
        *_feed_forward("feed_forward1", ""),
        *norm("norm_pre_attn", "attn_pre_norm", _AUDIO),
        tensor(
            "self_attn.per_dim_scale",
            "per_dim_scale.weight",
            f"{_AUDIO}/audio_config.num_attention_heads",
            value="softplus",
        ),
        *_listens("self_attn.q_proj", "attn_q", f"{_AUDIO},{_AUDIO}"),
        *_listens("self_attn.k_proj", "attn_k", f"{_AUDIO},{_AUDIO}"),
        *_listens("self_attn.v_proj", "attn_v", f"{_AUDIO},{_AUDIO}"),
        *linear("self_attn.relative_k_proj", "attn_k_rel", f"{_AUDIO},{_AUDIO}"),
        *_listens("self_attn.post", "attn_out", f"{_AUDIO},{_AUDIO}"),
        *norm("norm_post_attn", "attn_post_norm", _AUDIO),
        # llama.cpp reads the two norms of the convolution under each other's names.
        *norm("lconv1d.pre_layer_norm", "conv_norm", _AUDIO),
        *_listens("lconv1d.linear_start", "conv_pw1", f"2*{_AUDIO},{_AUDIO}"),
        tensor(
            "lconv1d.depthwise_conv1d.weight",
            "conv_dw.weight",
            f"{_AUDIO},1,conv_kernel_size",
            gguf_dims=(f"{_AUDIO},conv_kernel_size",),
        ),
        *norm("lconv1d.conv_norm", "norm_conv", _AUDIO),
        *_listens("lconv1d.linear_end", "conv_pw2", f"{_AUDIO},{_AUDIO}"),
        *_feed_forward("feed_forward2", "_1"),
        *norm("norm_out", "ln2", _AUDIO),
        hf=f"{_A}layers.{{n}}.",
        gguf="a.blk.{n}.",
        depth="audio_config.num_hidden_layers",
    ),
    *linear(f"{_A}output_proj", "a.pre_encode.out", f"output_proj_dims,{_AUDIO}", REQUIRED),
    tensor("model.embed_audio.embedding_projection.weight", "mm.a.input_projection.weight", "hidden,output_proj_dims"),
)

_SEEN = sees(
    *sizes("vision", image_size=""),
    # Images keep their sizes; llama.cpp's loader insists on one.
    Key("vision.image_size", constant=224),
    *IMAGE,
    epsilon("vision", "vision_config.rms_norm_eps"),
    GELU,
    Key("vision.projector.scale_factor", ("vision_config.pooling_kernel_size",), converter=unless_three),
    Key("", ("vision_config.position_embedding_size",)),
    Key("", ("vision_config.head_dim",)),
    Key("", ("vision_config.num_key_value_heads",), converter=as_many_heads),
    Key("", ("vision_config.use_clipped_linears",), "bool", converter=has_tensor("v.blk.0.attn_q.input_min")),
    Key("", ("vision_config.standardize",), "bool", converter=has_tensor("v.std_bias")),
    projector("gemma4v", part="vision"),
)

_HEARD = hears(
    *sizes("audio", feed_forward_length=""),
    Key("audio.feed_forward_length", ("audio_config.hidden_size",), converter=four_times),
    Key("audio.num_mel_bins", constant=_FREQUENCIES),
    epsilon("audio", "audio_config.rms_norm_eps"),
    Key("", ("audio_config.conv_kernel_size",)),
    Key("", ("audio_config.output_proj_dims",)),
    Key("", ("audio_config.use_clipped_linears",), "bool", converter=has_tensor("a.blk.0.attn_q.input_min")),
    projector("gemma4a", part="audio"),
)

_COLOURS = {"preprocessor_config.image_mean": [0.0, 0.0, 0.0], "preprocessor_config.image_std": [1.0, 1.0, 1.0]}
_DEFAULTS = {
    **_COLOURS,
    "vision_config.hidden_size": 768,
    "vision_config.intermediate_size": 3072,
    "vision_config.num_hidden_layers": 16,
    "vision_config.num_attention_heads": 12,
    "vision_config.num_key_value_heads": 12,
    "vision_config.head_dim": 64,
    "vision_config.patch_size": 16,
    "vision_config.pooling_kernel_size": 3,
    "vision_config.position_embedding_size": 10240,
    "vision_config.rms_norm_eps": 1e-6,
    "vision_config.use_clipped_linears": False,
    "vision_config.standardize": False,
}

_VISION_ONLY = Tower(
    id="gemma4_vision",
    gguf="clip",
    hf_class="Gemma4ForConditionalGeneration",
    model_type="gemma4",
    hf_classes=("Gemma4ForConditionalGeneration",),
    model_types=("gemma4",),
    when="vision.projector_type=gemma4v&!audio.projector_type",
    text="model.language_model.",
    tensors=_SEEING,
    f32=(".position_embd.",),
    keys=_SEEN,
    defaults={"": _DEFAULTS},
)

TOWERS: tuple[Tower, ...] = (
    _VISION_ONLY,
    replace(
        _VISION_ONLY,
        id="gemma4_towers",
        hf_when="audio_config",
        when="vision.projector_type=gemma4v&audio.projector_type=gemma4a",
        tensors=(*_SEEING, *_HEARING),
        f32=(".position_embd.", "^a.conv1d.", "^a.input_projection.", ".conv_dw."),
        keys=(*_SEEN, *_HEARD),
        defaults={
            "": {
                **_DEFAULTS,
                "audio_config.hidden_size": 1024,
                "audio_config.num_hidden_layers": 12,
                "audio_config.num_attention_heads": 8,
                "audio_config.conv_kernel_size": 5,
                "audio_config.output_proj_dims": 1536,
                "audio_config.rms_norm_eps": 1e-6,
                "audio_config.use_clipped_linears": True,
            }
        },
    ),
    Tower(
        id="gemma4_unified_towers",
        gguf="clip",
        hf_class="Gemma4UnifiedForConditionalGeneration",
        model_type="gemma4_unified",
        hf_classes=("Gemma4UnifiedForConditionalGeneration",),
        model_types=("gemma4_unified",),
        when="vision.projector_type=gemma4uv",
        text="model.language_model.",
        tensors=(
            tensor(f"{_E}patch_ln1.weight", "v.patch_norm.1.weight", f"{_MERGED}*3", order=_COLOURS_FIRST),
            tensor(f"{_E}patch_ln1.bias", "v.patch_norm.1.bias", f"{_MERGED}*3", order=_COLOURS_FIRST),
            tensor(f"{_E}patch_dense.weight", "v.patch_embd.weight", f"{_WIDTH},{_MERGED}*3", columns=_COLOURS_FIRST),
            tensor(f"{_E}patch_dense.bias", "v.patch_embd.bias", _WIDTH),
            *norm(f"{_E}patch_ln2", "v.patch_norm.2", _WIDTH, REQUIRED),
            tensor(
                f"{_E}pos_embedding",
                "v.position_embd.weight",
                f"mm_posemb_size,2,{_WIDTH}",
                gguf_dims=(f"2,mm_posemb_size,{_WIDTH}",),
                order=("swap:1,mm_posemb_size,2",),
            ),
            *norm(f"{_E}pos_norm", "v.patch_norm.3", _WIDTH, REQUIRED),
            tensor(
                "model.embed_vision.embedding_projection.weight",
                "mm.input_projection.weight",
                "hidden,output_proj_dims",
            ),
            tensor(
                "model.embed_audio.embedding_projection.weight",
                "mm.a.input_projection.weight",
                "hidden,audio_embed_dim",
            ),
        ),
        f32=(".position_embd.",),
        keys=(
            *sees(
                Key("vision.image_size", constant=224),
                Key("vision.patch_size", ("vision_config.patch_size",)),
                Key("vision.embedding_length", ("vision_config.mm_embed_dim",)),
                # There are no layers, and llama.cpp's loader insists on their sizes.
                Key("vision.feed_forward_length", constant=0),
                Key("vision.block_count", constant=0),
                Key("vision.attention.head_count", constant=0),
                *IMAGE,
                epsilon("vision", "vision_config.rms_norm_eps"),
                Key("vision.projector.scale_factor", ("vision_config.pooling_kernel_size",), converter=unless_three),
                Key("", ("vision_config.mm_posemb_size",)),
                Key("", ("vision_config.output_proj_dims",)),
                projector("gemma4uv", part="vision"),
            ),
            *hears(
                Key("audio.embedding_length", ("audio_config.audio_embed_dim",)),
                Key("audio.feed_forward_length", constant=0),
                Key("audio.block_count", constant=0),
                Key("audio.attention.head_count", constant=0),
                Key("audio.num_mel_bins", constant=_FREQUENCIES),
                epsilon("audio", "audio_config.rms_norm_eps"),
                projector("gemma4ua", part="audio"),
            ),
        ),
        defaults={
            "": {
                **_COLOURS,
                "vision_config.patch_size": 16,
                "vision_config.pooling_kernel_size": 3,
                "vision_config.mm_embed_dim": 3840,
                "vision_config.mm_posemb_size": 1120,
                "vision_config.output_proj_dims": 3840,
                "vision_config.rms_norm_eps": 1e-6,
                "audio_config.audio_embed_dim": 640,
                "audio_config.rms_norm_eps": 1e-6,
            }
        },
    ),
)
