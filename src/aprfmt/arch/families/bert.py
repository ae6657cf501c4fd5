"""BERT and RoBERTa."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, LAYER_EPS, block, convert, embedding, gelu, linear, must_be, norm, rename, tensor,
)
from aprfmt.arch.blocks.encoder import ENCODER, HEADS, TYPES, encoder_names, hf_only
from aprfmt.arch.converter import DEFAULT, Converter, Scope, refuse_if
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import REQUIRED, Architecture, Key, TensorRow
from aprfmt.errors import RefusedError


def _offset_positions_to_gguf(value: object, scope: Scope) -> int | None:
    """Maximum text length: RoBERTa's positions start after the padding id."""
    positions, padding = as_int(value, scope.name), scope.size("pad_token_id")
    if positions is None or padding is None:
        return positions
    if positions <= padding + 1:
        raise RefusedError(f"{positions} positions are not enough: they start after the padding id {padding}")
    return positions - padding - 1


def _offset_positions_from_gguf(value: object, scope: Scope) -> object:
    key = "tokenizer.ggml.padding_token_id"
    positions = as_int(value, scope.key.gguf)
    padding = as_int(scope.kv.get(key, scope.defaults.get("pad_token_id")), key)
    return DEFAULT if positions is None or padding is None else positions + padding + 1


offset_positions = Converter(_offset_positions_to_gguf, _offset_positions_from_gguf)


def _layer_norm(hf: str, gguf: str) -> tuple[TensorRow, ...]:
    """A LayerNorm, under its current names and those of checkpoints converted from TensorFlow."""
    return (
        *norm(hf, gguf, bias=REQUIRED), tensor(f"{hf}.gamma", f"{gguf}.weight", "hidden"),
        tensor(f"{hf}.beta", f"{gguf}.bias", "hidden"),
    )


_ENCODES = (must_be("is_decoder", False), must_be("add_cross_attention", False))
_CROSS = tuple(
    replace(row, need="add_cross_attention")
    for row in (
        *hf_only(
            "q,hidden", *(f"crossattention.self.{name}" for name in ("query", "key", "value")),
            "crossattention.output.dense",
        ),
        *hf_only("hidden", "crossattention.output.LayerNorm"),
    )
)
"""Cross attention of a BERT decoder, which llama.cpp does not support."""


def _bert(positions: TensorRow) -> tuple[TensorRow, ...]:
    """BERT's network: post-norm, biases everywhere, token types."""
    return (
        embedding("embeddings.word_embeddings"), positions,
        tensor("embeddings.token_type_embeddings.weight", "token_types.weight", "type_vocab_size,hidden"),
        *_layer_norm("embeddings.LayerNorm", "token_embd_norm"),
        *block(
            *linear("attention.self.query", "attn_q", "q,hidden", REQUIRED),
            *linear("attention.self.key", "attn_k", "q,hidden", REQUIRED),
            *linear("attention.self.value", "attn_v", "q,hidden", REQUIRED),
            *linear("attention.output.dense", "attn_output", "hidden,q", REQUIRED),
            *_layer_norm("attention.output.LayerNorm", "attn_output_norm"),
            *linear("intermediate.dense", "ffn_up", "ffn,hidden", REQUIRED),
            *linear("output.dense", "ffn_down", "hidden,ffn", REQUIRED),
            *_layer_norm("output.LayerNorm", "layer_output_norm"), *_CROSS, hf="encoder.layer.{n}.",
        ),
    )


_POSITIONS = tensor("embeddings.position_embeddings.weight", "position_embd.weight", "positions,hidden")
_BERT = Architecture(
    id="bert", gguf="bert", **encoder_names("Bert", "bert", *HEADS, "ForPreTraining"),
    tensors=(
        *_bert(_POSITIONS), *hf_only("hidden,hidden", "pooler.dense", "cls.predictions.transform.dense"),
        *hf_only("hidden", "cls.predictions.transform.LayerNorm"), *hf_only("vocab,hidden", "cls.predictions.decoder"),
        *hf_only("vocab", "cls.predictions.bias"),
        *hf_only("num_labels,hidden", "cls.seq_relationship", "classifier", "qa_outputs"),
    ),
    keys=(*DIMS, LAYER_EPS, *ENCODER, TYPES, gelu(), *_ENCODES),
    ignored=("embeddings.position_ids",), prefixes=(("bert.", ""),),
)


