"""Rows of the architecture table: encoders whose code came with their checkpoints, which transformers does not have."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.fields import as_int, as_mapping
from aprfmt.arch.row import REQUIRED, Architecture, Key
from aprfmt.arch.rows.parts import (
    DIMS, LAYER_EPS, RMS_EPS, ROPE, block, convert, embedding, gelu, linear, must_be, norm, rename, tensor,
)
from aprfmt.arch.rows.parts_encoder import ENCODER, NO_SCALING, TYPES, hf_only


def _post_norm_normalize(value: object, scope: Scope) -> bool:
    """Which of two networks of one class: the name of its code, in `auto_map`, tells."""
    return value is True or any("qk-post-norm" in str(code) for code in as_mapping(value).values())


def _two_thirds_to(value: object, scope: Scope) -> int | None:
    """NeoBERT's width: a third of what the config says is the gate's."""
    width = as_int(value, scope.name)
    return None if width is None else 2 * width // 3


def _two_thirds_from(value: object, scope: Scope) -> object:
    width = as_int(value, scope.key.gguf)
    return DEFAULT if width is None else width * 3 // 2


qk_post_norm = Converter(
        nothing, lambda value, scope: "blk.0.attn_q_norm.weight" in scope.names, normalize=_post_norm_normalize
    )
two_thirds = Converter(_two_thirds_to, _two_thirds_from)
# Files of llama.cpp's converter, which do not say it, have the checkpoint's order.
by_head = Converter(
        lambda value, scope: None if value else False,
        lambda value, scope: value is None or bool(value),
        normalize=lambda value, scope: False,
    )

_POST = "qk_post_norm"
_PRE = f"!{_POST}"
_JINA = ("JinaBertModel", "JinaBertForMaskedLM")
_NEO = ("NeoBERT", "NeoBERTLMHead")
_BY_HEAD, _BY_THIRDS = "qkv_by_head", "deal:heads,head_dim,head_dim,head_dim"
"""The checkpoint has Q, K and V head by head, llama.cpp takes all Q, all K, all V; its converter leaves them."""

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="jina_bert_v2", required={"tokenizer.ggml.token_type_count": ""}, gguf="jina-bert-v2", hf_class=_JINA[1],
        model_type="bert", hf_classes=_JINA, bare_classes=_JINA, model_types=(),
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
                *norm("layer_norm_2", "layer_output_norm", bias=_POST, need=_POST),
                hf="encoder.layer.{n}.",
            ),
            *hf_only("hidden,hidden", "pooler.dense", "cls.predictions.transform.dense"),
            *hf_only("hidden", "cls.predictions.transform.LayerNorm"),
            *hf_only("vocab,hidden", "cls.predictions.decoder"), *hf_only("vocab", "cls.predictions.bias"),
        ),
        keys=(
            *DIMS, LAYER_EPS, *ENCODER, TYPES, Key("", ("qk_post_norm", "auto_map"), converter=qk_post_norm),
            must_be("feed_forward_type", "geglu"), must_be("position_embedding_type", "alibi"), gelu(),
        ),
        gguf_only=(), prefixes=(("bert.", ""),),
        defaults={
            "": {
                "layer_norm_eps": 1e-12, "max_position_embeddings": 8192, "type_vocab_size": 2, "hidden_act": "gelu",
                "feed_forward_type": "geglu", "position_embedding_type": "alibi", "tie_word_embeddings": True,
                "pad_token_id": 0,
            }
        },
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
                *linear("ffn.w3", "ffn_down", "hidden,2*ffn/3"),
                hf="transformer_encoder.{n}.",
            ),
            *norm("layer_norm", "enc.output_norm"), *hf_only("vocab,hidden", "decoder"),
        ),
        keys=(
            *convert(rename(DIMS, max_position_embeddings="max_length"), intermediate_size=two_thirds), ROPE,
            replace(RMS_EPS, hf=("norm_eps",)), *ENCODER, NO_SCALING,
            Key("attention.qkv_by_head", (_BY_HEAD,), "bool", converter=by_head),
        ),
        gguf_only=(), ignored=("freqs_cis",), prefixes=(("model.", ""),),
        defaults={
            "": {"norm_eps": 1e-6, "max_length": 4096, "pooling": "cls", "tie_word_embeddings": True, "pad_token_id": 0}
        },
    ),
)
