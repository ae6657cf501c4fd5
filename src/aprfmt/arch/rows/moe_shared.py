"""Rows of the architecture table: decoders with routed experts that are chosen or stored in their own way."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.converters.common import absent_1_0, drafts, gating, no_rope_scaling
from aprfmt.arch.converters.experts import dense_by_tensors, width_of_experts
from aprfmt.arch.converters.layers import layer_types, layer_types_derive, layer_types_to
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import REQUIRED, Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    NO_WINDOW, ROPE_DIM, VOCAB, WHOLE_HEADS, attention, experts, flag, gated_mlp, hf_names, linear, must_be, network,
    norm, split, tensor,
)
from aprfmt.arch.rows.parts_moe import (
    BIAS_FLAG, DENSE_LAYERS, EQUAL_HEADS, GROUPS, MTP, NO_BIAS, SHARED_COUNT, SIGMOID, WEIGHTS_NORM, WEIGHTS_SCALE,
    WIDTH, draft_layer, moe_decoder, moe_keys, router_and_experts, selection_bias, shared_expert,
)


def _over_moe_width(value: object, scope: Scope) -> object:
    total, width = as_int(value, scope.key.gguf), scope.h.moe_intermediate_size
    return total // width if total is not None and width else DEFAULT


times_moe_width = Converter(width_of_experts, _over_moe_width)


def _odd_layer_types(value: object, scope: Scope) -> object:
    """Layer types that are not the row's pattern, which the runtime knows by itself."""
    return None if value == layer_types_derive(scope) else layer_types_to(value, scope)


def _untruncated_from(value: object, scope: Scope) -> object:
    """gpt-oss does not round the ends of yarn's ramp; a GGUF cannot say so."""
    scaling = scope.h.extra.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type") == "yarn":
        scaling.setdefault("truncate", False)
    return DEFAULT


odd_layer_types = replace(layer_types, to_gguf=_odd_layer_types)
untruncated = Converter(nothing, _untruncated_from)


def _gpt_oss_experts() -> tuple[TensorRow, ...]:
    """Gate and up rows take turns. Weights stand as [experts, in, out] or as MXFP4 blocks of [experts, out, in]."""
    hf, turns = "mlp.experts.", ("deal:experts*moe_ffn,1,1",)
    halves = dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), "experts,moe_ffn,hidden")
    down = ("experts,hidden,moe_ffn",)

    def pieces(name: str) -> tuple[str, ...]:
        return (f"{hf}{name}_blocks", f"{hf}{name}_scales")

    def blocks(rows: str, columns: str) -> tuple[str, ...]:
        return (f"experts,{rows},{columns}/32,16", f"experts,{rows},{columns}/32")

    return (
        split(f"{hf}gate_up_proj", "experts,hidden,2*moe_ffn", halves, transposed=True, order=turns),
        tensor(f"{hf}down_proj", "ffn_down_exps.weight", "experts,moe_ffn,hidden", transposed=True, gguf_dims=down),
        TensorRow(
            pieces("gate_up_proj"), tuple(halves), blocks("2*moe_ffn", "hidden"), gguf_dims=tuple(halves.values()),
            order=turns, pack="mxfp4",
        ),
        TensorRow(
            pieces("down_proj"), ("ffn_down_exps.weight",), blocks("hidden", "moe_ffn"), gguf_dims=down, pack="mxfp4"
        ),
        split(
            f"{hf}gate_up_proj_bias", "experts,2*moe_ffn",
            dict.fromkeys(("ffn_gate_exps.bias", "ffn_up_exps.bias"), "experts,moe_ffn"), order=turns, flat=True,
        ),
        tensor(f"{hf}down_proj_bias", "ffn_down_exps.bias", "experts,hidden"),
    )


_GLM4_MOE_DEFAULTS = {
    "n_routed_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 8, "moe_intermediate_size": 1408,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "attention_bias": False, "use_qk_norm": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_GLM4_MOE = {"num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1}
