"""Building blocks of rows: DeepSeek's multi-head latent attention, and the indexer that makes it sparse."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, GROUPED, RMS_EPS, ROPE, SILU, VOCAB, gated_mlp, linear, must_be, norm, optional, rename, split,
)
from aprfmt.arch.blocks.moe import (
    COUNT, DENSE_LAYERS, GROUPS, SHARED_COUNT, USED, WEIGHTS_SCALE, WIDTH, moe_decoder, router_and_experts,
    shared_expert,
)
from aprfmt.arch.converters.common import (
    gating, mla_key_length, mla_key_width, mla_kv_heads, mla_value_length, mla_value_width, only_true, or_zero,
    yarn_log,
)
from aprfmt.arch.converters.sparse import turned_keys
from aprfmt.arch.row import REQUIRED, Key, TensorRow


_NOPE, _ROPE_PART, _LATENT = "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"


def latent_attention() -> tuple[TensorRow, ...]:
    """Queries, full or low-rank; keys and values from one latent vector, which GGUF stores as two factors."""
    bias, rank, q = "attention_bias", "q_lora_rank", f"heads*{_NOPE}+heads*{_ROPE_PART}"
    return (
        *linear("self_attn.q_proj", "attn_q", f"{q},hidden", need=f"!{rank}"),
        *linear("self_attn.q_a_proj", "attn_q_a", f"{rank},hidden", f"{bias}&{rank}", need=rank),
        *norm("self_attn.q_a_layernorm", "attn_q_a_norm", rank, need=rank),
        *linear("self_attn.q_b_proj", "attn_q_b", f"{q},{rank}", need=rank),
        *linear("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", f"{_LATENT}+{_ROPE_PART},hidden", bias),
        *norm("self_attn.kv_a_layernorm", "attn_kv_a_norm", _LATENT),
        split(
            "self_attn.kv_b_proj.weight", f"heads*{_NOPE}+heads*v_head_dim,{_LATENT}",
            {"attn_k_b.weight": f"heads,{_LATENT},{_NOPE}", "attn_v_b.weight": f"heads,v_head_dim,{_LATENT}"},
            order=(f"deal:heads,{_NOPE},v_head_dim",), gguf_transposed=(True, False),
        ),
        # Files from before the two factors store the matrix as Hugging Face does.
        *optional(*linear("self_attn.kv_b_proj", "attn_kv_b", f"heads*{_NOPE}+heads*v_head_dim,{_LATENT}")),
        *linear("self_attn.o_proj", "attn_output", "hidden,heads*v_head_dim", bias),
    )


def mla_decoder(
    router: tuple[TensorRow, ...] = (), more: tuple[TensorRow, ...] = (), mlp_bias: str | None = None
) -> tuple[TensorRow, ...]:
    """Latent attention, routed and shared experts, the first layers dense; `more` is added to each layer."""
    return moe_decoder(
        *latent_attention(), *router_and_experts("moe", router),
        *shared_expert("mlp.shared_experts", "n_shared_experts*moe_ffn", layers="moe", bias=mlp_bias),
        *gated_mlp(mlp_bias, layers="dense"), *more,
    )


LATENT_SIZES = (
    Key("attention.kv_lora_rank", ("kv_lora_rank",)),
    Key("attention.key_length", converter=mla_key_width, needed=REQUIRED),
    Key("attention.key_length_mla", ("qk_nope_head_dim",), converter=mla_key_length),
    Key("attention.value_length_mla", ("v_head_dim",), converter=mla_value_length),
    Key("rope.dimension_count", ("qk_rope_head_dim",)),
)
"""Sizes of latent attention in hybrid networks."""


def mla_keys(*family: Key) -> tuple[Key, ...]:
    """Sizes of a decoder with latent attention and routed experts, and the family's own keys."""
    return (
        *DIMS,
        # llama.cpp sees one key-value head, the latent vector.
        replace(GROUPED, converter=mla_kv_heads, needed=REQUIRED), ROPE, RMS_EPS,
        *rename((COUNT, USED), num_experts=("n_routed_experts", "num_experts", "num_local_experts")), *GROUPS,
        Key("expert_gating_func", ("scoring_func",), converter=gating),
        Key("attention.key_length", converter=mla_key_width, needed=REQUIRED),
        Key("attention.value_length", converter=mla_value_width), DENSE_LAYERS, VOCAB,
        # Not for the Lite models, recognized by their number of layers, whose Q is not low-rank.
        Key(
            "attention.q_lora_rank", ("q_lora_rank",), converter=or_zero,
            needed="!block_count=26&!block_count=27&!block_count=48",
        ),
        Key("attention.kv_lora_rank", ("kv_lora_rank",)),
        Key("attention.key_length_mla", ("qk_nope_head_dim",), converter=mla_key_length),
        Key("attention.value_length_mla", ("v_head_dim",), converter=mla_value_length), WIDTH, SHARED_COUNT,
        WEIGHTS_SCALE, Key("expert_weights_norm", ("norm_topk_prob",), "bool", converter=only_true),
        Key("rope.dimension_count", ("qk_rope_head_dim",)),
        Key("rope.scaling.yarn_log_multiplier", kind="f32", converter=yarn_log), must_be("attention_bias", False),
        SILU, *family,
    )


def indexer(layers: str = "") -> tuple[TensorRow, ...]:
    """The indexer, which scores positions so that a query attends to the best only: low-rank queries, one key, head
    weights.
    """
    hf, heads, size = "self_attn.indexer", "index_n_heads", "index_head_dim"
    return (
        *linear(f"{hf}.wq_b", "indexer.attn_q_b", f"{heads}*{size},q_lora_rank", layers=layers),
        *linear(f"{hf}.wk", "indexer.attn_k", f"{size},hidden", layers=layers),
        *norm(f"{hf}.k_norm", "indexer.k_norm", size, REQUIRED, layers=layers),
        *linear(f"{hf}.weights_proj", "indexer.proj", f"{heads},hidden", layers=layers),
    )


INDEXER = (
    Key("attention.indexer.head_count", ("index_n_heads",)),
    Key("attention.indexer.key_length", ("index_head_dim",), converter=turned_keys),
    Key("attention.indexer.top_k", ("index_topk",)),
)
"""Number of indexer heads, their size, and the number of positions a query attends to."""
KEY, KV_LATENT = "qk_nope_head_dim+head_dim", "kv_lora_rank"


def joint_latent_attention(*queries: TensorRow) -> tuple[TensorRow, ...]:
    """Keys and values from one latent vector, and a rotated part shared by all heads."""
    return (
        *queries, *linear("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", f"{KV_LATENT}+head_dim,hidden"),
        *norm("self_attn.kv_a_layernorm", "attn_kv_a_norm", KV_LATENT),
        *linear("self_attn.kv_b_proj", "attn_kv_b", f"heads*qk_nope_head_dim+heads*v_head_dim,{KV_LATENT}"),
        *linear("self_attn.o_proj", "attn_output", "hidden,heads*v_head_dim"),
    )

