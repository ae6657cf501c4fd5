"""Rows of the architecture table: decoders with many experts whose windowed layers have heads of their own."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.row import MOST, Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    SLIDING_LAYERS,
    WINDOW,
    block,
    convert,
    embedding,
    final_norm,
    gated_mlp,
    head,
    hf_names,
    linear,
    must_be,
    norm,
    rename,
    tensor,
)
from aprfmt.arch.rows.parts_moe import (
    GROUPS,
    MTP,
    NO_BIAS,
    WIDTH,
    draft_layer,
    moe_keys,
    router_and_experts,
    selection_bias,
)


def _mimo_attention() -> tuple[TensorRow, ...]:
    """Values of a length of their own; more key-value heads and a sink where there is a window."""
    fused, split, bias = (
        "attention_projection_layout=fused_qkv",
        "!attention_projection_layout=fused_qkv",
        "attention_bias",
    )
    rows: list[TensorRow] = []
    for layers, kv in (("full_attention", "kv_heads"), ("sliding_attention|draft", "swa_num_key_value_heads")):
        keys, values = f"{kv}*head_dim", f"{kv}*v_head_dim"
        rows += [
            *linear("self_attn.q_proj", "attn_q", "q,hidden", bias, split, layers=layers),
            *linear("self_attn.k_proj", "attn_k", f"{keys},hidden", bias, split, layers=layers),
            *linear("self_attn.v_proj", "attn_v", f"{values},hidden", bias, split, layers=layers),
            *linear("self_attn.qkv_proj", "attn_qkv", f"q+{keys}+{values},hidden", need=fused, layers=layers),
        ]
    sink = tensor("self_attn.attention_sink_bias", "attn_sinks.weight", "heads", layers="sliding_attention|draft")
    return (*rows, sink, *linear("self_attn.o_proj", "attn_output", "hidden,heads*v_head_dim"))


_MIMO_DEFAULTS = {
    "n_routed_experts": 256, "num_experts_per_tok": 8, "num_key_value_heads": 4, "moe_intermediate_size": 2048,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "scoring_func": "sigmoid",
    "head_dim": 192, "v_head_dim": 128, "sliding_window": 129, "attention_value_scale": 0.707,
    "attention_bias": False, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_theta": 5000000.0, "swa_rope_theta": 10000.0, "partial_rotary_factor": 0.334,
}  # fmt: skip


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="mimo_v2_flash",
        required={"attention.sliding_window": "", "attention.sliding_window_pattern": ""},
        gguf="mimo2",
        **hf_names("MiMoV2Flash", "mimo_v2_flash", "MiMoV2", also=("mimo_v2",)),
        head_always=True,
        nested_rope=True,
        drafts=(("model.mtp.layers.{m}.", "model.layers.{n}."),),
        tensors=(
            embedding(),
            *block(
                *norm("input_layernorm", "attn_norm"),
                *_mimo_attention(),
                *norm("post_attention_layernorm", "ffn_norm", layers="!draft"),
                *norm("pre_mlp_layernorm", "ffn_norm", layers="draft"),
                *router_and_experts("moe&!draft", (selection_bias("moe&!draft"),)),
                *gated_mlp(layers="dense|draft"),
                *draft_layer(),
                *norm("final_layernorm", "layer_output_norm", layers="draft"),
            ),
            *final_norm(),
            *head(),
        ),
        keys=(
            Key("attention.value_length", ("v_head_dim",)),
            *rename(
                convert(
                    tuple(
                        replace(key, kind="i32[]", draft=MOST) if key.field == "num_kv_heads" else key
                        for key in moe_keys(
                            *(replace(key, allowed=(1,)) for key in GROUPS), WIDTH, count="n_routed_experts"
                        )
                    ),
                    num_kv_heads="heads_by_window",
                ),
                rms_norm_eps=("rms_norm_eps", "layernorm_epsilon"),
            ),
            Key("", ("swa_num_key_value_heads",), via="windowed_kv_heads"),
            Key("expert_gating_func", ("scoring_func",), via="gating", allowed=("sigmoid",)),
            Key("rope.dimension_count", via="shared_rotary_dim"),
            replace(WINDOW, via="mimo_window"),
            Key("", ("sliding_window_size",)),
            replace(SLIDING_LAYERS, via="hybrid_layers", draft=True),
            Key("", ("hybrid_layer_pattern",), "u32[]"),
            Key("attention.value_scale", ("attention_value_scale",), "f32", via="absent_null"),
            Key("", ("mlp_layer_types",), "str[]", via="dense_by_tensors"),
            Key("", ("moe_layer_freq",)),
            MTP,
            must_be("norm_topk_prob", True),
            Key("", ("routed_scaling_factor",), "f32", allowed=(1.0,)),
            NO_BIAS,
            must_be("add_swa_attention_sink_bias", True),
            must_be("add_full_attention_sink_bias", False),
            Key("", ("attention_projection_layout",), "str", via="fused_by_tensors"),
        ),
        defaults={"": _MIMO_DEFAULTS},
    ),
)
