"""Ling."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, EXPERTS, GROUPED, RMS_EPS, ROPE, ROPE_DIM, VOCAB, block, class_names, embedding, experts, final_norm, flag,
    gated_mlp, hf_names, linear, must_be, network, norm, rename, split, tensor,
)
from aprfmt.arch.blocks.delta import delta_attention
from aprfmt.arch.blocks.mla import LATENT_SIZES, latent_attention
from aprfmt.arch.blocks.moe import (
    DENSE_LAYERS, GROUPS, MTP, MTP_OR_0, WEIGHTS_NORM, WEIGHTS_SCALE, WIDTH, draft_layer, moe_keys, router_and_experts,
    shared_expert,
)
from aprfmt.arch.blocks.qwen_vision import MERGED, qwen3_keys, qwen3_sizes, qwen3_vision
from aprfmt.arch.blocks.tower import IMAGE, TOWER_WIDTH, projector, sees, whole
from aprfmt.arch.converter import DEFAULT, Converter, GgufKeys, Scope, nothing
from aprfmt.arch.converters.common import gating
from aprfmt.arch.converters.experts import limits
from aprfmt.arch.converters.hybrid import attending, latent_layers
from aprfmt.arch.row import HEAD, OPTIONAL, OWN, REQUIRED, Architecture, Key, TensorRow, Tower


def _expert_width_to_gguf(value: object, scope: Scope) -> object:
    """The width of one shared expert; llama.cpp multiplies it by their number."""
    return scope.h.moe_intermediate_size if value is None else value


expert_width = Converter(_expert_width_to_gguf)
_NO_BIASES = (must_be("use_bias", False), must_be("use_qkv_bias", False))
_QKV = {"attn_q.weight": "q,hidden", "attn_k.weight": "kv,hidden", "attn_v.weight": "kv,hidden"}


def _bailing(*attention_rows: TensorRow, dense: str = "", head: str = "") -> tuple[TensorRow, ...]:
    """Ling's decoder: leading dense layers, experts, and a shared expert."""
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


def _kda_and_value_to_gguf(value: object, scope: Scope) -> GgufKeys | None:
    size = scope.h.head_dim
    return None if size is None else GgufKeys({"kda.head_dim": ("u32", size), "attention.value_length": ("u32", size)})


def _group_of_layers_from_gguf(value: object, scope: Scope) -> object:
    found = attending(scope)
    return DEFAULT if not found else found[0] + 1


