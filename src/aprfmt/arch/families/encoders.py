"""Encoders after BERT."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, GROUPED, HEAD_DIM, LAYER_EPS, RMS_EPS, ROPE, VOCAB, attention, block, convert, embedding, final_norm,
    gated_mlp, gelu, linear, must_be, norm, rename, tensor,
)
from aprfmt.arch.blocks.encoder import ENCODER, HEADS, TYPES, encoder_names, hf_only
from aprfmt.arch.converter import DEFAULT, Converter, GgufKeys, Scope, nothing
from aprfmt.arch.converters.common import integer, no_rope_scaling
from aprfmt.arch.converters.heads import pooling
from aprfmt.arch.converters.layers import FULL, SLIDING, kinds_of, periodic
from aprfmt.arch.fields import as_int, as_mapping
from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Key, TensorRow
from aprfmt.errors import CorruptError


NO_SCALING = Key("rope.scaling.type", kind="str", converter=no_rope_scaling)
"""Says that positions are not scaled, if they are not."""
CLASSIFIER = "ForSequenceClassification"
_MODERNBERT_PERIOD = 3
"""A ModernBERT without layer types: every third layer, starting with the first, has full attention."""


def _modernbert_to_gguf(value: object, scope: Scope) -> object:
    """Period of the full-attention layers, starting with the first; a list if they are not periodic."""
    if not isinstance(value, list):
        raise CorruptError("layer_types is not a list")
    full = [i for i, kind in enumerate(value) if kind == FULL]
    period = full[1] if len(full) > 1 else len(value)
    if value == kinds_of(periodic(period, len(value), first=0)):
        return period
    return GgufKeys({scope.key.gguf: ("bool[]", [kind == SLIDING for kind in value])})


def _modernbert_from_gguf(value: object, scope: Scope) -> object:
    if isinstance(value, list):
        return kinds_of([bool(item) for item in value])
    period = as_int(value, scope.key.gguf) or _MODERNBERT_PERIOD
    return kinds_of(periodic(period, scope.h.num_layers, first=0)) if scope.h.num_layers else DEFAULT


def _modernbert_derive(scope: Scope) -> list[str] | None:
    period = as_int(scope.h.extra.pop("global_attn_every_n_layers", None), "global_attn_every_n_layers")
    n_layers = scope.h.num_layers
    return kinds_of(periodic(period or _MODERNBERT_PERIOD, n_layers, first=0)) if n_layers else None


modernbert_layers = Converter(_modernbert_to_gguf, _modernbert_from_gguf, _modernbert_derive)


def _rotary_bert(fused: str, mlp: tuple[TensorRow, ...], bias: str | None) -> tuple[TensorRow, ...]:
    """BERT with rotary positions and fused attention, under the names of its authors' code."""
    return (
        embedding("embeddings.word_embeddings"),
        tensor("embeddings.token_type_embeddings.weight", "token_types.weight", "type_vocab_size,hidden"),
        *norm("emb_ln", "token_embd_norm", bias=REQUIRED),
        *block(
            *linear(f"{fused}.Wqkv", "attn_qkv", "3*q,hidden", bias),
            *linear(f"{fused}.out_proj", "attn_output", "hidden,q", bias),
            *norm("norm1", "attn_output_norm", bias=REQUIRED), *mlp, *norm("norm2", "layer_output_norm", bias=REQUIRED),
            hf="encoder.layers.{n}.",
        ),
        *hf_only("hidden,hidden", "pooler.dense"),
    )


