"""Networks of other families that are variants of Llama."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DECODER, DIMS, GROUPED, LAYER_EPS, RMS_EPS, ROPE, ROPE_DIM, SILU, SLIDING_LAYERS, VOCAB, WINDOW, attention, decoder,
    flag, fused_qkv, gated_mlp, hf_names, linear, must_be, network, norm, rename, split,
)
from aprfmt.arch.converters.common import window_rotary
from aprfmt.arch.row import Architecture, Key


_QKV = {"attn_q.weight": "q,hidden", "attn_k.weight": "kv,hidden", "attn_v.weight": "kv,hidden"}
_META_LAYOUT = Key("tensor_data_layout", (), "str", constant="Meta AI original pth")



ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="internlm2", gguf="internlm2", **hf_names("InternLM2", "internlm2"), rope_type=0,
        tensors=network(
            *norm("attention_norm", "attn_norm"),
            # Each group has its queries, one key and one value; queries and keys are in llama's rotary order.
            split(
                "attention.wqkv.weight", "q+2*kv,hidden", _QKV,
                order=("deal:kv_heads,q/kv_heads,head_dim,head_dim", "head:q+kv,heads+kv_heads,2,head_dim/2"),
            ),
            *linear("attention.wo", "attn_output", "hidden,q"), *norm("ffn_norm", "ffn_norm"),
            *gated_mlp(hf="feed_forward", names=("w1", "w3", "w2")),
            embed="model.tok_embeddings", out="output",
        ),
        keys=(*DECODER, SILU, flag("bias")),
    ),
    Architecture(
        id="orion", gguf="orion", **hf_names("Orion", "orion"),
        tensors=decoder(*attention(), norm_bias="required"),
        # Its config says rms_norm_eps, but its norms are layer norms.
        keys=(
            _META_LAYOUT, *rename(DIMS, max_position_embeddings=("max_sequence_length", "max_position_embeddings")),
            GROUPED, replace(LAYER_EPS, hf=("rms_norm_eps",)), ROPE, SILU,
        ),
    ),
    Architecture(
        id="xverse", gguf="xverse", **hf_names("Xverse", "xverse"), rope_type=0,
        tensors=decoder(*attention(permuted=True)), keys=(*DECODER, _META_LAYOUT, ROPE_DIM, SILU),
    ),
    Architecture(
        id="baichuan", gguf="baichuan", **hf_names("Baichuan", "baichuan", "BaiChuan"), rope_type=0,
        tensors=network(
            *norm("input_layernorm", "attn_norm"),
            split("self_attn.W_pack.weight", "q+2*kv,hidden", _QKV, order=("head:q+kv,heads+kv_heads,2,head_dim/2",)),
            *linear("self_attn.o_proj", "attn_output", "hidden,q"), *norm("post_attention_layernorm", "ffn_norm"),
            *gated_mlp(),
        ),
        keys=(
            *rename(DIMS, max_position_embeddings=("model_max_length", "max_position_embeddings")), RMS_EPS, ROPE,
            _META_LAYOUT, ROPE_DIM, SILU,
        ),
    ),
    Architecture(
        id="maincoder", gguf="maincoder", **hf_names("Maincoder", "maincoder"),
        tensors=decoder(*attention(qk_norm="head_dim")), keys=(*DECODER, ROPE_DIM, SILU),
    ),
    Architecture(
        id="pangu_embedded", gguf="pangu-embedded", **hf_names("PanguEmbedded", "PanguEmbedded"),
        tensors=decoder(*attention("bias", "bias")), keys=(*DECODER, VOCAB, ROPE_DIM, SILU, flag("bias")),
    ),
    Architecture(
        id="nanbeige", gguf="nanbeige", **hf_names("Nanbeige", "nanbeige"), rope_type=0,
        tensors=decoder(*attention(permuted=True)),
        keys=(
            *DECODER, VOCAB, ROPE_DIM, Key("num_loops", ("num_loops",)),
            Key("skip_loop_final_norm", ("skip_loop_final_norm",), "bool"), SILU,
        ),
    ),
    # As XHToken/Spark-X2.5-1.7B has it.
    Architecture(
        id="spark2_5", gguf="spark2_5", **hf_names("Spark2_5", "spark2_5"), nested_rope=True,
        tensors=decoder(
            *fused_qkv("self_attn.q_k_v_proj", "q+2*kv,hidden"),
            *linear("self_attn.g_proj", "attn_gate", "heads,hidden"),
            *linear("self_attn.o_proj", "attn_output", "hidden,q"),
        ),
        keys=(
            *DECODER, VOCAB, WINDOW, SLIDING_LAYERS, ROPE_DIM,
            Key("rope.dimension_count_swa", converter=window_rotary), must_be("gate_attn_act_mode", "sigmoid"),
            must_be("headwise_attn_output_gate", True), must_be("hidden_act", "gelu"),
        ),
    ),
)
