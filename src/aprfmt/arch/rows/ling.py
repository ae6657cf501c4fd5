"""Rows of the architecture table: Ling and its kin, whose code came with their checkpoints."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import Converter, Scope
from aprfmt.arch.converters.common import drafts, gating
from aprfmt.arch.row import HEAD, OPTIONAL, Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    ROPE_DIM, VOCAB, block, class_names, embedding, final_norm, flag, gated_mlp, hf_names, linear, must_be, norm, split,
    tensor,
)
from aprfmt.arch.rows.parts_moe import (
    DENSE_LAYERS, GROUPS, WEIGHTS_NORM, WEIGHTS_SCALE, WIDTH, draft_layer, moe_keys, router_and_experts, shared_expert,
)


def _expert_width_to(value: object, scope: Scope) -> object:
    """The width of one shared expert; the runtime multiplies it with their number."""
    return scope.h.moe_intermediate_size if value is None else value


expert_width = Converter(_expert_width_to)

_UNTIED = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_NO_BIASES = (must_be("use_bias", False), must_be("use_qkv_bias", False))
_QKV = {"attn_q.weight": "q,hidden", "attn_k.weight": "kv,hidden", "attn_v.weight": "kv,hidden"}


def _bailing(*attention_rows: TensorRow, dense: str = "", head: str = "") -> tuple[TensorRow, ...]:
    """Ling's decoder: experts after the first few layers, and one that all tokens share."""
    return (
        embedding("model.word_embeddings"),
        *block(
            *norm("input_layernorm", "attn_norm"), *attention_rows,
            *linear("attention.dense", "attn_output", "hidden,q"), *norm("post_attention_layernorm", "ffn_norm"),
            *router_and_experts(dense and "moe"),
            *shared_expert("mlp.shared_experts", "num_shared_experts*moe_ffn", layers=dense and "moe"),
            *(gated_mlp(layers="dense") if dense else ()),
        ),
        *final_norm(), tensor("lm_head.weight", "output.weight", "vocab,hidden", HEAD, value=head),
    )


ROWS: tuple[Architecture, ...] = (
    # As inclusionAI/Ling-lite has it.
    Architecture(
        id="bailing_moe", gguf="bailingmoe", required={"expert_shared_count": ""},
        **hf_names("BailingMoe", "bailing_moe"), rope_type=0,
        tensors=_bailing(
            split(
                "attention.query_key_value.weight", "q+2*kv,hidden", _QKV,
                order=("head:q+kv,heads+kv_heads,2,head_dim/2",),
            ),
            head="unit_columns:norm_head",
        ),
        keys=(
            *moe_keys(
                ROPE_DIM, replace(DENSE_LAYERS, allowed=(0,)), VOCAB, WIDTH,
                Key("expert_weights_scale", kind="f32", constant=1.0),
                Key("expert_shared_count", ("num_shared_experts",)), WEIGHTS_NORM, Key("", ("norm_head",), "bool"),
                *_NO_BIASES,
            ),
        ),
        defaults={"": {**_UNTIED, "first_k_dense_replace": 0, "norm_topk_prob": True, "norm_head": False}},
    ),
    # As inclusionAI/Ling-mini-2.0 and sarvamai/sarvam-30b have it.
    Architecture(
        id="bailing_moe_v2", gguf="bailingmoe2", required={"expert_shared_count": "", "expert_gating_func": ""},
        **class_names(
            "BailingMoeV2ForCausalLM", "BailingMoeV2Model", "SarvamMoEForCausalLM",
            "modeling_sarvam_moe.SarvamMoEForCausalLM", types=("bailing_moe_v2", "sarvam_moe"),
            bare=("BailingMoeV2Model",),
        ),
        gguf_only=(),
        tensors=_bailing(
            *linear("attention.query_key_value", "attn_qkv", "q+2*kv,hidden"),
            *norm("attention.query_layernorm", "attn_q_norm", "head_dim"),
            *norm("attention.key_layernorm", "attn_k_norm", "head_dim"),
            tensor(
                "mlp.gate.expert_bias", "exp_probs_b.bias", "experts", "moe_router_enable_expert_bias", layers="moe"
            ),
            *draft_layer(), *norm("final_layernorm", "layer_output_norm", need=OPTIONAL, layers="draft"),
            dense="dense",
        ),
        keys=moe_keys(
            *GROUPS, Key("expert_gating_func", ("score_function",), converter=gating), ROPE_DIM, DENSE_LAYERS, VOCAB,
            WIDTH,
            Key("expert_shared_feed_forward_length", ("moe_shared_expert_intermediate_size",), converter=expert_width),
            WEIGHTS_SCALE, Key("expert_shared_count", ("num_shared_experts",)), WEIGHTS_NORM,
            Key("nextn_predict_layers", ("num_nextn_predict_layers",), converter=drafts),
            flag("moe_router_enable_expert_bias"), must_be("use_qk_norm", True), *_NO_BIASES,
        ),
        defaults={
            "": {
                **_UNTIED, "first_k_dense_replace": 0, "score_function": "sigmoid", "partial_rotary_factor": 0.5,
                "moe_router_enable_expert_bias": True,
            },
            "sarvam_moe": {"partial_rotary_factor": 1.0},
        },
    ),
)
