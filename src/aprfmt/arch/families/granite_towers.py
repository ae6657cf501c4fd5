"""Granite's towers: a conformer or SigLIP, and Q-Formers over windows of their output."""

from __future__ import annotations

import re
from dataclasses import replace

from aprfmt.arch import projectors
from aprfmt.arch.blocks.decoder import linear, must_be, norm, tensor
from aprfmt.arch.blocks.hearing import batch_norm, scale_and_shift
from aprfmt.arch.blocks.tower import (
    IMAGE, TOWER_WIDTH, USE_GELU, epsilon, hears, layers, projector, sees, siglip, sizes, whole,
)
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, GgufKeys, Scope, if_given, or_default
from aprfmt.arch.converters.common import computed, numbers
from aprfmt.arch.fields import as_int
from aprfmt.arch.projectors import LAYERWISE, MAP, SPATIAL, SPATIAL_LAYER, TARGETS, TEXT_LAYERS, VISION_LAYERS
from aprfmt.arch.row import REQUIRED, Key, TensorRow, Tower
from aprfmt.errors import RefusedError


_OFFSETS = "vision.projector.spatial_offsets"


def _output(number: int, depth: int, scope: Scope) -> int:
    """The layer whose output config.json calls `number`: 1 is that of the first, -1 that of the last."""
    layer = number + depth if number < 0 else number - 1
    if not 0 <= layer < depth:
        raise RefusedError(
            f"{scope.name} refers to hidden state {number}, but the tower has {depth} layers",
            hint="check deepstack_layer_map and spatial_vision_layer of config.json",
        )
    return layer


def _layers_to_gguf(value: object, scope: Scope) -> object:
    depth = scope.size(VISION_LAYERS) or 0
    told = {name: scope.config(name) for name in (MAP, TARGETS, SPATIAL_LAYER)}
    found = projectors.projectors(told, scope.size(TEXT_LAYERS))
    projectors.check(found)
    layers = [_output(one.vision_layer, depth, scope) for one in found]
    offsets = [one.item if one.kind == SPATIAL else -1 for one in found]
    return GgufKeys({scope.key.gguf: ("i32[]", layers), _OFFSETS: ("i32[]", offsets)})


def _layers_from_gguf(value: object, scope: Scope) -> object:
    """The lists of a config.json, with projector indices in place of layers of the language model."""
    layers, offsets = numbers(value, scope.key.gguf), numbers(scope.gguf(_OFFSETS), _OFFSETS)
    depth = as_int(scope.gguf("vision.block_count"), "vision.block_count") or 0
    by_corner = sorted((offset, i) for i, offset in enumerate(offsets) if offset >= 0)
    corners = {layers[i] for _, i in by_corner if i < len(layers)}
    if (
        len(layers) != len(offsets)
        or len(corners) > 1
        or [offset for offset, _ in by_corner] != list(range(len(by_corner)))
    ):
        raise RefusedError(
            f"feature_layer {layers!r:.60} and spatial_offsets {offsets!r:.60} match no projectors of the family",
            hint="check the program that wrote the GGUF",
        )
    pairs = sorted([layer - depth, i] for i, layer in enumerate(layers) if offsets[i] < 0)
    last = next((layer - depth for layer in corners), -1)
    return ConfigKeys({MAP: pairs, TARGETS: [i for _, i in by_corner], SPATIAL_LAYER: last})


def _side(part: int) -> Converter:
    """A side of "3/8": the square sizes between which the projectors downsample."""
    other = f"vision.projector.{('query', 'window')[1 - part]}_side"

    def to_gguf(value: object, scope: Scope) -> object:
        if not isinstance(value, str) or re.fullmatch(r"[1-9]\d*/[1-9]\d*", value) is None:
            raise RefusedError(f"{scope.name} is {value!r:.40}, not two sizes such as 4/8")
        return int(value.split("/")[part])

    def from_gguf(value: object, scope: Scope) -> object:
        sides = [as_int(value, scope.key.gguf), as_int(scope.gguf(other), other)]
        return DEFAULT if None in sides else "/".join(map(str, sides if part == 0 else sides[::-1]))

    return Converter(to_gguf, from_gguf)


