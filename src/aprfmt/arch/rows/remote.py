"""Rows of the architecture table: decoders whose code came with their checkpoints, which transformers does not have."""

from __future__ import annotations

import math
from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.converters.common import four_hidden
from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.row import REQUIRED, Architecture, Key
from aprfmt.arch.rows.parts import (
    DECODER, DIMS, EPSILON, GROUPED, HEAD_DIM, LAYER_EPS, RMS_EPS, ROPE, ROPE_DIM, SILU, VOCAB, attention, convert,
    decoder, flag, gated_mlp, gelu, hf_names, linear, must_be, network, norm, rename, split,
)


def _depth_scale_to(value: object, scope: Scope) -> float | None:
    """MiniCPM's residual scale: scale_depth over the square root of the number of layers."""
    depth = as_float(value, scope.name)
    return None if depth is None or not scope.h.num_layers else depth / math.sqrt(scope.h.num_layers)


def _depth_scale_from(value: object, scope: Scope) -> object:
    scale = as_float(value, scope.key.gguf)
    return DEFAULT if scale is None or not scope.h.num_layers else round(scale * math.sqrt(scope.h.num_layers), 6)


def _base_width_to(value: object, scope: Scope) -> float | None:
    """MiniCPM's logits are divided by how many times wider than `dim_model_base` the network is."""
    base = as_int(value, scope.name)
    return scope.h.hidden_size / base if base and scope.h.hidden_size else None


def _base_width_from(value: object, scope: Scope) -> object:
    times = as_float(value, scope.key.gguf)
    return round(scope.h.hidden_size / times) if times and scope.h.hidden_size else DEFAULT


depth_scale = Converter(_depth_scale_to, _depth_scale_from)
base_width = Converter(_base_width_to, _base_width_from)

