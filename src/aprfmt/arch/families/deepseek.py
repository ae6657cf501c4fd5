"""DeepSeek up to V3.2, and other networks with its latent attention."""

from __future__ import annotations

from aprfmt.arch.blocks.decoder import (
    DIMS, GROUPED, RMS_EPS, ROPE, ROPE_DIM, VOCAB, WHOLE_HEADS, attention, decoder, gated_mlp, hf_names, linear,
    must_be, plain_mlp,
)
from aprfmt.arch.blocks.mla import INDEXER, KEY, indexer, joint_latent_attention, mla_decoder, mla_keys
from aprfmt.arch.blocks.moe import (
    DENSE_LAYERS, EQUAL_HEADS, MLP_LAYER_TYPES, MTP_OR_0, NO_BIAS, SHARED_COUNT, WIDTH, draft_layer, moe_decoder,
    moe_keys, router_and_experts, selection_bias, shared_expert,
)
from aprfmt.arch.converter import Converter, Scope, nothing
from aprfmt.arch.converters.common import gating, gguf_int, leading_dense, no_rope_scaling, nope_and_rope
from aprfmt.arch.row import REQUIRED, Architecture, Difference, Key


def _lite_drafts_to_gguf(value: object, scope: Scope) -> object:
    """llama.cpp's converter drops the MTP layers of DeepSeek-V3 itself, but writes those of GLM-4.7-Flash."""
    return value or None if scope.h.hf_model_type == "glm4_moe_lite" else None


def _lite_drafts_from_gguf(value: object, scope: Scope) -> object:
    if value:  # only the GGUF of GLM-4.7-Flash has any
        scope.h.hf_model_type = "glm4_moe_lite"
    return value or 0


lite_drafts = Converter(_lite_drafts_to_gguf, _lite_drafts_from_gguf)
group_choice = Converter(
    nothing, lambda value, scope: "group_limited_greedy" if gguf_int(scope, "expert_group_count") > 1 else "greedy",
)
_ROTATED = Key("rope.dimension_count", ("qk_rope_head_dim",), field="head_dim")
"""The rope parameters' head size is the rotated part."""
_WHOLE_QUERY = f"heads*{KEY.replace('+', '+heads*')},"

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="deepseek", gguf="deepseek", **hf_names("Deepseek", "deepseek"), rope_type=0,
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
    ),
    Architecture(
        id="deepseek_v2", gguf="deepseek2", **hf_names("DeepseekV2", "deepseek_v2"), rope_type=0,
        tensors=mla_decoder(mlp_bias="mlp_bias"),
        keys=mla_keys(
            Key("", ("topk_method",), "str", converter=group_choice), Key("", ("moe_layer_freq",)),
            must_be("mlp_bias", False),
        ),
        differs=(
            Difference(
                "llama.cpp selects expert groups by the sum of their two best scores, DeepSeek V2 by the best score",
                "topk_method=group_limited_greedy",
            ),
            Difference(
                "llama.cpp normalizes the weights of the selected experts (norm_topk_prob is true), transformers does "
                "not",
                "norm_topk_prob",
            ),
        ),
    ),
    Architecture(
        id="deepseek_v3", gguf="deepseek2", when="expert_gating_func=2|tensors=exp_probs_b.bias",
        **hf_names("DeepseekV3", "deepseek_v3", "Glm4MoeLite", also=("glm4_moe_lite", "kimi_k2")), rope_type=0,
        tensors=mla_decoder((selection_bias(),), draft_layer()),
        keys=mla_keys(
            must_be("rope_interleave", True),
            Key("nextn_predict_layers", ("num_nextn_predict_layers",), converter=lite_drafts),
            Key("", ("moe_layer_freq",)), Key("", ("mlp_layer_types",), "str[]", converter=leading_dense),
        ),
    ),
    # As PLM-Team/PLM-1.8B-Base has it.
    Architecture(
        id="plm", gguf="plm", **hf_names("PLM", "plm"), rope_type=0,
        tensors=decoder(
            *joint_latent_attention(*linear("self_attn.q_proj", "attn_q", f"{_WHOLE_QUERY}hidden")),
            mlp=plain_mlp(None, "mlp.up_proj", "mlp.down_proj"),
        ),
        keys=(
            *DIMS, GROUPED, _ROTATED, ROPE, RMS_EPS, VOCAB, Key("attention.kv_lora_rank", ("kv_lora_rank",)),
            Key("attention.key_length", ("qk_nope_head_dim",), converter=nope_and_rope, needed=REQUIRED),
            Key("attention.value_length", ("v_head_dim",), needed=REQUIRED), EQUAL_HEADS,
            must_be("attention_bias", False), must_be("hidden_act", "relu2"),
        ),
    ),
    Architecture(
        id="deepseek_v32", gguf="deepseek32", **hf_names("DeepseekV32", "deepseek_v32"), rope_type=0,
        tensors=mla_decoder((selection_bias(),), (*indexer(), *draft_layer())),
        keys=mla_keys(*INDEXER, MTP_OR_0, MLP_LAYER_TYPES),
    ),
)
