"""Rows of the architecture table: decoders whose code came with their checkpoints, which transformers does not have."""

from __future__ import annotations

from aprfmt.arch.row import Architecture
from aprfmt.arch.rows.parts import (
    DECODER,
    SILU,
    block,
    embedding,
    final_norm,
    flag,
    gated_mlp,
    head,
    hf_names,
    linear,
    norm,
    split,
)

_QKV = {"attn_q.weight": "q,hidden", "attn_k.weight": "kv,hidden", "attn_v.weight": "kv,hidden"}

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="internlm2",
        gguf="internlm2",
        **hf_names("InternLM2", "internlm2"),
        rope_type=0,
        tensors=(
            embedding("model.tok_embeddings"),
            *block(
                *norm("attention_norm", "attn_norm"),
                # Each group holds its queries, one key and one value; queries and keys are in llama's rotary order.
                split(
                    "attention.wqkv.weight",
                    "q+2*kv,hidden",
                    _QKV,
                    order=("deal:kv_heads,q/kv_heads,head_dim,head_dim", "head:q+kv,heads+kv_heads,2,head_dim/2"),
                ),
                *linear("attention.wo", "attn_output", "hidden,q"),
                *norm("ffn_norm", "ffn_norm"),
                *gated_mlp(hf="feed_forward", names=("w1", "w3", "w2")),
            ),
            *final_norm(),
            *head("output"),
        ),
        keys=(*DECODER, SILU, flag("bias")),
        defaults={"": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048}},
    ),
)