def _pinpoints_to_gguf(value: object, scope: Scope) -> object:
    """Image sizes, width before height."""
    pairs = value if isinstance(value, list) else []
    return [side for pair in pairs for side in numbers(pair, scope.name)[::-1]] or None


def _pinpoints_from_gguf(value: object, scope: Scope) -> object:
    sides = numbers(value, scope.key.gguf) if value is not None else []
    return [[sides[i + 1], sides[i]] for i in range(0, len(sides) - 1, 2)] or DEFAULT


query_side = _side(0)
window_side = _side(1)
pinpoints = Converter(_pinpoints_to_gguf, _pinpoints_from_gguf)


def _ffn_of_mult_from_gguf(value: object, scope: Scope) -> object:
    width, ffn = as_int(scope.gguf("audio.embedding_length"), scope.name), as_int(value, scope.name)
    return ffn // width if width and ffn else DEFAULT


def _one_width_to_gguf(value: object, scope: Scope) -> object:
    """Width of Granite's encoder, which llama.cpp also uses for its heads and for the projector's network."""
    heads, dim = (scope.size(f"encoder_config.{name}") for name in ("num_heads", "dim_head"))
    others = {
        "encoder_config.num_heads * dim_head": heads * dim if heads and dim else None,
        "projector_config.hidden_size": scope.size("projector_config.hidden_size"),
    }
    for name, other in others.items():
        if other not in (None, value):
            raise RefusedError(
                f"{scope.name} is {value!r:.40}, but {name} is {other}: llama.cpp supports one width only",
                hint="use another output format: -o NAME.apr, or -o NAME --format hf",
            )
    return value


ffn_of_mult = computed("encoder_config.hidden_dim*encoder_config.feedforward_mult", _ffn_of_mult_from_gguf)
_C = "encoder_config"
_Q = "projector_config"
_W = "hidden_dim"
_HEADS = "num_heads*dim_head"
_WIDTH = f"{_Q}.hidden_size"
_F = "qformer_config"
_SEES = "model.vision_tower.vision_model."


def _feed_forward(name: str, end: str) -> tuple[TensorRow, ...]:
    return (
        *norm(f"{name}.pre_norm", f"ffn_norm{end}", _W, REQUIRED),
        *linear(f"{name}.up_proj", f"ffn_up{end}", f"{_W}*feedforward_mult,{_W}", REQUIRED),
        *linear(f"{name}.down_proj", f"ffn_down{end}", f"{_W},{_W}*feedforward_mult", REQUIRED),
    )


def _attends(name: str, gguf: str, width: str, keys: str) -> tuple[TensorRow, ...]:
    """Attention of a Q-Former, whose keys and values have `keys` input channels."""
    return (
        *linear(f"{name}.attention.query", f"{gguf}_q", f"{width},{width}", REQUIRED),
        *linear(f"{name}.attention.key", f"{gguf}_k", f"{width},{keys}", REQUIRED),
        *linear(f"{name}.attention.value", f"{gguf}_v", f"{width},{keys}", REQUIRED),
        *linear(f"{name}.output.dense", f"{gguf}_out", f"{width},{width}", REQUIRED),
        *norm(f"{name}.output.LayerNorm", f"{gguf}_norm", width, REQUIRED),
    )


def _asks(width: str, keys: str, ffn: str) -> tuple[TensorRow, ...]:
    """A layer of a Q-Former."""
    return (
        *_attends("attention", "self_attn", width, width), *_attends("crossattention", "cross_attn", width, keys),
        *linear("intermediate_query.dense", "ffn_up", f"{ffn},{width}", REQUIRED),
        *linear("output_query.dense", "ffn_down", f"{width},{ffn}", REQUIRED),
        *norm("output_query.LayerNorm", "ffn_norm", width, REQUIRED),
    )


