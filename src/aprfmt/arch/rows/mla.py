"""Rows of the architecture table: DeepSeek's multi-head latent attention."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.converters.common import BETA, gguf_int, leading_dense, llama_4_scaling
from aprfmt.arch.fields import as_int
from aprfmt.arch.rope import scaling_of
from aprfmt.arch.row import OPTIONAL, Architecture, Difference, Key
from aprfmt.arch.rows.parts import PAD, block, hf_names, must_be, tensor
from aprfmt.arch.rows.parts_mla import MLA_REQUIRED, mla_decoder, mla_keys
from aprfmt.arch.rows.parts_moe import draft_layer, selection_bias


def _temperature_length(value: object, scope: Scope) -> int | None:
    """After how many positions queries grow, where they do."""
    scaling = scaling_of(scope.h)
    key = "original_max_position_embeddings"
    return as_int(scaling.get(key), key) if scaling.get(BETA) else None


def _lite_drafts_to(value: object, scope: Scope) -> object:
    """llama.cpp's converter leaves the draft layers of DeepSeek-V3 itself aside, and writes those of GLM-4.7-Flash."""
    return value or None if scope.h.hf_model_type == "glm4_moe_lite" else None


def _lite_drafts_from(value: object, scope: Scope) -> object:
    if value:  # only the GGUF of GLM-4.7-Flash has any
        scope.h.hf_model_type = "glm4_moe_lite"
    return value or 0


def _group_choice_from(value: object, scope: Scope) -> str:
    return "group_limited_greedy" if gguf_int(scope, "expert_group_count") > 1 else "greedy"


llama_4_length = Converter(_temperature_length, lambda value, scope: DEFAULT)
lite_drafts = Converter(_lite_drafts_to, _lite_drafts_from)
group_choice = Converter(nothing, _group_choice_from)

_DEFAULTS = {
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False,
}


_REQUIRED_KEYS = {
    **MLA_REQUIRED, "expert_feed_forward_length": "",
    # The layer counts of the Lite models, whose Q has no low rank.
    "attention.q_lora_rank": "!block_count=26&!block_count=27&!block_count=48",
}


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="deepseek_v2", required=_REQUIRED_KEYS, gguf="deepseek2", **hf_names("DeepseekV2", "deepseek_v2"),
        rope_type=0,
        tensors=mla_decoder(),
        keys=mla_keys(Key("", ("topk_method",), "str", converter=group_choice), Key("", ("moe_layer_freq",))),
        differs=(
            Difference(
                "llama.cpp chooses groups of experts by the sum of their two best scores, DeepSeek V2 by the best",
                "topk_method=group_limited_greedy",
            ),
        ),
        gguf_only=(),
        defaults={"": {
            **_DEFAULTS, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "norm_topk_prob": False, "topk_method": "greedy",
            "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
        }},
    ),
    Architecture(
        id="deepseek_v3", required=_REQUIRED_KEYS, gguf="deepseek2",
        when="expert_gating_func=2|tensors=exp_probs_b.bias",
        **hf_names("DeepseekV3", "deepseek_v3", "Glm4MoeLite", also=("glm4_moe_lite", "kimi_k2")), rope_type=0,
        tensors=mla_decoder((selection_bias(),), draft_layer()),
        keys=mla_keys(
            must_be("rope_interleave", True),
            Key("nextn_predict_layers", ("num_nextn_predict_layers",), converter=lite_drafts),
            Key("", ("moe_layer_freq",)),
            Key("", ("mlp_layer_types",), "str[]", converter=leading_dense),
        ),
        gguf_only=(),
        defaults={
            "": {
                **_DEFAULTS, "scoring_func": "sigmoid", "n_shared_experts": 1, "norm_topk_prob": True,
                "bos_token_id": 0, "eos_token_id": 1,
            },
            "deepseek_v3": {
                "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
                "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
                "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "max_position_embeddings": 4096,
            },
            "glm4_moe_lite": {
                "qk_nope_head_dim": 192, "v_head_dim": 256, "q_lora_rank": 768, "n_routed_experts": 64,
                "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1536,
                "routed_scaling_factor": 1.8, "num_key_value_heads": 20, "rms_norm_eps": 1e-5,
                "max_position_embeddings": 202752,
            },
        },
    ),
    Architecture(
        id="mistral4",
        required={**_REQUIRED_KEYS, "attention.temperature_length": "attention.temperature_scale"}, gguf="mistral4",
        **hf_names("Mistral4", "mistral4"), rope_type=0,
        # All experts stand in two tensors; Mistral's own layout has each by itself.
        tensors=(
            *sorted(mla_decoder(), key=lambda row: "{e}" in row.hf[0]),
            *block(  # as other programs write it
                tensor(
                    "mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight", "experts,2*moe_ffn,hidden", OPTIONAL,
                    layers="moe",
                )
            ),
        ),
        keys=(
            *(key for key in mla_keys() if key.gguf != "expert_gating_func"), Key("expert_gating_func", constant=1),
            Key("attention.temperature_scale", (), "f32", converter=llama_4_scaling),
            Key("attention.temperature_length", converter=llama_4_length), must_be("rope_interleave", True), PAD,
        ),
        gguf_only=(),
        defaults={"": {
            "moe_intermediate_size": 2048, "num_key_value_heads": 32, "n_shared_experts": 1, "n_routed_experts": 128,
            "routed_scaling_factor": 1.0, "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "qk_nope_head_dim": 64, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4,
            "first_k_dense_replace": 0, "norm_topk_prob": True, "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False, "rope_interleave": True,
            "pad_token_id": 11, "bos_token_id": 1, "eos_token_id": 2,
        }},
    ),
)
