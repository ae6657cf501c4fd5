"""Rows of the architecture table: DeepSeek's multi-head latent attention."""

from __future__ import annotations

from aprfmt.arch.row import Architecture, Difference, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DIMS,
    RMS_EPS,
    ROPE,
    SILU,
    VOCAB,
    gated_mlp,
    hf_names,
    linear,
    must_be,
    norm,
    optional,
    rename,
    split,
)
from aprfmt.arch.rows.parts_moe import (
    COUNT,
    DENSE_LAYERS,
    GROUPS,
    SHARED_COUNT,
    USED,
    WEIGHTS_SCALE,
    WIDTH,
    draft_layer,
    moe_decoder,
    router_and_experts,
    selection_bias,
    shared_expert,
)

_NOPE, _ROPE_PART, _LATENT = "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"


def _latent_attention() -> tuple[TensorRow, ...]:
    """Queries, whole or of low rank; keys and values of one latent vector, which GGUF keeps in two factors."""
    bias, rank, q = "attention_bias", "q_lora_rank", f"heads*{_NOPE}+heads*{_ROPE_PART}"
    return (
        *linear("self_attn.q_proj", "attn_q", f"{q},hidden", need=f"!{rank}"),
        *linear("self_attn.q_a_proj", "attn_q_a", f"{rank},hidden", bias, need=rank),
        *norm("self_attn.q_a_layernorm", "attn_q_a_norm", rank, need=rank),
        *linear("self_attn.q_b_proj", "attn_q_b", f"{q},{rank}", need=rank),
        *linear("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", f"{_LATENT}+{_ROPE_PART},hidden", bias),
        *norm("self_attn.kv_a_layernorm", "attn_kv_a_norm", _LATENT),
        split(
            "self_attn.kv_b_proj.weight",
            f"heads*{_NOPE}+heads*v_head_dim,{_LATENT}",
            {"attn_k_b.weight": f"heads,{_LATENT},{_NOPE}", "attn_v_b.weight": f"heads,v_head_dim,{_LATENT}"},
            order=(f"deal:heads,{_NOPE},v_head_dim",),
            gguf_transposed=(True, False),
        ),
        # Files from before the two factors hold the matrix as Hugging Face does.
        *optional(*linear("self_attn.kv_b_proj", "attn_kv_b", f"heads*{_NOPE}+heads*v_head_dim,{_LATENT}")),
        *linear("self_attn.o_proj", "attn_output", "hidden,heads*v_head_dim", bias),
    )


def _decoder(router: tuple[TensorRow, ...] = (), more: tuple[TensorRow, ...] = ()) -> tuple[TensorRow, ...]:
    return moe_decoder(
        *_latent_attention(),
        *router_and_experts("moe", router),
        *shared_expert("mlp.shared_experts", "n_shared_experts*moe_ffn", layers="moe"),
        *gated_mlp(layers="dense"),
        *more,
    )


def _keys(*family: Key) -> tuple[Key, ...]:
    return (
        *DIMS,
        # The runtime sees one key-value head, the latent vector.
        Key("attention.head_count_kv", ("num_key_value_heads",), field="num_kv_heads", via="mla_kv_heads"),
        ROPE,
        RMS_EPS,
        *rename((COUNT, USED), num_experts=("n_routed_experts", "num_experts", "num_local_experts")),
        *GROUPS,
        Key("expert_gating_func", ("scoring_func",), via="gating"),
        Key("attention.key_length", via="mla_key_width"),
        Key("attention.value_length", via="mla_value_width"),
        DENSE_LAYERS,
        VOCAB,
        Key("attention.q_lora_rank", ("q_lora_rank",), via="or_zero"),
        Key("attention.kv_lora_rank", ("kv_lora_rank",)),
        Key("attention.key_length_mla", ("qk_nope_head_dim",), via="mla_key_length"),
        Key("attention.value_length_mla", ("v_head_dim",), via="mla_value_length"),
        WIDTH,
        SHARED_COUNT,
        WEIGHTS_SCALE,
        Key("expert_weights_norm", ("norm_topk_prob",), "bool", via="only_true"),
        Key("rope.dimension_count", ("qk_rope_head_dim",)),
        Key("rope.scaling.yarn_log_multiplier", kind="f32", via="yarn_log_tenth"),
        must_be("attention_bias", False),
        SILU,
        *family,
    )


_DEFAULTS = {
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip

_DEEPSEEK_V2_DEFAULTS = {
    **_DEFAULTS, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
    "topk_method": "greedy", "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

_REQUIRED_KEYS = {
    "expert_shared_count": "",
    "attention.head_count_kv": "",
    "attention.key_length": "",
    # The layer counts of the Lite models, whose Q has no low rank.
    "attention.q_lora_rank": "!block_count=26&!block_count=27&!block_count=48",
}


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="deepseek_v2",
        required=_REQUIRED_KEYS,
        gguf="deepseek2",
        **hf_names("DeepseekV2", "deepseek_v2"),
        rope_type=0,
        tensors=_decoder(),
        keys=_keys(Key("", ("topk_method",), "str", via="group_choice"), Key("", ("moe_layer_freq",))),
        differs=(
            Difference(
                "llama.cpp chooses groups of experts by the sum of their two best scores, DeepSeek V2 by the best",
                "topk_method=group_limited_greedy",
            ),
        ),
        gguf_only=(),
        defaults={"": _DEEPSEEK_V2_DEFAULTS},
    ),
    Architecture(
        id="deepseek_v3",
        required=_REQUIRED_KEYS,
        gguf="deepseek2",
        when="expert_gating_func=2|tensors=exp_probs_b.bias",
        **hf_names("DeepseekV3", "deepseek_v3", "Glm4MoeLite", also=("glm4_moe_lite",)),
        rope_type=0,
        tensors=_decoder((selection_bias(),), draft_layer()),
        keys=_keys(
            must_be("rope_interleave", True),
            Key("nextn_predict_layers", ("num_nextn_predict_layers",), via="lite_drafts"),
            Key("", ("moe_layer_freq",)),
            Key("", ("mlp_layer_types",), "str[]", via="leading_dense"),
        ),
        gguf_only=(),
        defaults={
            "": {
                **_DEFAULTS,
                "scoring_func": "sigmoid",
                "n_shared_experts": 1,
                "norm_topk_prob": True,
                "bos_token_id": 0,
                "eos_token_id": 1,
            },
            "deepseek_v3": {
                "n_routed_experts": 256,
                "num_experts_per_tok": 8,
                "n_group": 8,
                "topk_group": 4,
                "moe_intermediate_size": 2048,
                "first_k_dense_replace": 3,
                "routed_scaling_factor": 2.5,
                "num_key_value_heads": 128,
                "num_nextn_predict_layers": 1,
                "max_position_embeddings": 4096,
            },
            "glm4_moe_lite": {
                "qk_nope_head_dim": 192,
                "v_head_dim": 256,
                "q_lora_rank": 768,
                "n_routed_experts": 64,
                "num_experts_per_tok": 4,
                "n_group": 1,
                "topk_group": 1,
                "moe_intermediate_size": 1536,
                "routed_scaling_factor": 1.8,
                "num_key_value_heads": 20,
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 202752,
            },
        },
    ),
)
