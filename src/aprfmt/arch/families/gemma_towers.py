"""Towers of Gemma 3n and Gemma 4."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from aprfmt.arch.blocks.decoder import linear, norm, tensor
from aprfmt.arch.blocks.tower import IMAGE, USE_GELU, epsilon, hears, layers, projector, sees, sizes, whole
from aprfmt.arch.converter import DEFAULT, Converter, Scope, or_default, same
from aprfmt.arch.converters.common import by_tensor, integer
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import REQUIRED, Key, TensorRow, Tower
from aprfmt.errors import RefusedError


_HEIGHT = "preprocessor_config.size.height"


def _by_tokens_to_gguf(value: object, scope: Scope) -> object:
    """llama.cpp encodes the number of image tokens as the height."""
    tokens, height = as_int(value, scope.name), scope.size(_HEIGHT)
    if not tokens or not height or height % tokens:
        raise RefusedError(
            f"{scope.name} is {value!r:.20}, which does not divide the image height {height!r:.20}",
            hint="check preprocessor_config.json; published models have 256 of 768",
        )
    return height // tokens


def _by_tokens_from_gguf(value: object, scope: Scope) -> object:
    patch, height = as_int(value, scope.name), scope.gguf("vision.image_size")
    return height // patch if patch and isinstance(height, int) else DEFAULT


height_by_tokens = Converter(_by_tokens_to_gguf, _by_tokens_from_gguf)
_T = "model.vision_tower.timm_model."
_A = "model.audio_tower."
_SEEN, _HEARD = "vision_config.hidden_size", "audio_config.hidden_size"
STAGES: tuple[tuple[str, ...], ...] = (
    ("edge",) * 3, ("inverted 3 5", "inverted 5 0", "inverted 3 0", "inverted 5 0", "inverted 3 0"),
    ("inverted 5 5", *("inverted 5 0",) * 7, "inverted 0 0", *("attention 3", "inverted 0 0") * 14),
    ("inverted 5 5", *("attention 0", "inverted 0 0") * 19),
)
"""Block types of each stage: edge residuals; inverted residuals, with the kernel sizes of the convolutions before and
between their two matrices, 0 without; attention, with the kernel size that downsamples its keys and values.
"""


def _convolution(name: str, dims: str, norm_of: str = "bn") -> tuple[TensorRow, ...]:
    """A convolution and its norm, under the same names on both sides."""
    return (
        tensor(f"{_T}blocks.{name}.conv.weight", f"v.blk.{name}.conv.weight", dims),
        tensor(f"{_T}blocks.{name}.{norm_of}.weight", f"v.blk.{name}.{norm_of}.weight", dims.partition(",")[0]),
    )


def _scale(block: str) -> TensorRow:
    """The layer scale of a block."""
    name = f"{block}.layer_scale.gamma"
    return tensor(f"{_T}blocks.{name}", f"v.blk.{name}", "any_width", gguf_dims=("1,any_width,1,1",))


def _same(name: str, dims: str) -> TensorRow:
    return tensor(f"{_T}blocks.{name}.weight", f"v.blk.{name}.weight", dims)


def _fewer(part: str, kernel: str) -> tuple[TensorRow, ...]:
    return (_same(f"{part}.down_conv", f"any_width,1,{kernel},{kernel}"), _same(f"{part}.norm", "any_width"))


def _block(block: str, kind: str) -> tuple[TensorRow, ...]:
    """The rows of the block "stage.number"."""
    word, *kernels = re.split(" ", kind)
    if word == "edge":
        return (
            _same(f"{block}.conv_exp", "any_inner,any_before,3,3"), _same(f"{block}.bn1", "any_inner"),
            _same(f"{block}.conv_pwl", "any_width,any_inner,1,1"), _same(f"{block}.bn2", "any_width"),
        )
    if word == "attention":
        return (
            _same(f"{block}.norm", "any_width"), _same(f"{block}.attn.query.proj", "any_heads,any_width,1,1"),
            *(
                row
                for part in ("key", "value")
                for row in (
                    *(_fewer(f"{block}.attn.{part}", kernels[0]) if kernels[0] != "0" else ()),
                    _same(f"{block}.attn.{part}.proj", "any_head,any_width,1,1"),
                )
            ),
            _same(f"{block}.attn.output.proj", "any_width,any_heads,1,1"), _scale(block),
        )
    before, between = kernels
    return (
        *(_convolution(f"{block}.dw_start", f"any_before,1,{before},{before}") if before != "0" else ()),
        *_convolution(f"{block}.pw_exp", "any_inner,any_before,1,1"),
        *(_convolution(f"{block}.dw_mid", f"any_inner,1,{between},{between}") if between != "0" else ()),
        *_convolution(f"{block}.pw_proj", "any_width,any_inner,1,1"), _scale(block),
    )


def _embedder(hf: str, gguf: str, part: str) -> tuple[TensorRow, ...]:
    """An embedding for special tokens, and the projection of the tower's output to the language model."""
    width = f"{part}.hidden_size"
    return (
        *linear(f"model.{hf}.embedding", f"{gguf}embedding", f"{part}.vocab_size,{width}"),
        *norm(f"model.{hf}.hard_embedding_norm", f"{gguf}hard_emb_norm", width),
        *norm(f"model.{hf}.soft_embedding_norm", f"{gguf}soft_emb_norm", width),
        *linear(f"model.{hf}.embedding_projection", f"{gguf}input_projection", f"hidden,{width}"),
    )


