"""Towers of Gemma 3n: MobileNet-v5 and a conformer. Data only."""

from __future__ import annotations

import re

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import Key, TensorRow, Tower
from aprfmt.arch.rows.parts import linear, norm, tensor
from aprfmt.arch.towers.parts import hears, layers, projector, sees
from aprfmt.errors import RefusedError

_HEIGHT = "preprocessor_config.size.height"


def _by_tokens_to(value: object, scope: Scope) -> object:
    """llama.cpp counts the tokens of an image as its height by this."""
    tokens, height = as_int(value, scope.name), scope.size(_HEIGHT)
    if not tokens or not height or height % tokens:
        raise RefusedError(
            f"{scope.name} is {value!r:.20}, which does not divide the height {height!r:.20} of an image",
            hint="check preprocessor_config.json; published ones say 256 of 768",
        )
    return height // tokens


def _by_tokens_from(value: object, scope: Scope) -> object:
    patch, height = as_int(value, scope.name), scope.gguf("vision.image_size")
    return height // patch if patch and isinstance(height, int) else DEFAULT


height_by_tokens = Converter(_by_tokens_to, _by_tokens_from)

_T = "model.vision_tower.timm_model."
_A = "model.audio_tower."
_SEEN, _HEARD = "vision_config.hidden_size", "audio_config.hidden_size"

STAGES: tuple[tuple[str, ...], ...] = (
    ("edge",) * 3,
    ("inverted 3 5", "inverted 5 0", "inverted 3 0", "inverted 5 0", "inverted 3 0"),
    ("inverted 5 5", *("inverted 5 0",) * 7, "inverted 0 0", *("attention 3", "inverted 0 0") * 14),
    ("inverted 5 5", *("attention 0", "inverted 0 0") * 19),
)
"""Kinds of the blocks of each stage: edge residuals; inverted residuals, with the kernels of the convolutions before
and between their two matrices, 0 without; attention, with the kernel that makes its keys and values fewer."""


def _convolution(name: str, dims: str, norm_of: str = "bn") -> tuple[TensorRow, ...]:
    """A convolution and its norm, under the same names on both sides."""
    return (
        tensor(f"{_T}blocks.{name}.conv.weight", f"v.blk.{name}.conv.weight", dims),
        tensor(f"{_T}blocks.{name}.{norm_of}.weight", f"v.blk.{name}.{norm_of}.weight", dims.partition(",")[0]),
    )


def _scale(block: str) -> TensorRow:
    """How much of a block is added."""
    name = f"{block}.layer_scale.gamma"
    return tensor(f"{_T}blocks.{name}", f"v.blk.{name}", "any_width", gguf_dims=("1,any_width,1,1",))


def _same(name: str, dims: str) -> TensorRow:
    return tensor(f"{_T}blocks.{name}.weight", f"v.blk.{name}.weight", dims)


def _block(block: str, kind: str) -> tuple[TensorRow, ...]:
    """The rows of the block "stage.number"."""
    word, *kernels = re.split(" ", kind)
    if word == "edge":
        return (
            _same(f"{block}.conv_exp", "any_inner,any_before,3,3"),
            _same(f"{block}.bn1", "any_inner"),
            _same(f"{block}.conv_pwl", "any_width,any_inner,1,1"),
            _same(f"{block}.bn2", "any_width"),
        )
    if word == "attention":
        return (
            _same(f"{block}.norm", "any_width"),
            _same(f"{block}.attn.query.proj", "any_heads,any_width,1,1"),
            *(
                row
                for part in ("key", "value")
                for row in (
                    *(_fewer(f"{block}.attn.{part}", kernels[0]) if kernels[0] != "0" else ()),
                    _same(f"{block}.attn.{part}.proj", "any_head,any_width,1,1"),
                )
            ),
            _same(f"{block}.attn.output.proj", "any_width,any_heads,1,1"),
            _scale(block),
        )
    before, between = kernels
    return (
        *(_convolution(f"{block}.dw_start", f"any_before,1,{before},{before}") if before != "0" else ()),
        *_convolution(f"{block}.pw_exp", "any_inner,any_before,1,1"),
        *(_convolution(f"{block}.dw_mid", f"any_inner,1,{between},{between}") if between != "0" else ()),
        *_convolution(f"{block}.pw_proj", "any_width,any_inner,1,1"),
        _scale(block),
    )


def _fewer(part: str, kernel: str) -> tuple[TensorRow, ...]:
    return (_same(f"{part}.down_conv", f"any_width,1,{kernel},{kernel}"), _same(f"{part}.norm", "any_width"))


def _embedder(hf: str, gguf: str, part: str) -> tuple[TensorRow, ...]:
    """Tokens of their own, and what the network gives as tokens of the language model."""
    width = f"{part}.hidden_size"
    return (
        *linear(f"model.{hf}.embedding", f"{gguf}embedding", f"{part}.vocab_size,{width}"),
        *norm(f"model.{hf}.hard_embedding_norm", f"{gguf}hard_emb_norm", width),
        *norm(f"model.{hf}.soft_embedding_norm", f"{gguf}soft_emb_norm", width),
        *linear(f"model.{hf}.embedding_projection", f"{gguf}input_projection", f"hidden,{width}"),
    )