three_sections = Converter(
    lambda value, scope: [*value[:3], 0] if isinstance(value, list) else None,
    lambda value, scope: value[:3] if isinstance(value, list) else None,
)
_KDA, _ATTENTION = "linear_attention", "full_attention"
_ATTENDS = f"{_ATTENTION}|draft"
_INNER, _SHARED = "heads*head_dim", "moe_shared_expert_intermediate_size"
_RENAMED = {"self_attn.o_proj.weight": "attention.dense.weight"}
_MLA = tuple(
    replace(
        row, hf=tuple(_RENAMED.get(name, name.replace("self_attn.", "attention.")) for name in row.hf),
        need=row.need.replace("attention_bias", "use_qkv_bias"), layers=_ATTENDS,
    )
    for row in latent_attention()
    if not row.hf[0].endswith("o_proj.bias")
)
_COUNT, _USED, _WIDTH = EXPERTS
_V = "visual."

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="bailing_moe_v3", gguf="bailingmoe3",
        **class_names("BailingMoeV3ForCausalLM", types=("bailing_hybrid", "bailing_moe_v3")),
        tensors=network(
            *norm("input_layernorm", "attn_norm"),
            *delta_attention(
                *linear("f_proj", "ssm_f_a", f"{_INNER},hidden"), *linear("g_proj", "ssm_g_a", f"{_INNER},hidden"),
                tensor("A_log", "ssm_a", "heads", value="exp", gguf_dims=("heads,1",)), heads="heads", size="head_dim",
                kernel="short_conv_kernel_size", hf="attention.",
            ),
            *_MLA, *linear("attention.g_proj", "attn_gate", "heads,hidden", layers=_ATTENDS),
            *norm("post_attention_layernorm", "ffn_norm"),
            *linear("mlp.gate", "ffn_gate_inp", "experts,hidden", layers="moe"),
            tensor("mlp.gate.expert_bias", "exp_probs_b.bias", "experts", layers="moe"), *experts(layers="moe"),
            *shared_expert("mlp.shared_experts", _SHARED, layers="moe"), *gated_mlp(layers="dense"), *draft_layer(),
            *norm("final_layernorm", "layer_output_norm", layers="draft"), embed="model.word_embeddings",
        ),
        keys=(
            *DIMS, replace(GROUPED, kind="i32[]", converter=latent_layers, draft=1, needed=REQUIRED), ROPE, RMS_EPS,
            *rename((_COUNT, _USED), num_experts=("num_experts",)), *GROUPS,
            Key("expert_gating_func", ("score_function",), converter=gating), VOCAB,
            Key("ssm.conv_kernel", ("short_conv_kernel_size",)),
            Key("kda.head_dim", ("head_dim",), field="head_dim", converter=Converter(_kda_and_value_to_gguf)),
            Key("kda.safe_gate", ("kda_safe_gate",), "bool", constant=True),
            Key("kda.gate_lower_bound", ("kda_lower_bound",), "f32"), Key("attention.q_lora_rank", ("q_lora_rank",)),
            *LATENT_SIZES, Key("rope.dimension_sections", ("mrope_section",), "i32[]", converter=three_sections),
            _WIDTH, Key("expert_shared_feed_forward_length", (_SHARED,)),
            Key("expert_shared_count", ("num_shared_experts",)), DENSE_LAYERS, WEIGHTS_SCALE, WEIGHTS_NORM,
            Key("swiglu_clamp_exp", ("expert_swiglu_limit_list",), "f32[]", converter=limits, draft=OWN),
            Key("swiglu_clamp_shexp", ("share_expert_swiglu_limit_list",), "f32[]", converter=limits, draft=OWN),
            Key("", ("layer_group_size",), converter=Converter(nothing, _group_of_layers_from_gguf)),
            must_be("no_kda_lora", True), must_be("gated_attention_proj_granularity_type", "head_wise"),
            must_be("use_qkv_bias", False), must_be("hidden_act", "silu"), MTP,
        ),
    ),
    # As inclusionAI/Ling-lite has it.
    Architecture(
        id="bailing_moe", gguf="bailingmoe", **hf_names("BailingMoe", "bailing_moe"), rope_type=0,
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
    ),
    # As inclusionAI/Ling-mini-2.0 and sarvamai/sarvam-30b have it.
    Architecture(
        id="bailing_moe_v2", gguf="bailingmoe2",
        **class_names(
            "BailingMoeV2ForCausalLM", "BailingMoeV2Model", "SarvamMoEForCausalLM", "Param2MoEForCausalLM",
            "modeling_sarvam_moe.SarvamMoEForCausalLM", types=("bailing_moe_v2", "sarvam_moe", "param2moe"),
            bare=("BailingMoeV2Model",),
        ),
        tensors=_bailing(
            *linear("attention.query_key_value", "attn_qkv", "q+2*kv,hidden"),
            *norm("attention.query_layernorm", "attn_q_norm", "head_dim"),
            *norm("attention.key_layernorm", "attn_k_norm", "head_dim"),
            tensor(
                "mlp.gate.expert_bias", "exp_probs_b.bias", "experts", "moe_router_enable_expert_bias", layers="moe"
            ),
            *draft_layer(), *norm("final_layernorm", "layer_output_norm", need=OPTIONAL, layers="draft"), dense="dense",
        ),
        keys=moe_keys(
            *GROUPS, Key("expert_gating_func", ("score_function",), converter=gating), ROPE_DIM, DENSE_LAYERS, VOCAB,
            WIDTH,
            Key("expert_shared_feed_forward_length", ("moe_shared_expert_intermediate_size",), converter=expert_width),
            WEIGHTS_SCALE, Key("expert_shared_count", ("num_shared_experts",)), WEIGHTS_NORM, MTP_OR_0,
            flag("moe_router_enable_expert_bias"), must_be("use_qk_norm", True), *_NO_BIASES,
        ),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="ling3_vl_vision", **whole("BailingMoeV3VLForConditionalGeneration", types=("bailing_moe_v3_vl",)),
        when="projector_type=ling3vl", text="model.language_model.", prefixes=(("model.visual.", _V),),
        tensors=(
            *qwen3_vision(_V), *norm(f"{_V}merger.norm", "mm.input_norm", TOWER_WIDTH, REQUIRED),
            *linear("linear_proj.0", "mm.0", f"hidden,{MERGED}", REQUIRED),
            *linear("linear_proj.2", "mm.2", "hidden,hidden", REQUIRED),
        ),
        keys=sees(*qwen3_sizes("vision_config"), *IMAGE, projector("ling3vl"), *qwen3_keys("vision_config")[:-1]),
        config={"vision_config.disable_merger_proj": True},
    ),
)