def _projectors(kind: str) -> tuple[TensorRow, ...]:
    """The projectors of a kind: each a Q-Former with one layer."""
    rows = (
        tensor("image_positions", "img_pos", f"1,any_window,{TOWER_WIDTH}"),
        *norm("norm", "norm", TOWER_WIDTH, REQUIRED),
        *linear("out_linear", "linear", f"hidden,{TOWER_WIDTH}", REQUIRED),
        *(
            replace(row, hf=tuple(f"qformer.encoder.layer.0.{name}" for name in row.hf))
            for row in _asks(TOWER_WIDTH, TOWER_WIDTH, f"{_F}.intermediate_size")
        ),
        *norm("qformer.layernorm", "post_norm", TOWER_WIDTH, REQUIRED),
        tensor("query", "query", f"1,any_queries,{TOWER_WIDTH}"),
    )
    return layers(
        *(replace(row, layers=kind) for row in rows), hf=f"model.{kind}_projectors.{{n}}.", gguf="v.proj_blk.{n}.",
        depth=f"{MAP}+{TARGETS}",
    )


_BATCH_NORM = "encoder.layers.{n}.conv.batch_norm"
_SPEECH = Tower(
    id="granite_speech_tower", **whole("GraniteSpeechForConditionalGeneration", types=("granite_speech",)),
    when="projector_type=granite_speech&!audio.feature_layer",
    prefixes=(("model.encoder.", "encoder."), ("model.projector.", "projector.")),
    tensors=(
        *linear("encoder.input_linear", "a.input_projection", f"{_W},input_dim", REQUIRED),
        *linear("encoder.out", "a.enc_ctc_out", f"output_dim,{_W}", REQUIRED),
        *linear("encoder.out_mid", "a.enc_ctc_out_mid", f"{_W},output_dim", REQUIRED),
        *layers(
            *_feed_forward("ff1", ""), *_feed_forward("ff2", "_1"), *norm("attn.pre_norm", "ln1", _W, REQUIRED),
            *linear("attn.to_q", "attn_q", f"{_HEADS},{_W}"),
            TensorRow(
                ("attn.to_kv.weight",), ("attn_k.weight", "attn_v.weight"), (f"2*{_HEADS},{_W}",),
                gguf_dims=(f"{_HEADS},{_W}",) * 2,
            ),
            *linear("attn.to_out", "attn_out", f"{_W},{_HEADS}", REQUIRED),
            tensor("attn.rel_pos_emb.weight", "attn_rel_pos_emb", "2*max_pos_emb+1,dim_head"),
            *norm("post_norm", "ln2", _W, REQUIRED), *norm("conv.norm", "norm_conv", _W, REQUIRED),
            tensor(
                "conv.up_conv.weight", "conv_pw1.weight", f"2*{_W}*conv_expansion_factor,{_W},1",
                gguf_dims=(f"2*{_W}*conv_expansion_factor,{_W}",),
            ),
            tensor("conv.up_conv.bias", "conv_pw1.bias", f"2*{_W}*conv_expansion_factor"),
            tensor(
                "conv.depth_conv.conv.weight", "conv_dw.weight", f"{_W}*conv_expansion_factor,1,conv_kernel_size",
                gguf_dims=(f"{_W}*conv_expansion_factor,conv_kernel_size",),
            ),
            tensor(
                "conv.down_conv.weight", "conv_pw2.weight", f"{_W},{_W}*conv_expansion_factor,1",
                gguf_dims=(f"{_W},{_W}*conv_expansion_factor",),
            ),
            tensor("conv.down_conv.bias", "conv_pw2.bias", _W), hf="encoder.layers.{n}.", gguf="a.blk.{n}.",
            depth="num_layers",
        ),
        *batch_norm(_BATCH_NORM, f"{_W}*conv_expansion_factor", "num_layers"),
        tensor("projector.query", "a.proj_query", f"1,window_size/downsample_rate,{_WIDTH}"),
        *norm("projector.qformer.layernorm", "a.proj_norm", _WIDTH, REQUIRED),
        *linear("projector.linear", "a.proj_linear", f"hidden,{_WIDTH}", REQUIRED),
        *layers(
            *_asks(_WIDTH, f"{_Q}.encoder_hidden_size", f"{_Q}.intermediate_size"),
            hf="projector.qformer.encoder.layer.{n}.", gguf="a.proj_blk.{n}.", depth=f"{_Q}.num_hidden_layers",
        ),
    ),
    ignored=(".num_batches_tracked",),
    made=scale_and_shift(_BATCH_NORM),
    f32=(".conv_pw1.weight", ".conv_pw2.weight", ".conv_dw.weight"),
    keys=hears(
        Key("audio.embedding_length", (f"{_C}.hidden_dim",), converter=Converter(_one_width_to_gguf, or_default)),
        Key("audio.feed_forward_length", (f"{_C}.feedforward_mult",), converter=ffn_of_mult),
        Key("audio.block_count", (f"{_C}.num_layers",)), Key("audio.attention.head_count", (f"{_C}.num_heads",)),
        projector("granite_speech"), Key("audio.num_mel_bins", (f"{_C}.input_dim",)),
        Key("audio.attention.layer_norm_epsilon", kind="f32", constant=1e-5),
        Key("audio.chunk_size", (f"{_C}.context_size",)), Key("audio.conv_kernel_size", (f"{_C}.conv_kernel_size",)),
        Key("audio.max_pos_emb", (f"{_C}.max_pos_emb",)), Key("audio.projector.window_size", ("window_size",)),
        Key("audio.projector.downsample_rate", ("downsample_rate",)),
        Key("audio.projector.head_count", (f"{_Q}.num_attention_heads",)),
        *(Key("", (f"{_C}.{name}",)) for name in ("output_dim", "dim_head", "conv_expansion_factor")),
        *(
            Key("", (f"{_Q}.{name}",))
            for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "encoder_hidden_size")
        ),
    ),
    config={f"{_C}.model_type": "granite_speech_encoder", f"{_Q}.model_type": "blip_2_qformer"},
)