_GLM4V_MOE = {
    "attention_bias": True, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "max_position_embeddings": 65536,
}


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="gpt_oss", required={"attention.sliding_window": ""},
        packed_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
        gguf="gpt-oss", **hf_names("GptOss", "gpt_oss"), head_always=True,
        tensors=network(
            *norm("input_layernorm", "attn_norm"), *attention("attention_bias", "attention_bias"),
            tensor("self_attn.sinks", "attn_sinks.weight", "heads"),
            *norm("post_attention_layernorm", "post_attention_norm"),
            *linear("mlp.router", "ffn_gate_inp", "experts,hidden", REQUIRED), *_gpt_oss_experts(),
        ),
        keys=moe_keys(
            Key("attention.sliding_window", ("sliding_window",)),
            Key("attention.sliding_window_pattern", ("layer_types",), "bool[]", converter=odd_layer_types),
            Key("", converter=untruncated),
            Key("expert_feed_forward_length", ("intermediate_size",), field="intermediate_size"),
            must_be("swiglu_alpha", 1.702), must_be("swiglu_limit", 7.0), must_be("attention_bias", True),
            count="num_local_experts",
        ),
        defaults={"": {
            "num_local_experts": 128, "num_experts_per_tok": 4, "num_key_value_heads": 8, "head_dim": 64,
            "sliding_window": 128, "sliding_window_pattern": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0, "attention_bias": True, "tie_word_embeddings": False,
        }},
    ),
    Architecture(
        id="glm4_moe", required={"expert_shared_count": ""}, gguf="glm4moe",
        **hf_names("Glm4Moe", "glm4_moe", "SolarOpen", also=("glm4v_moe_text", "solar_open")),
        tensors=network(
            *norm("input_layernorm", "attn_norm"), *attention("attention_bias"),
            *norm("self_attn.q_norm", "attn_q_norm", "head_dim", need="use_qk_norm"),
            *norm("self_attn.k_norm", "attn_k_norm", "head_dim", need="use_qk_norm"),
            *norm("post_attention_layernorm", "post_attention_norm"), *router_and_experts("moe", (selection_bias(),)),
            *shared_expert("mlp.shared_experts", "n_shared_experts*moe_ffn", "n_shared_experts", "moe"),
            *gated_mlp(layers="dense"), *draft_layer(),
        ),
        keys=moe_keys(
            *GROUPS, ROPE_DIM, WIDTH, SHARED_COUNT, DENSE_LAYERS, SIGMOID, WEIGHTS_SCALE, WEIGHTS_NORM, BIAS_FLAG,
            flag("use_qk_norm"), Key("nextn_predict_layers", ("num_nextn_predict_layers",), converter=drafts),
            count="n_routed_experts",
        ),
        gguf_only=(),
        defaults={
            "": _GLM4_MOE_DEFAULTS, "glm4_moe": _GLM4_MOE, "glm4v_moe_text": _GLM4V_MOE,
            "solar_open": {"head_dim": 128, "rope_theta": 1e6, "moe_intermediate_size": 1280},
        },
    ),
    Architecture(
        id="deepseek", required={"expert_shared_count": ""}, gguf="deepseek", **hf_names("Deepseek", "deepseek"),
        rope_type=0,
        tensors=moe_decoder(
            *attention(permuted=True), *router_and_experts("moe"),
            *shared_expert("mlp.shared_experts", "n_shared_experts*moe_ffn", layers="moe"), *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(
            ROPE_DIM, Key("rope.scaling.type", kind="str", converter=no_rope_scaling), VOCAB, WIDTH, DENSE_LAYERS,
            SHARED_COUNT, Key("expert_weights_scale", kind="f32", constant=1.0), must_be("norm_topk_prob", False),
            Key("expert_gating_func", ("scoring_func",), converter=gating, allowed=("softmax",)),
            must_be("moe_layer_freq", 1), NO_BIAS, WHOLE_HEADS, count="n_routed_experts",
        ),
        defaults={"": {
            "moe_intermediate_size": 1407, "moe_layer_freq": 1, "first_k_dense_replace": 0, "norm_topk_prob": False,
            "scoring_func": "softmax", "attention_bias": False, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False, "bos_token_id": 100000, "eos_token_id": 100001,
        }},
    ),
    Architecture(
        id="dots1", required={"expert_shared_count": "", "expert_gating_func": ""}, gguf="dots1",
        **hf_names("Dots1", "dots1"), head_always=True,
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"),
            *router_and_experts("moe", (selection_bias(),)),
            *shared_expert("mlp.shared_experts", "n_shared_experts*moe_ffn", layers="moe"), *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(
            *GROUPS, WIDTH, DENSE_LAYERS, SHARED_COUNT, WEIGHTS_SCALE, WEIGHTS_NORM,
            # llama.cpp aborts without it.
            SIGMOID, NO_BIAS, EQUAL_HEADS, Key("", ("sliding_window",)), Key("", ("max_window_layers",)),
            Key("", ("layer_types",), "str[]"), count="n_routed_experts",
        ),
        gguf_only=(),
        differs=(NO_WINDOW,),
        defaults={"": {
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": False,
            "routed_scaling_factor": 1.0, "attention_bias": False, "sliding_window": 4096, "max_window_layers": 62,
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        }},
    ),
    Architecture(
        id="hunyuan_v1_moe", gguf="hunyuan-moe", **hf_names("HunYuanMoEV1", "hunyuan_v1_moe"),
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias"),
            *norm("self_attn.query_layernorm", "attn_q_norm", "head_dim"),
            *norm("self_attn.key_layernorm", "attn_k_norm", "head_dim"),
            *linear("mlp.gate.wg", "ffn_gate_inp", "experts,hidden"), *router_and_experts()[1:],
            *shared_expert("mlp.shared_mlp", "ffn"),
        ),
        keys=moe_keys(
            Key("expert_shared_feed_forward_length", ("intermediate_size",), field="intermediate_size"),
            Key("expert_feed_forward_length", ("intermediate_size",), field="intermediate_size"),
            Key("expert_shared_count", ("num_shared_expert",)), NO_BIAS, used="moe_topk",
        ),
        gguf_only=(),
        defaults={"": {
            "num_experts": 1, "moe_topk": 1, "attention_bias": False, "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        }},
    ),
    Architecture(
        id="minimax_m2", required={"expert_gating_func": "", "feed_forward_length": ""}, gguf="minimax-m2",
        **hf_names("MiniMaxM2", "minimax_m2"), head_always=True,
        tensors=moe_decoder(
            *attention(qk_norm="q"), *linear("block_sparse_moe.gate", "ffn_gate_inp", "experts,hidden"),
            tensor("block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias", "experts"),
            *experts("block_sparse_moe.experts.{e}.", ("w1", "w3", "w2")),
        ),
        keys=moe_keys(
            SIGMOID, Key("expert_feed_forward_length", ("intermediate_size",), field="intermediate_size"),
            replace(ROPE_DIM, hf=("rotary_dim",)), count="num_local_experts",
        ),
        gguf_only=(),
        defaults={"": {
            "num_local_experts": 256, "num_experts_per_tok": 8, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 196608, "rms_norm_eps": 1e-6, "rope_theta": 5000000.0,
            "tie_word_embeddings": False, "bos_token_id": 200034, "eos_token_id": 200020,
        }},
    ),
    Architecture(
        id="hy_v3", gguf="hy_v3", **hf_names("HYV3", "hy_v3"),
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"),
            *linear("mlp.router.gate", "ffn_gate_inp", "experts,hidden", layers="moe"),
            tensor("mlp.expert_bias", "exp_probs_b", "experts", layers="moe"), *experts(layers="moe"),
            *shared_expert("mlp.shared_mlp", "num_shared_experts*moe_ffn", layers="moe", bias="mlp_bias"),
            *gated_mlp("mlp_bias", layers="dense"), *draft_layer(norm_after="final_layernorm"),
        ),
        keys=moe_keys(
            WIDTH, Key("expert_shared_feed_forward_length", ("num_shared_experts",), converter=times_moe_width),
            Key("expert_weights_norm", ("route_norm",), "bool", constant=True),
            Key("expert_weights_scale", ("router_scaling_factor",), "f32", converter=absent_1_0), SIGMOID, MTP,
            Key("", ("mlp_layer_types",), "str[]", converter=dense_by_tensors), Key("", ("first_k_dense_replace",)),
            must_be("enable_moe_fp32_combine", True), must_be("mlp_bias", False), NO_BIAS,
        ),
        defaults={"": {
            "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1, "num_key_value_heads": 8,
            "moe_intermediate_size": 1536, "router_scaling_factor": 2.826, "head_dim": 128,
            "enable_moe_fp32_combine": True, "attention_bias": False, "mlp_bias": False,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0,
            "tie_word_embeddings": False,
        }},
    ),
)