_QKV = {"attn_q.weight": "q,hidden", "attn_k.weight": "kv,hidden", "attn_v.weight": "kv,hidden"}
_META_LAYOUT = Key("tensor_data_layout", (), "str", constant="Meta AI original pth")
_UNTIED = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048}

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="internlm2", gguf="internlm2", **hf_names("InternLM2", "internlm2"), rope_type=0,
        tensors=network(
            *norm("attention_norm", "attn_norm"),
            # Each group holds its queries, one key and one value; queries and keys are in llama's rotary order.
            split(
                "attention.wqkv.weight", "q+2*kv,hidden", _QKV,
                order=("deal:kv_heads,q/kv_heads,head_dim,head_dim", "head:q+kv,heads+kv_heads,2,head_dim/2"),
            ),
            *linear("attention.wo", "attn_output", "hidden,q"), *norm("ffn_norm", "ffn_norm"),
            *gated_mlp(hf="feed_forward", names=("w1", "w3", "w2")),
            embed="model.tok_embeddings", out="output",
        ),
        keys=(*DECODER, SILU, flag("bias")),
        defaults={"": _UNTIED},
    ),
    Architecture(
        id="orion", gguf="orion", **hf_names("Orion", "orion"),
        tensors=decoder(*attention(), norm_bias="required"),
        # Its config says rms_norm_eps, its norms are layer norms.
        keys=(
            _META_LAYOUT, *rename(DIMS, max_position_embeddings=("max_sequence_length", "max_position_embeddings")),
            GROUPED, replace(LAYER_EPS, hf=("rms_norm_eps",)), ROPE, SILU,
        ),
        defaults={"": _UNTIED},
    ),
    Architecture(
        id="xverse", gguf="xverse", **hf_names("Xverse", "xverse"), rope_type=0,
        tensors=decoder(*attention(permuted=True)), keys=(*DECODER, _META_LAYOUT, ROPE_DIM, SILU),
        defaults={"": _UNTIED},
    ),
    Architecture(
        id="baichuan", gguf="baichuan", **hf_names("Baichuan", "baichuan", "BaiChuan"), rope_type=0,
        tensors=network(
            *norm("input_layernorm", "attn_norm"),
            split(
                "self_attn.W_pack.weight", "q+2*kv,hidden", _QKV, order=("head:q+kv,heads+kv_heads,2,head_dim/2",)
            ),
            *linear("self_attn.o_proj", "attn_output", "hidden,q"), *norm("post_attention_layernorm", "ffn_norm"),
            *gated_mlp(),
        ),
        keys=(
            *rename(DIMS, max_position_embeddings=("model_max_length", "max_position_embeddings")), RMS_EPS, ROPE,
            _META_LAYOUT, ROPE_DIM, SILU,
        ),
        defaults={"": _UNTIED},
    ),
    Architecture(
        id="exaone", gguf="exaone", **hf_names("Exaone", "exaone"), gguf_only=("rope_freqs.weight",),
        tensors=network(
            *norm("ln_1", "attn_norm"), *attention(hf="attn.attention", o_proj="out_proj"), *norm("ln_2", "ffn_norm"),
            *gated_mlp(names=("c_fc_0", "c_fc_1", "c_proj")),
            hf="transformer.h.{n}.", embed="transformer.wte", last="transformer.ln_f",
        ),
        keys=(
            *rename(DIMS, num_layers=("num_layers", "num_hidden_layers")), GROUPED, ROPE,
            replace(RMS_EPS, hf=("layer_norm_epsilon",)), HEAD_DIM, ROPE_DIM, must_be("activation_function", "silu"),
        ),
        defaults={"": {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": False}},
    ),
    Architecture(
        id="maincoder", gguf="maincoder", **hf_names("Maincoder", "maincoder"),
        tensors=decoder(*attention(qk_norm="head_dim")), keys=(*DECODER, ROPE_DIM, SILU),
        defaults={"": _UNTIED},
    ),
    Architecture(
        id="pangu_embedded", gguf="pangu-embedded", **hf_names("PanguEmbedded", "PanguEmbedded"),
        tensors=decoder(*attention("bias", "bias")), keys=(*DECODER, VOCAB, ROPE_DIM, SILU, flag("bias")),
        defaults={"": _UNTIED},
    ),
    Architecture(
        id="qwen", gguf="qwen", **hf_names("QWen", "qwen", end="LMHeadModel"),
        tensors=network(
            *norm("ln_1", "attn_norm"), *linear("attn.c_attn", "attn_qkv", "3*hidden,hidden", REQUIRED),
            *linear("attn.c_proj", "attn_output", "hidden,hidden"), *norm("ln_2", "ffn_norm"),
            *linear("mlp.w1", "ffn_up", "ffn/2,hidden"), *linear("mlp.w2", "ffn_gate", "ffn/2,hidden"),
            *linear("mlp.c_proj", "ffn_down", "hidden,ffn/2"),
            hf="transformer.h.{n}.", embed="transformer.wte", last="transformer.ln_f",
        ),
        keys=(
            *DIMS, replace(ROPE, hf=("rotary_emb_base",)), replace(RMS_EPS, hf=("layer_norm_epsilon",)),
            must_be("no_bias", True), Key("", ("seq_length",)),
        ),
        defaults={"": {"layer_norm_epsilon": 1e-6, "tie_word_embeddings": False, "no_bias": True}},
    ),
    Architecture(
        id="codeshell", gguf="codeshell", **hf_names("CodeShell", "codeshell"), gguf_only=(), head_always=True,
        ignored=(".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"),
        tensors=network(
            *norm("ln_1", "attn_norm", bias=REQUIRED), *linear("attn.c_attn", "attn_qkv", "q+2*kv,hidden", REQUIRED),
            *linear("attn.c_proj", "attn_output", "hidden,q", REQUIRED), *norm("ln_2", "ffn_norm", bias=REQUIRED),
            *linear("mlp.c_fc", "ffn_up", "ffn,hidden", REQUIRED),
            *linear("mlp.c_proj", "ffn_down", "hidden,ffn", REQUIRED),
            hf="transformer.h.{n}.", embed="transformer.wte", last="transformer.ln_f", norm_bias=REQUIRED,
        ),
        keys=(
            *convert(
                rename(
                    DIMS, max_position_embeddings="n_positions", hidden_size="n_embd", num_layers="n_layer",
                    num_heads="n_head", intermediate_size="n_inner",
                ),
                intermediate_size=four_hidden,
            ),
            replace(GROUPED, hf=("num_query_groups",)), EPSILON, ROPE, gelu("activation_function"),
        ),
        defaults={"": {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}},
    ),
    Architecture(
        id="nanbeige", gguf="nanbeige", **hf_names("Nanbeige", "nanbeige"), rope_type=0,
        tensors=decoder(*attention(permuted=True)),
        keys=(
            *DECODER, VOCAB, ROPE_DIM, Key("num_loops", ("num_loops",)),
            Key("skip_loop_final_norm", ("skip_loop_final_norm",), "bool"), SILU,
        ),
        defaults={"": _UNTIED | {"num_loops": 1, "skip_loop_final_norm": False}},
    ),
    Architecture(
        id="minicpm", gguf="minicpm", **hf_names("MiniCPM", "minicpm"), rope_type=0,
        gguf_only=("rope_factors_long.weight", "rope_factors_short.weight"),
        tensors=decoder(*attention(permuted=True)),
        keys=(
            *DECODER, Key("embedding_scale", ("scale_emb",), "f32"),
            Key("residual_scale", ("scale_depth",), "f32", converter=depth_scale),
            Key("logit_scale", ("dim_model_base",), "f32", converter=base_width), SILU,
        ),
        defaults={"": {**_UNTIED, "tie_word_embeddings": True, "scale_emb": 1, "scale_depth": 1, "dim_model_base": 1}},
    ),
)