TOWERS: tuple[Tower, ...] = (
    _SPEECH,
    replace(
        _SPEECH, id="granite_speech_plus_tower",
        **whole("GraniteSpeechPlusForConditionalGeneration", types=("granite_speech_plus",)),
        when="projector_type=granite_speech&audio.feature_layer",
        keys=(*_SPEECH.keys, Key("audio.feature_layer", (f"{_C}.cat_hidden_layers",), "i32[]", converter=if_given)),
    ),
    Tower(
        id="granite4_vision", **whole("Granite4VisionForConditionalGeneration", types=("granite4_vision",)),
        when="projector_type=granite4_vision", text="model.language_model.",
        prefixes=((_SEES, _SEES), ("model.vision_tower.", _SEES)),
        listed={f"model.{kind}_projectors.": kind for kind in (LAYERWISE, SPATIAL)},
        tensors=(
            tensor("model.image_newline", "v.image_newline", "hidden"),
            *(row for kind in (LAYERWISE, SPATIAL) for row in _projectors(kind)), *siglip(_SEES, part="vision_config."),
        ),
        f32=(".position_embd.", ".img_pos", ".query"),
        keys=sees(
            *sizes(), *IMAGE, projector("granite4_vision"), epsilon("vision", "vision_config.layer_norm_eps"), USE_GELU,
            Key("vision.preproc_image_size", ("vision_config.image_size",)),
            Key("vision.projector.query_side", ("downsample_rate",), converter=query_side),
            Key("vision.projector.window_side", ("downsample_rate",), converter=window_side), Key("", (TARGETS,)),
            Key("", (SPATIAL_LAYER,), "i32"), Key("", (TEXT_LAYERS,)),
            Key("vision.feature_layer", (MAP,), "i32[]", converter=Converter(_layers_to_gguf, _layers_from_gguf)),
            Key("vision.image_grid_pinpoints", ("image_grid_pinpoints",), "i32[]", converter=pinpoints),
            Key("", (f"{_F}.intermediate_size",)), must_be("vision_config.hidden_act", "gelu_pytorch_tanh"),
            must_be(f"{_F}.num_hidden_layers", 1), must_be(f"{_F}.hidden_act", "gelu"),
            must_be(f"{_F}.layer_norm_eps", 1e-12),
        ),
        config={
            "vision_feature_select_strategy": "full", "vision_config.model_type": "siglip_vision_model",
            "vision_config.vision_use_head": False, f"{_F}.model_type": "blip_2_qformer",
        },
    ),
)
