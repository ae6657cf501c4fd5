"""Rows of the architecture table: Ling 3, whose layers have Kimi's delta attention or gated latent attention."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, GgufKeys, Scope, nothing
from aprfmt.arch.converters.common import gating, mla_key_length, mla_key_width, mla_value_length
from aprfmt.arch.converters.experts import limits
from aprfmt.arch.converters.hybrid import attending, latent_layers
from aprfmt.arch.row import OWN, Architecture, Key
from aprfmt.arch.rows.kimi import delta_attention
from aprfmt.arch.rows.parts import (
    DIMS, EXPERTS, GROUPED, RMS_EPS, ROPE, VOCAB, class_names, experts, gated_mlp, linear, must_be, network, norm,
    rename, tensor,
)
from aprfmt.arch.rows.parts_mla import MLA_REQUIRED, latent_attention
from aprfmt.arch.rows.parts_moe import (
    DENSE_LAYERS, GROUPS, MTP, WEIGHTS_NORM, WEIGHTS_SCALE, draft_layer, shared_expert,
)


def _kda_and_value_to(value: object, scope: Scope) -> GgufKeys | None:
    size = scope.h.head_dim
    return None if size is None else GgufKeys({"kda.head_dim": ("u32", size), "attention.value_length": ("u32", size)})


def _three_sections_to(value: object, scope: Scope) -> object:
    return [*value[:3], 0] if isinstance(value, list) else None


def _group_of_layers_from(value: object, scope: Scope) -> object:
    found = attending(scope)
    return DEFAULT if not found else found[0] + 1


kda_and_value = Converter(_kda_and_value_to)
three_sections = Converter(
        _three_sections_to, lambda value, scope: value[:3] if isinstance(value, list) else None
    )
group_of_layers = Converter(nothing, _group_of_layers_from)

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

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="bailing_moe_v3", gguf="bailingmoe3",
        **class_names("BailingMoeV3ForCausalLM", types=("bailing_hybrid", "bailing_moe_v3")),
        required={**MLA_REQUIRED, "expert_gating_func": "", "kda.head_dim": "", "kda.gate_lower_bound": ""},
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
            *norm("final_layernorm", "layer_output_norm", layers="draft"),
            embed="model.word_embeddings",
        ),
        keys=(
            *DIMS, replace(GROUPED, kind="i32[]", converter=latent_layers, draft=1), ROPE, RMS_EPS,
            *rename((_COUNT, _USED), num_experts=("num_experts",)), *GROUPS,
            Key("expert_gating_func", ("score_function",), converter=gating), VOCAB,
            Key("ssm.conv_kernel", ("short_conv_kernel_size",)),
            Key("kda.head_dim", ("head_dim",), field="head_dim", converter=kda_and_value),
            Key("kda.safe_gate", ("kda_safe_gate",), "bool", constant=True),
            Key("kda.gate_lower_bound", ("kda_lower_bound",), "f32"), Key("attention.q_lora_rank", ("q_lora_rank",)),
            Key("attention.kv_lora_rank", ("kv_lora_rank",)), Key("attention.key_length", converter=mla_key_width),
            Key("attention.key_length_mla", ("qk_nope_head_dim",), converter=mla_key_length),
            Key("attention.value_length_mla", ("v_head_dim",), converter=mla_value_length),
            Key("rope.dimension_count", ("qk_rope_head_dim",)),
            Key("rope.dimension_sections", ("mrope_section",), "i32[]", converter=three_sections), _WIDTH,
            Key("expert_shared_feed_forward_length", (_SHARED,)), Key("expert_shared_count", ("num_shared_experts",)),
            DENSE_LAYERS, WEIGHTS_SCALE, WEIGHTS_NORM,
            Key("swiglu_clamp_exp", ("expert_swiglu_limit_list",), "f32[]", converter=limits, draft=OWN),
            Key("swiglu_clamp_shexp", ("share_expert_swiglu_limit_list",), "f32[]", converter=limits, draft=OWN),
            Key("", ("layer_group_size",), converter=group_of_layers), must_be("no_kda_lora", True),
            must_be("gated_attention_proj_granularity_type", "head_wise"), must_be("use_qkv_bias", False),
            must_be("hidden_act", "silu"), MTP,
        ),
        defaults={
            "": {"score_function": "sigmoid", "num_shared_experts": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6,
                 "tie_word_embeddings": False, "use_qkv_bias": False,}
        },
    ),
)