def _feed_forward(name: str, end: str) -> tuple[TensorRow, ...]:
    return (
        *norm(f"{name}.pre_layer_norm", f"ffn_norm{end}", _HEARD),
        *linear(f"{name}.ffw_layer_1", f"ffn_up{end}", f"4*{_HEARD},{_HEARD}"),
        *linear(f"{name}.ffw_layer_2", f"ffn_down{end}", f"{_HEARD},4*{_HEARD}"),
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
    *norm(f"{_T}msfa.ffn.pw_proj.bn", "v.msfa.ffn.pw_proj.bn", _SEEN),
    *norm(f"{_T}msfa.norm", "v.msfa.norm", _SEEN),
    *_embedder("embed_vision", "mm.", "vision_config"),
)

_HEARING = (
    *(
        row
        for i, before in ((0, "1"), (1, "any_first"))
        for row in (
            tensor(
                f"{_A}subsample_conv_projection.conv_{i}.conv.weight",
                f"a.conv1d.{i}.weight",
                f"any_channels,{before},any_steps,any_bands",
            ),
            *norm(f"{_A}subsample_conv_projection.conv_{i}.norm", f"a.conv1d.{i}.norm", "any_channels"),
        )
    ),
    *linear(f"{_A}subsample_conv_projection.input_proj_linear", "a.pre_encode.out", f"{_HEARD},any_bands"),
    *layers(
        *_feed_forward("ffw_layer_start", ""),
        *norm("attention.pre_attn_norm", "ln1", _HEARD),
        tensor("attention.attn.per_dim_scale", "per_dim_scale", f"{_HEARD}/conf_num_attention_heads"),
        *linear("attention.attn.relative_position_embedding.pos_proj", "linear_pos", f"{_HEARD},{_HEARD}"),
        *(
            row
            for letter in "qkv"
            for row in linear(f"attention.attn.{letter}_proj", f"attn_{letter}", f"{_HEARD},{_HEARD}")
        ),
        *linear("attention.post", "attn_out", f"{_HEARD},{_HEARD}"),
        *norm("attention.post_norm", "ln2", _HEARD),
        *norm("lconv1d.pre_layer_norm", "conv_norm", _HEARD),
        *linear("lconv1d.linear_start", "conv_pw1", f"2*{_HEARD},{_HEARD}"),
        tensor("lconv1d.depthwise_conv1d.weight", "conv_dw.weight", f"{_HEARD},1,conf_conv_kernel_size"),
        *norm("lconv1d.conv_norm", "norm_conv", _HEARD),
        *linear("lconv1d.linear_end", "conv_pw2", f"{_HEARD},{_HEARD}"),
        *_feed_forward("ffw_layer_end", "_1"),
        *norm("norm", "layer_pre_norm", _HEARD),
        hf=f"{_A}conformer.{{n}}.",
        gguf="a.blk.{n}.",
        depth="conf_num_hidden_layers",
    ),
    *_embedder("embed_audio", "mm.a.", "audio_config"),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="gemma3n_towers",
        gguf="clip",
        hf_class="Gemma3nForConditionalGeneration",
        model_type="gemma3n",
        hf_classes=("Gemma3nForConditionalGeneration",),
        model_types=("gemma3n",),
        when="vision.projector_type=gemma3nv",
        text="model.language_model.",
        tensors=(*_SEEING, *_HEARING),
        f32=("^v.conv_stem.", "^a.conv1d.", "^a.blk.*.conv_dw."),
        # llama.cpp multiplies depthwise kernels with halves only, and dies of others.
        f16=("^a.pre_encode.out.weight", ".dw_start.conv.weight", ".dw_mid.conv.weight", ".down_conv.weight"),
        keys=(
            *sees(
                Key("vision.image_size", ("preprocessor_config.size.height",)),
                Key("vision.patch_size", ("preprocessor_config.image_seq_length",), converter=height_by_tokens),
                Key("vision.embedding_length", ("vision_config.hidden_size",)),
                # llama.cpp's loader insists on sizes of layers that the network does not have.
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
                Key("", ("audio_config.conf_conv_kernel_size",)),
                Key("", ("audio_config.vocab_size",)),
                projector("gemma3na", part="audio"),
            ),
        ),
        defaults={
            "": {
                "vision_config.hidden_size": 2048,
                "vision_config.vocab_size": 128,
                "vision_config.rms_norm_eps": 1e-6,
                "vision_config.architecture": "mobilenetv5_300m_enc",
                "audio_config.hidden_size": 1536,
                "audio_config.conf_num_hidden_layers": 12,
                "audio_config.conf_num_attention_heads": 8,
                "audio_config.conf_conv_kernel_size": 5,
                "audio_config.input_feat_size": 128,
                "audio_config.vocab_size": 128,
                "preprocessor_config.size.height": 768,
                "preprocessor_config.image_seq_length": 256,
            }
        },
        config={"vision_config.model_type": "gemma3n_vision", "audio_config.model_type": "gemma3n_audio"},
    ),
)