def _roberta(stem: str, model_type: str, vocabulary: str, *more: str) -> Architecture:
    """BERT with positions counted from the padding id; a GGUF is recognized by its vocabulary."""
    also = tuple(name for s in more for name in encoder_names(s, "", *HEADS)["hf_classes"])
    types = tuple(name.lower() for name in more)
    return Architecture(
        id=model_type, gguf="bert", **encoder_names(stem, model_type, *HEADS, also=also, types=types),
        when=f"tokenizer.ggml.model={vocabulary}",
        tensors=(
            *_bert(replace(_POSITIONS, gguf_dims=("positions-pad_token_id-1,hidden",), skip="pad_token_id+1")),
            *hf_only("hidden,hidden", "pooler.dense", "lm_head.dense"), *hf_only("hidden", "lm_head.layer_norm"),
            *hf_only("vocab,hidden", "lm_head.decoder"), *hf_only("vocab", "lm_head.bias"),
            *hf_only("num_labels,hidden", "classifier", "qa_outputs"),
        ),
        keys=(*convert(DIMS, max_position_embeddings=offset_positions), LAYER_EPS, *ENCODER, TYPES, gelu(), *_ENCODES),
        ignored=("embeddings.position_ids",), prefixes=(("roberta.", ""),),
    )


_DISTILBERT = Architecture(
    id="distilbert", gguf="bert", **encoder_names("DistilBert", "distilbert", *HEADS),
    when="tensors&!tensors=token_types.weight",
    tensors=(
        embedding("embeddings.word_embeddings"), _POSITIONS, *_layer_norm("embeddings.LayerNorm", "token_embd_norm"),
        *block(
            *linear("attention.q_lin", "attn_q", "q,hidden", REQUIRED),
            *linear("attention.k_lin", "attn_k", "q,hidden", REQUIRED),
            *linear("attention.v_lin", "attn_v", "q,hidden", REQUIRED),
            *linear("attention.out_lin", "attn_output", "hidden,q", REQUIRED),
            *_layer_norm("sa_layer_norm", "attn_output_norm"), *linear("ffn.lin1", "ffn_up", "ffn,hidden", REQUIRED),
            *linear("ffn.lin2", "ffn_down", "hidden,ffn", REQUIRED),
            *_layer_norm("output_layer_norm", "layer_output_norm"), hf="transformer.layer.{n}.",
        ),
        *hf_only("hidden,hidden", "vocab_transform", "pre_classifier"), *hf_only("hidden", "vocab_layer_norm"),
        *hf_only("vocab,hidden", "vocab_projector"), *hf_only("num_labels,hidden", "classifier", "qa_outputs"),
    ),
    keys=(
        Key("attention.layer_norm_epsilon", kind="f32", field="rms_norm_eps", constant=1e-12),
        *rename(DIMS, num_layers="n_layers", hidden_size="dim", intermediate_size="hidden_dim", num_heads="n_heads"),
        *ENCODER, Key("tokenizer.ggml.token_type_count", constant=1, needed=REQUIRED), gelu("activation"),
    ),
    ignored=("embeddings.position_ids",), prefixes=(("distilbert.", ""),),
)

_relative_bias = Converter(
    refuse_if(lambda value, scope: True, "llama.cpp's {gguf} has no relative attention bias ({name} is {value})")
)
_MPNET = Architecture(
    id="mpnet", gguf="bert", **encoder_names("MPNet", "mpnet", *HEADS), when="tensors=attn_rel_b.weight",
    tensors=(
        embedding("embeddings.word_embeddings"), _POSITIONS, *_layer_norm("embeddings.LayerNorm", "token_embd_norm"),
        TensorRow(("encoder.relative_attention_bias.weight",), (), ("relative_attention_num_buckets,heads",)),
        *block(
            *(row for name in "qkv"
              for row in linear(f"attention.attn.{name}", f"attn_{name}", "q,hidden", REQUIRED)),
            *linear("attention.attn.o", "attn_output", "hidden,q", REQUIRED),
            *_layer_norm("attention.LayerNorm", "attn_output_norm"),
            *linear("intermediate.dense", "ffn_up", "ffn,hidden", REQUIRED),
            *linear("output.dense", "ffn_down", "hidden,ffn", REQUIRED),
            *_layer_norm("output.LayerNorm", "layer_output_norm"), hf="encoder.layer.{n}.",
        ),
        *hf_only("hidden,hidden", "pooler.dense", "lm_head.dense"), *hf_only("hidden", "lm_head.layer_norm"),
        *hf_only("vocab,hidden", "lm_head.decoder"), *hf_only("vocab", "lm_head.bias"),
        *hf_only("hidden,hidden", "classifier.dense"),
        *hf_only("num_labels,hidden", "classifier", "classifier.out_proj", "qa_outputs"),
    ),
    keys=(
        *DIMS, LAYER_EPS, *ENCODER, Key("tokenizer.ggml.token_type_count", constant=1, needed=REQUIRED), gelu(),
        Key("", ("relative_attention_num_buckets",), converter=_relative_bias),
    ),
    ignored=("embeddings.position_ids",), prefixes=(("mpnet.", ""),),
)

ROWS: tuple[Architecture, ...] = (
    _BERT, _roberta("Roberta", "roberta", "gpt2"), _roberta("XLMRoberta", "xlm-roberta", "t5", "Camembert"),
    _DISTILBERT, _MPNET,
)