def _feed_forward(
    name: str, end: str, matrix: Callable[[str, str, str], tuple[TensorRow, ...]] = linear
) -> tuple[TensorRow, ...]:
    """The half-step MLP before and after attention; `matrix` makes the rows of a projection."""
    return (
        *norm(f"{name}.pre_layer_norm", f"ffn_norm{end}", _HEARD),
        *matrix(f"{name}.ffw_layer_1", f"ffn_up{end}", f"4*{_HEARD},{_HEARD}"),
        *matrix(f"{name}.ffw_layer_2", f"ffn_down{end}", f"{_HEARD},4*{_HEARD}"),
        *norm(f"{name}.post_layer_norm", f"ffn_post_norm{end}", _HEARD),
    )


_SEEING = (
    tensor(f"{_T}conv_stem.conv.weight", "v.conv_stem.conv.weight", "any_stem,3,3,3"),
    tensor(f"{_T}conv_stem.conv.bias", "v.conv_stem.conv.bias", "any_stem", gguf_dims=("1,any_stem,1,1",)),
    *norm(f"{_T}conv_stem.bn", "v.conv_stem.bn", "any_stem"),
    *(
        row
        for stage, kinds in enumerate(STAGES)
        for number, kind in enumerate(kinds)
        for row in _block(f"{stage}.{number}", kind)
    ),
    tensor(f"{_T}msfa.ffn.pw_exp.conv.weight", "v.msfa.ffn.pw_exp.conv.weight", "any_inner,any_both,1,1"),
    *norm(f"{_T}msfa.ffn.pw_exp.bn", "v.msfa.ffn.pw_exp.bn", "any_inner"),
    tensor(f"{_T}msfa.ffn.pw_proj.conv.weight", "v.msfa.ffn.pw_proj.conv.weight", f"{_SEEN},any_inner,1,1"),
    *norm(f"{_T}msfa.ffn.pw_proj.bn", "v.msfa.ffn.pw_proj.bn", _SEEN), *norm(f"{_T}msfa.norm", "v.msfa.norm", _SEEN),
    *_embedder("embed_vision", "mm.", "vision_config"),
)
_HEARING = (
    *(
        row
        for i, before in ((0, "1"), (1, "any_first"))
        for row in (
            tensor(
                f"{_A}subsample_conv_projection.conv_{i}.conv.weight", f"a.conv1d.{i}.weight",
                f"any_channels,{before},any_steps,any_bands",
            ),
            *norm(f"{_A}subsample_conv_projection.conv_{i}.norm", f"a.conv1d.{i}.norm", "any_channels"),
        )
    ),
    *linear(f"{_A}subsample_conv_projection.input_proj_linear", "a.pre_encode.out", f"{_HEARD},any_bands"),
    *layers(
        *_feed_forward("ffw_layer_start", ""), *norm("attention.pre_attn_norm", "ln1", _HEARD),
        tensor("attention.attn.per_dim_scale", "per_dim_scale", f"{_HEARD}/conf_num_attention_heads"),
        *linear("attention.attn.relative_position_embedding.pos_proj", "linear_pos", f"{_HEARD},{_HEARD}"),
        *(
            row
            for letter in "qkv"
            for row in linear(f"attention.attn.{letter}_proj", f"attn_{letter}", f"{_HEARD},{_HEARD}")
        ),
        *linear("attention.post", "attn_out", f"{_HEARD},{_HEARD}"), *norm("attention.post_norm", "ln2", _HEARD),
        *norm("lconv1d.pre_layer_norm", "conv_norm", _HEARD),
        *linear("lconv1d.linear_start", "conv_pw1", f"2*{_HEARD},{_HEARD}"),
        tensor("lconv1d.depthwise_conv1d.weight", "conv_dw.weight", f"{_HEARD},1,conf_conv_kernel_size"),
        *norm("lconv1d.conv_norm", "norm_conv", _HEARD),
        *linear("lconv1d.linear_end", "conv_pw2", f"{_HEARD},{_HEARD}"), *_feed_forward("ffw_layer_end", "_1"),
        *norm("norm", "layer_pre_norm", _HEARD), hf=f"{_A}conformer.{{n}}.", gguf="a.blk.{n}.",
        depth="conf_num_hidden_layers",
    ),
    *_embedder("embed_audio", "mm.a.", "audio_config"),
)
_POOLED = 3
"""llama.cpp's default of pooled patches in each direction."""


