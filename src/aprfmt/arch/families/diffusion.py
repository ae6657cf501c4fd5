"""Masked diffusion language models."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DECODER, DIMS, GROUPED, PAIRS, RMS_EPS, ROPE, ROPE_DIM, SILU, VOCAB, WHOLE_HEADS, attention, class_names, decoder,
    hf_names, linear, must_be, network, norm, rename,
)
from aprfmt.arch.blocks.moe import ALL_SPARSE, NO_BIAS, WIDTH, moe_decoder, moe_keys, router_and_experts
from aprfmt.arch.row import REQUIRED, Architecture, Key


_MASKED = (
    Key("attention.causal", kind="bool", constant=False), Key("tokenizer.ggml.mask_token_id", ("mask_token_id",)),
)
"""Attention is bidirectional; unknown positions contain the mask token."""
_NO_SHIFT = Key("diffusion.shift_logits", kind="bool", constant=False)
"""The logits of a position are those of its own token, not of the next."""
_QKV_BIAS = "include_bias|include_qkv_bias"

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="llada", gguf="llada", **class_names("LLaDAModelLM", types=("llada",)), rope_type=0,
        tensors=network(
            *norm("attn_norm", "attn_norm"), *linear("q_proj", "attn_q", "q,hidden", _QKV_BIAS, order=PAIRS["q"]),
            *linear("k_proj", "attn_k", "kv,hidden", _QKV_BIAS, order=PAIRS["kv"]),
            *linear("v_proj", "attn_v", "kv,hidden", _QKV_BIAS),
            *linear("attn_out", "attn_output", "hidden,q", "include_bias"), *norm("ff_norm", "ffn_norm"),
            *linear("ff_proj", "ffn_gate", "ffn,hidden", "include_bias"),
            *linear("up_proj", "ffn_up", "ffn,hidden", "include_bias"),
            *linear("ff_out", "ffn_down", "hidden,ffn", "include_bias"), hf="model.transformer.blocks.{n}.",
            embed="model.transformer.wte", last="model.transformer.ln_f", out="model.transformer.ff_out",
        ),
        keys=(
            *rename(
                DIMS, num_layers="n_layers", max_position_embeddings="max_sequence_length", hidden_size="d_model",
                intermediate_size="mlp_hidden_size", num_heads="n_heads",
            ),
            replace(GROUPED, hf=("n_kv_heads",)), ROPE, RMS_EPS, VOCAB, ROPE_DIM, *_MASKED, _NO_SHIFT,
            must_be("layer_norm_type", "rms"), must_be("bias_for_layer_norm", False),
            must_be("attention_layer_norm", False), must_be("block_type", "llama"), must_be("activation_type", "silu"),
            must_be("rope", True), must_be("alibi", False), must_be("input_emb_norm", False),
            must_be("scale_logits", False), must_be("weight_tying", False),
        ),
    ),
    Architecture(
        id="llada_moe", gguf="llada-moe", **hf_names("LLaDAMoE", "lladamoe", end="ModelLM"),
        tensors=moe_decoder(*attention(qk_norm="head_dim"), *router_and_experts()),
        keys=(
            *rename(
                moe_keys(
                    replace(WIDTH, hf=("expert_intermediate_size",)), WHOLE_HEADS, *_MASKED, _NO_SHIFT, NO_BIAS,
                    must_be("qk_layernorm", True), must_be("norm_topk_prob", False),
                    must_be("shared_expert_intermediate_size", 0), must_be("moe_router_score_function", "softmax"),
                    must_be("moe_router_enable_expert_bias", False),
                ),
                intermediate_size="dense_intermediate_size",
            ),
        ),
    ),
    Architecture(
        id="dream", gguf="dream", **class_names("DreamModel", types=("Dream",)),
        tensors=decoder(*attention(REQUIRED)),
        keys=(*DECODER, WHOLE_HEADS, *_MASKED, SILU, must_be("use_sliding_window", False)),
    ),
    Architecture(
        id="rnd1", gguf="rnd1", **class_names("RND1", "RND1LM", types=("rnd1",)),
        tensors=moe_decoder(*attention(qk_norm="head_dim"), *router_and_experts()),
        keys=moe_keys(
            WIDTH, *_MASKED, NO_BIAS, must_be("norm_topk_prob", True), *ALL_SPARSE,
            must_be("use_sliding_window", False),
        ),
    ),
)
