"""T5."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, HEAD_DIM, RMS_EPS, block, class_names, head, linear, must_be, norm, rename, tensor,
)
from aprfmt.arch.converter import Converter, Scope
from aprfmt.arch.converters.common import by_tensor
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import OPTIONAL, Architecture, Difference, Key, TensorRow
from aprfmt.errors import RefusedError


def _as_deep_to_gguf(value: object, scope: Scope) -> object:
    """Layers of the decoder: llama.cpp allocates as many as the encoder has."""
    depth, encoder = as_int(value, scope.name), scope.h.num_layers
    if depth is not None and encoder is not None and depth > encoder:
        raise RefusedError(
            f"{scope.name} is {depth}, but the encoder has {encoder} layers: llama.cpp's {scope.row.gguf} does not "
            "support a decoder deeper than the encoder"
        )
    return depth


gated_proj = by_tensor("enc.blk.0.ffn_gate.weight", there="gated-gelu", absent="relu")
as_deep = Converter(_as_deep_to_gguf, derive=lambda scope: scope.h.num_layers)
_DEC = "num_decoder_layers"
_ACTS = ("relu", "gelu", "gelu_new", "silu")
_PLAIN = "|".join(f"feed_forward_proj={act}" for act in _ACTS)
_GATED = "&".join(f"!feed_forward_proj={act}" for act in _ACTS)
"""Whether the MLP has a gate: the config prefixes the activation's name."""


def _t5_attention(hf: str, gguf: str = "attn") -> tuple[TensorRow, ...]:
    """Attention with an inner width of its own; scores are not scaled."""
    return (
        *linear(f"{hf}.q", f"{gguf}_q", "q,hidden"), *linear(f"{hf}.k", f"{gguf}_k", "q,hidden"),
        *linear(f"{hf}.v", f"{gguf}_v", "q,hidden"), *linear(f"{hf}.o", f"{gguf}_o", "hidden,q"),
    )


def _t5_mlp(layer: int) -> tuple[TensorRow, ...]:
    """ReLU between two matrices, or GELU gated by a third."""
    hf = f"layer.{layer}.DenseReluDense"
    return (
        *norm(f"layer.{layer}.layer_norm", "ffn_norm"), *linear(f"{hf}.wi", "ffn_up", "ffn,hidden", need=_PLAIN),
        *linear(f"{hf}.wi_0", "ffn_gate", "ffn,hidden", need=_GATED),
        *linear(f"{hf}.wi_1", "ffn_up", "ffn,hidden", need=_GATED), *linear(f"{hf}.wo", "ffn_down", "hidden,ffn"),
    )


def _t5_layer(layers: str) -> tuple[TensorRow, ...]:
    """Self-attention with relative position bias: in every layer, or only in the first, shared by all."""
    bias = ("layer.0.SelfAttention.relative_attention_bias.weight", "attn_rel_b.weight")
    return (
        *norm("layer.0.layer_norm", "attn_norm"), *_t5_attention("layer.0.SelfAttention"),
        tensor(*bias, "relative_attention_num_buckets,heads", layers=layers),
    )


def _t5_encoder(layers: str) -> tuple[TensorRow, ...]:
    return (
        tensor("shared.weight", "token_embd.weight", "vocab,hidden"),
        *block(*_t5_layer(layers), *_t5_mlp(1), hf="encoder.block.{n}.", gguf="enc.blk.{n}."),
        *norm("encoder.final_layer_norm", "enc.output_norm"),
    )


def _t5(layers: str) -> tuple[TensorRow, ...]:
    unused = "layer.1.EncDecAttention.relative_attention_bias.weight"
    return (
        *_t5_encoder(layers),
        *block(
            *_t5_layer(layers), *norm("layer.1.layer_norm", "cross_attn_norm"),
            *_t5_attention("layer.1.EncDecAttention", "cross_attn"),
            # Of the first T5; unused.
            tensor(unused, "cross_attn_rel_b.weight", "relative_attention_num_buckets,heads", OPTIONAL, layers="first"),
            *_t5_mlp(2),
            hf="decoder.block.{n}.", gguf="dec.blk.{n}.", depth=_DEC,
        ),
        *norm("decoder.final_layer_norm", "dec.output_norm"), *head(),
    )


_ENCODER_KEYS = (
    *rename(
        DIMS, num_layers="num_layers", max_position_embeddings="n_positions", hidden_size="d_model",
        intermediate_size="d_ff", num_heads="num_heads",
    ),
    replace(HEAD_DIM, hf=("d_kv",)), replace(RMS_EPS, hf=("layer_norm_epsilon",)),
    Key("attention.layer_norm_epsilon", ("layer_norm_epsilon",), "f32", "rms_norm_eps"),
    Key("attention.relative_buckets_count", ("relative_attention_num_buckets",)),
    Key("", ("feed_forward_proj",), "str", allowed=("relu", "gated-gelu"), converter=gated_proj),
    must_be("relative_attention_max_distance", 128),
)
_KEYS = (
    *_ENCODER_KEYS, Key("decoder_block_count", (_DEC,), converter=as_deep),
    Key("decoder_start_token_id", ("decoder_start_token_id",)), must_be("is_encoder_decoder", True),
)
_SCALED = (
    "llama.cpp does not divide the logits by sqrt(d_model) as transformers does: they are larger by that factor, in "
    "the same order"
)
_NAMED = "!bare&!model_type=mt5&"
_IS_SCALED = f"{_NAMED}scale_decoder_outputs|{_NAMED}tied&!scale_decoder_outputs=False"
# Old checkpoints store the embedding under the names of both stacks too.
_COPIES = (("encoder.embed_tokens.", "shared."), ("decoder.embed_tokens.", "shared."))
scaled_by_tie = by_tensor("output.weight", there=False, absent=True)

_T5 = Architecture(
    id="t5", gguf="t5",
    **class_names(
        "T5ForConditionalGeneration", "T5WithLMHeadModel", "T5Model", "MT5ForConditionalGeneration", "MT5Model",
        types=("t5", "mt5"), bare=("T5Model", "MT5Model"),
    ),
    tensors=_t5("first"), prefixes=_COPIES,
    keys=(*_KEYS, Key("", ("scale_decoder_outputs",), "bool", converter=scaled_by_tie)),
    differs=(Difference(_SCALED, _IS_SCALED, slight=True),),
)

_EACH_LAYER = "tensors=enc.blk.1.attn_rel_b.weight"
"""Of UMT5, whose layers have a bias of positions each."""


def _encoder(name: str, stems: tuple[str, ...], layers: str, when: str = "") -> Architecture:
    """The encoder alone."""
    classes = tuple(stem + end for stem in stems for end in ("EncoderModel", "ForTokenClassification"))
    return replace(
        _T5, id=name, gguf="t5encoder", hf_class=classes[0], model_type=stems[0].lower(), hf_classes=classes,
        bare_classes=classes, model_types=(), tensors=_t5_encoder(layers), keys=_ENCODER_KEYS, differs=(), when=when,
    )


ROWS: tuple[Architecture, ...] = (
    _T5,
    replace(
        _T5, id="umt5",
        **class_names("UMT5ForConditionalGeneration", "UMT5Model", types=("umt5",), bare=("UMT5Model",)),
        when=_EACH_LAYER, tensors=_t5(""),
    ),
    _encoder("t5encoder", ("T5", "MT5"), "first"),
    _encoder("umt5encoder", ("UMT5",), "", when=_EACH_LAYER),
)