_NOMIC = Architecture(
    id="nomic_bert", gguf="nomic-bert", **encoder_names("NomicBert", "nomic_bert", *HEADS[:2], CLASSIFIER),
    tensors=(
        *_rotary_bert(
            "attn",
            (
                *linear("mlp.fc12", "ffn_gate", "ffn,hidden"), *linear("mlp.fc11", "ffn_up", "ffn,hidden"),
                *linear("mlp.fc2", "ffn_down", "hidden,ffn"),
            ),
            None,
        ),
        *hf_only("hidden,hidden", "cls.predictions.transform.dense"),
        *hf_only("hidden", "cls.predictions.transform.layer_norm"), *hf_only("vocab,hidden", "cls.predictions.decoder"),
        *hf_only("vocab", "cls.predictions.bias"), *hf_only("num_labels,hidden", "classifier"),
    ),
    keys=(
        *rename(
            DIMS, num_layers=("num_hidden_layers", "n_layer"),
            max_position_embeddings=("max_position_embeddings", "max_trained_positions", "n_positions"),
            hidden_size=("hidden_size", "n_embd"), intermediate_size=("intermediate_size", "n_inner"),
            num_heads=("num_attention_heads", "n_head"),
        ),
        ROPE, LAYER_EPS, HEAD_DIM, *ENCODER, TYPES, must_be("hidden_act", "silu"),
    ),
    prefixes=(("nomic_bert.", ""),),
)
_JINA3 = Architecture(
    id="jina_embeddings_v3", gguf="jina-bert-v3",
    **encoder_names("JinaEmbeddingsV3", "jina_embeddings_v3", *HEADS, CLASSIFIER),
    tensors=(
        *_rotary_bert(
            "mixer",
            (
                *linear("mlp.fc1", "ffn_up", "ffn,hidden", REQUIRED),
                *linear("mlp.fc2", "ffn_down", "hidden,ffn", REQUIRED),
            ),
            REQUIRED,
        ),
        *hf_only("hidden,hidden", "lm_head.dense", "classifier.dense"), *hf_only("hidden", "lm_head.layer_norm"),
        *hf_only("vocab,hidden", "lm_head.decoder"), *hf_only("vocab", "lm_head.bias"),
        *hf_only("num_labels,hidden", "classifier.out_proj", "classifier", "qa_outputs"),
    ),
    keys=(*DIMS, ROPE, LAYER_EPS, *ENCODER, TYPES, gelu()), prefixes=(("roberta.", ""),),
)
_NORM_BIASES = hf_only("hidden", "embeddings.norm.bias", "final_norm.bias") + block(
    *hf_only("hidden", "attn_norm.bias", "mlp_norm.bias"), hf="layers.{n}.",
)
"""ModernBERT with `norm_bias`, which llama.cpp does not support."""
_MODERN = Architecture(
    id="modernbert", gguf="modern-bert", **encoder_names("ModernBert", "modernbert", *HEADS),
    tensors=(
        embedding("embeddings.tok_embeddings"), *norm("embeddings.norm", "token_embd_norm"),
        *block(
            *norm("attn_norm", "attn_norm", layers="!first"), *linear("attn.Wqkv", "attn_qkv", "3*q,hidden"),
            *linear("attn.Wo", "attn_output", "hidden,q"), *norm("mlp_norm", "ffn_norm"),
            *linear("mlp.Wi", "ffn_up", "2*ffn,hidden"), *linear("mlp.Wo", "ffn_down", "hidden,ffn"), hf="layers.{n}.",
        ),
        *final_norm("final_norm"), *hf_only("vocab,hidden", "decoder"), *hf_only("hidden,hidden", "head.dense"),
        *hf_only("hidden", "head.norm"), *hf_only("num_labels,hidden", "classifier"), *_NORM_BIASES,
    ),
    keys=(
        *DIMS, ROPE, replace(LAYER_EPS, hf=("norm_eps",)), *ENCODER,
        Key("classifier.pooling_type", ("classifier_pooling",), converter=pooling),
        Key("attention.sliding_window", ("local_attention",)),
        Key("attention.sliding_window_pattern", ("layer_types",), converter=modernbert_layers),
        Key("", ("global_attn_every_n_layers",)), NO_SCALING, VOCAB,
        Key("hidden_activation", ("hidden_activation",), "str", allowed=("gelu", "silu")), must_be("norm_bias", False),
        must_be("attention_bias", False), must_be("mlp_bias", False),
    ),
    prefixes=(("model.", ""),), nested_rope=True,
)
_EUROBERT = Architecture(
    id="eurobert", gguf="eurobert",
    **encoder_names("EuroBert", "eurobert", *HEADS[:2], CLASSIFIER, also=("JinaEmbeddingsV5Model",)),
    tensors=(
        embedding("embed_tokens"),
        *block(
            *norm("input_layernorm", "attn_norm"), *attention(OPTIONAL), *norm("post_attention_layernorm", "ffn_norm"),
            *gated_mlp(), hf="layers.{n}.",
        ),
        *final_norm("norm"), *hf_only("vocab,hidden", "lm_head"), *hf_only("hidden,hidden", "dense"),
        *hf_only("num_labels,hidden", "classifier"),
    ),
    keys=(
        *DIMS, GROUPED, ROPE, RMS_EPS, HEAD_DIM, *ENCODER, NO_SCALING, must_be("hidden_act", "silu"),
        must_be("mlp_bias", False), must_be("attention_bias", False),
    ),
    prefixes=(("model.", ""),),
)


def _post_norm_normalize(value: object, scope: Scope) -> bool:
    """Which of two networks of one class: the name of its code in `auto_map` tells."""
    return value is True or any("qk-post-norm" in str(code) for code in as_mapping(value).values())