unless_three = Converter(lambda value, scope: None if value == _POOLED else value, or_default)
four_times = integer(lambda width: 4 * width, lambda width: width // 4 if width else DEFAULT)
as_many_heads = Converter(same, lambda value, scope: or_default(scope.gguf("vision.attention.head_count"), scope))


_V = "model.vision_tower."
_E = "model.vision_embedder."
_VISION = "vision_config.hidden_size"
_VISION_FFN = "vision_config.intermediate_size"
_AUDIO = "audio_config.hidden_size"
_MERGED = "patch_size*pooling_kernel_size*patch_size*pooling_kernel_size"
_WIDTH = "mm_embed_dim"
_COLOURS_FIRST = (f"swap:1,{_MERGED},3",)
_FREQUENCIES = 128
"""Mel bands, which no config states."""


def _clipped(hf: str, gguf: str, dims: str, part: str) -> tuple[TensorRow, ...]:
    """A matrix with clamp limits of its input and output, if the config of the part requests them."""
    bounds = ("input_min", "input_max", "output_min", "output_max")
    return (
        tensor(f"{hf}.linear.weight", f"{gguf}.weight", dims),
        *(tensor(f"{hf}.{name}", f"{gguf}.{name}", "", f"{part}.use_clipped_linears", ("1",)) for name in bounds),
    )


def _sees(name: str, gguf: str, dims: str) -> tuple[TensorRow, ...]:
    return _clipped(name, gguf, dims, "vision_config")


def _listens(name: str, gguf: str, dims: str) -> tuple[TensorRow, ...]:
    return _clipped(name, gguf, dims, "audio_config")


_GEMMA4_SEEING = (
    tensor(
        f"{_V}patch_embedder.input_proj.weight", "v.patch_embd.weight", f"{_VISION},patch_size*patch_size*3",
        gguf_dims=(f"{_VISION},3,patch_size,patch_size",), columns=("swap:1,patch_size*patch_size,3",),
    ),
    tensor(
        f"{_V}patch_embedder.position_embedding_table", "v.position_embd.weight",
        f"2,position_embedding_size,{_VISION}",
    ),
    *layers(
        *norm("input_layernorm", "ln1", _VISION), *_sees("self_attn.q_proj", "attn_q", f"{_VISION},{_VISION}"),
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
        *norm("post_feedforward_layernorm", "ffn_post_norm", _VISION), hf=f"{_V}encoder.layers.{{n}}.",
        depth="vision_config.num_hidden_layers",
    ),
    tensor(f"{_V}std_bias", "v.std_bias", _VISION, "vision_config.standardize"),
    tensor(f"{_V}std_scale", "v.std_scale", _VISION, "vision_config.standardize"),
    tensor("model.embed_vision.embedding_projection.weight", "mm.input_projection.weight", f"hidden,{_VISION}"),
)
_GEMMA4_HEARING = (
    tensor(f"{_A}subsample_conv_projection.layer0.conv.weight", "a.conv1d.0.weight", "128,1,3,3"),
    *norm(f"{_A}subsample_conv_projection.layer0.norm", "a.conv1d.0.norm", "128"),
    tensor(f"{_A}subsample_conv_projection.layer1.conv.weight", "a.conv1d.1.weight", "32,128,3,3"),
    *norm(f"{_A}subsample_conv_projection.layer1.norm", "a.conv1d.1.norm", "32"),
    *linear(f"{_A}subsample_conv_projection.input_proj_linear", "a.input_projection", f"{_AUDIO},32*{_FREQUENCIES}/4"),
    *layers(
        *_feed_forward("feed_forward1", "", _listens),
        *norm("norm_pre_attn", "attn_pre_norm", _AUDIO),
        tensor(
            "self_attn.per_dim_scale", "per_dim_scale.weight", f"{_AUDIO}/audio_config.num_attention_heads",
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
            "lconv1d.depthwise_conv1d.weight", "conv_dw.weight", f"{_AUDIO},1,conv_kernel_size",
            gguf_dims=(f"{_AUDIO},conv_kernel_size",),
        ),
        *norm("lconv1d.conv_norm", "norm_conv", _AUDIO),
        *_listens("lconv1d.linear_end", "conv_pw2", f"{_AUDIO},{_AUDIO}"),
        *_feed_forward("feed_forward2", "_1", _listens),
        *norm("norm_out", "ln2", _AUDIO),
        hf=f"{_A}layers.{{n}}.",
        gguf="a.blk.{n}.",
        depth="audio_config.num_hidden_layers",
    ),
    *linear(f"{_A}output_proj", "a.pre_encode.out", f"output_proj_dims,{_AUDIO}", REQUIRED),
    tensor("model.embed_audio.embedding_projection.weight", "mm.a.input_projection.weight", "hidden,output_proj_dims"),
)
_GEMMA4_SEEN = sees(
    *sizes("vision", image_size=""),
    # Images keep their sizes; llama.cpp's loader requires one.
    Key("vision.image_size", constant=224),
    *IMAGE,
    epsilon("vision", "vision_config.rms_norm_eps"),
    USE_GELU,
    Key("vision.projector.scale_factor", ("vision_config.pooling_kernel_size",), converter=unless_three),
    Key("", ("vision_config.position_embedding_size",)),
    Key("", ("vision_config.head_dim",)),
    Key("", ("vision_config.num_key_value_heads",), converter=as_many_heads),
    Key("", ("vision_config.use_clipped_linears",), "bool", converter=by_tensor("v.blk.0.attn_q.input_min")),
    Key("", ("vision_config.standardize",), "bool", converter=by_tensor("v.std_bias")),
    projector("gemma4v", part="vision"),
)
_GEMMA4_HEARD = hears(
    *sizes("audio", feed_forward_length=""),
    Key("audio.feed_forward_length", ("audio_config.hidden_size",), converter=four_times),
    Key("audio.num_mel_bins", constant=_FREQUENCIES), epsilon("audio", "audio_config.rms_norm_eps"),
    Key("", ("audio_config.conv_kernel_size",)), Key("", ("audio_config.output_proj_dims",)),
    Key("", ("audio_config.use_clipped_linears",), "bool", converter=by_tensor("a.blk.0.attn_q.input_min")),
    projector("gemma4a", part="audio"),
)
_VISION_ONLY = Tower(
    id="gemma4_vision", **whole("Gemma4ForConditionalGeneration", types=("gemma4",)),
    when="vision.projector_type=gemma4v&!audio.projector_type", text="model.language_model.",
    tensors=_GEMMA4_SEEING, f32=(".position_embd.",), keys=_GEMMA4_SEEN,
)

TOWERS: tuple[Tower, ...] = (
    _VISION_ONLY,
    replace(
        _VISION_ONLY, id="gemma4_towers", hf_when="audio_config",
        when="vision.projector_type=gemma4v&audio.projector_type=gemma4a",
        tensors=(*_GEMMA4_SEEING, *_GEMMA4_HEARING),
        f32=(".position_embd.", "^a.conv1d.", "^a.input_projection.", ".conv_dw."),
        keys=(*_GEMMA4_SEEN, *_GEMMA4_HEARD),
    ),
    Tower(
        id="gemma4_unified_towers", **whole("Gemma4UnifiedForConditionalGeneration", types=("gemma4_unified",)),
        when="vision.projector_type=gemma4uv", text="model.language_model.",
        tensors=(
            tensor(f"{_E}patch_ln1.weight", "v.patch_norm.1.weight", f"{_MERGED}*3", order=_COLOURS_FIRST),
            tensor(f"{_E}patch_ln1.bias", "v.patch_norm.1.bias", f"{_MERGED}*3", order=_COLOURS_FIRST),
            tensor(f"{_E}patch_dense.weight", "v.patch_embd.weight", f"{_WIDTH},{_MERGED}*3", columns=_COLOURS_FIRST),
            tensor(f"{_E}patch_dense.bias", "v.patch_embd.bias", _WIDTH),
            *norm(f"{_E}patch_ln2", "v.patch_norm.2", _WIDTH, REQUIRED),
            tensor(
                f"{_E}pos_embedding", "v.position_embd.weight", f"mm_posemb_size,2,{_WIDTH}",
                gguf_dims=(f"2,mm_posemb_size,{_WIDTH}",), order=("swap:1,mm_posemb_size,2",),
            ),
            *norm(f"{_E}pos_norm", "v.patch_norm.3", _WIDTH, REQUIRED),
            tensor(
                "model.embed_vision.embedding_projection.weight", "mm.input_projection.weight",
                "hidden,output_proj_dims",
            ),
            tensor(
                "model.embed_audio.embedding_projection.weight", "mm.a.input_projection.weight",
                "hidden,audio_embed_dim",
            ),
        ),
        f32=(".position_embd.",),
        keys=(
            *sees(
                Key("vision.image_size", constant=224),
                Key("vision.patch_size", ("vision_config.patch_size",)),
                Key("vision.embedding_length", ("vision_config.mm_embed_dim",)),
                # The network has no layers, and llama.cpp's loader requires their sizes.
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
                Key("audio.feed_forward_length", constant=0), Key("audio.block_count", constant=0),
                Key("audio.attention.head_count", constant=0), Key("audio.num_mel_bins", constant=_FREQUENCIES),
                epsilon("audio", "audio_config.rms_norm_eps"), projector("gemma4ua", part="audio"),
            ),
        ),
    ),
    Tower(
        id="gemma3n_towers",
        **whole("Gemma3nForConditionalGeneration", types=("gemma3n",)),
        when="vision.projector_type=gemma3nv",
        text="model.language_model.",
        tensors=(*_SEEING, *_HEARING),
        f32=("^v.conv_stem.", "^a.conv1d.", "^a.blk.*.conv_dw."),
        # llama.cpp supports depthwise kernels in F16 only, and aborts on others.
        f16=("^a.pre_encode.out.weight", ".dw_start.conv.weight", ".dw_mid.conv.weight", ".down_conv.weight"),
        keys=(
            *sees(
                Key("vision.image_size", ("preprocessor_config.size.height",)),
                Key("vision.patch_size", ("preprocessor_config.image_seq_length",), converter=height_by_tokens),
                Key("vision.embedding_length", ("vision_config.hidden_size",)),
                # llama.cpp's loader requires sizes of layers that the network does not have.
                Key("vision.feed_forward_length", constant=8192),
                Key("vision.block_count", constant=128),
                Key("vision.attention.head_count", constant=8),
                Key("vision.image_mean", kind="f32[]", constant=[0.0, 0.0, 0.0]),
                Key("vision.image_std", kind="f32[]", constant=[1.0, 1.0, 1.0]),
                Key("vision.attention.layer_norm_epsilon", kind="f32", constant=1e-6),
                Key("", ("vision_config.rms_norm_eps",), "f32", allowed=(1e-6,)),
                Key("", ("vision_config.architecture",), "str", allowed=("mobilenetv5_300m_enc",)),
                Key("", ("vision_config.vocab_size",)),
                projector("gemma3nv", part="vision"),
            ),
            *hears(
                Key("audio.embedding_length", ("audio_config.hidden_size",)),
                Key("audio.feed_forward_length", constant=6144),
                Key("audio.block_count", ("audio_config.conf_num_hidden_layers",)),
                Key("audio.attention.head_count", ("audio_config.conf_num_attention_heads",)),
                Key("audio.num_mel_bins", ("audio_config.input_feat_size",)),
                Key("audio.attention.layer_norm_epsilon", kind="f32", constant=1e-5),
                Key("", ("audio_config.conf_conv_kernel_size",)), Key("", ("audio_config.vocab_size",)),
                projector("gemma3na", part="audio"),
            ),
        ),
        config={"vision_config.model_type": "gemma3n_vision", "audio_config.model_type": "gemma3n_audio"},
    ),
)