qk_post_norm = Converter(
    nothing, lambda value, scope: "blk.0.attn_q_norm.weight" in scope.names, normalize=_post_norm_normalize,
)
two_thirds = integer(lambda width: 2 * width // 3, lambda width: width * 3 // 2)
"""NeoBERT's width: a third of the config's value is the gate's."""
# Files of llama.cpp's converter, which do not say so, have the checkpoint's order.
by_head = Converter(
    lambda value, scope: None if value else False, lambda value, scope: value is None or bool(value),
    normalize=lambda value, scope: False,
)
_POST = "qk_post_norm"
_PRE = f"!{_POST}"
_JINA = ("JinaBertModel", "JinaBertForMaskedLM")
_NEO = ("NeoBERT", "NeoBERTLMHead")
_BY_HEAD, _BY_THIRDS = "qkv_by_head", "deal:heads,head_dim,head_dim,head_dim"
"""The checkpoint interleaves Q, K and V by head, llama.cpp expects all Q, all K, all V; its converter does not reorder.
"""


ROWS: tuple[Architecture, ...] = (
    _NOMIC, _JINA3, _MODERN, _EUROBERT,
    Architecture(
        id="jina_bert_v2", gguf="jina-bert-v2", hf_class=_JINA[1], model_type="bert", hf_classes=_JINA,
        bare_classes=_JINA, model_types=(),
        tensors=(
            embedding("embeddings.word_embeddings"),
            tensor("embeddings.token_type_embeddings.weight", "token_types.weight", "type_vocab_size,hidden"),
            *norm("embeddings.LayerNorm", "token_embd_norm", bias=REQUIRED),
            *block(
                *linear("attention.self.query", "attn_q", "q,hidden", REQUIRED),
                *linear("attention.self.key", "attn_k", "q,hidden", REQUIRED),
                *linear("attention.self.value", "attn_v", "q,hidden", REQUIRED),
                *norm("attention.self.layer_norm_q", "attn_q_norm", bias=_POST, need=_POST),
                *norm("attention.self.layer_norm_k", "attn_k_norm", bias=_POST, need=_POST),
                *linear("attention.output.dense", "attn_output", "hidden,q", REQUIRED),
                *norm("attention.output.LayerNorm", "attn_output_norm", bias=REQUIRED),
                *norm("layer_norm_1", "attn_norm_2", bias=_POST, need=_POST),
                *linear("mlp.gated_layers", "ffn_up", "2*ffn,hidden", need=_PRE),
                *linear("mlp.up_gated_layer", "ffn_up", "2*ffn,hidden", need=_POST),
                *linear("mlp.wo", "ffn_down", "hidden,ffn", _PRE, _PRE),
                *linear("mlp.down_layer", "ffn_down", "hidden,ffn", _POST, _POST),
                *norm("mlp.layernorm", "layer_output_norm", bias=_PRE, need=_PRE),
                *norm("layer_norm_2", "layer_output_norm", bias=_POST, need=_POST), hf="encoder.layer.{n}.",
            ),
            *hf_only("hidden,hidden", "pooler.dense", "cls.predictions.transform.dense"),
            *hf_only("hidden", "cls.predictions.transform.LayerNorm"),
            *hf_only("vocab,hidden", "cls.predictions.decoder"), *hf_only("vocab", "cls.predictions.bias"),
        ),
        keys=(
            *DIMS, LAYER_EPS, *ENCODER, TYPES, Key("", ("qk_post_norm", "auto_map"), converter=qk_post_norm),
            must_be("feed_forward_type", "geglu"), must_be("position_embedding_type", "alibi"), gelu(),
        ),
        prefixes=(("bert.", ""),),
    ),
    Architecture(
        id="neobert", gguf="neo-bert", hf_class=_NEO[0], model_type="neobert", hf_classes=_NEO, bare_classes=_NEO,
        model_types=("neobert",), rope_type=0,
        tensors=(
            embedding("encoder"),
            *block(
                *norm("attention_norm", "attn_norm"),
                *linear("qkv", "attn_qkv", "3*q,hidden", need=f"!{_BY_HEAD}", order=(_BY_THIRDS,)),
                *linear("qkv", "attn_qkv", "3*q,hidden", need=_BY_HEAD), *linear("wo", "attn_output", "hidden,hidden"),
                *norm("ffn_norm", "ffn_norm"), *linear("ffn.w12", "ffn_up", "4*ffn/3,hidden"),
                *linear("ffn.w3", "ffn_down", "hidden,2*ffn/3"), hf="transformer_encoder.{n}.",
            ),
            *norm("layer_norm", "enc.output_norm"), *hf_only("vocab,hidden", "decoder"),
        ),
        keys=(
            *convert(rename(DIMS, max_position_embeddings="max_length"), intermediate_size=two_thirds), ROPE,
            replace(RMS_EPS, hf=("norm_eps",)), *ENCODER, NO_SCALING,
            Key("attention.qkv_by_head", (_BY_HEAD,), "bool", converter=by_head),
        ),
        ignored=("freqs_cis",), prefixes=(("model.", ""),),
    ),
)
