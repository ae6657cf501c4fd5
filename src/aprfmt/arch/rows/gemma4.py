"""Rows of the architecture table: Gemma 3n and Gemma 4, whose layers differ in heads, widths and what they share."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DIMS, GROUPED, HEAD_DIM, RMS_EPS, ROPE, block, class_names, embedding, final_norm, flag, gated_mlp, head, linear,
    must_be, norm, number, rename, tensor,
)
from aprfmt.arch.rows.parts_moe import COUNT, USED, WIDTH

_LAYERS = Key("attention.sliding_window_pattern", ("layer_types",), "bool[]", via="layer_types")
_SHARED_KV = Key("attention.shared_kv_layers", ("num_kv_shared_layers",), via="shared_kv")
_GELU = must_be("hidden_activation", "gelu_pytorch_tanh")
_TOKENS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}


def _attention(kind: str, head_dim: str, kv_heads: str, values: str = REQUIRED) -> tuple[TensorRow, ...]:
    """Attention of one kind of layers; `values` says whether it has values that are not its keys.

    Keys and values of a layer that shares those of another are in some checkpoints, unused.
    """
    kv, rows = f"{kv_heads}*{head_dim},hidden", list[TensorRow]()
    for layers, need in ((f"{kind}&!shares_kv", REQUIRED), (f"{kind}&shares_kv", OPTIONAL)):
        bias = "attention_bias" if need == REQUIRED else need
        separate = values if need == REQUIRED else need
        rows += linear("self_attn.k_proj", "attn_k", kv, bias, need, layers=layers)
        rows += linear("self_attn.v_proj", "attn_v", kv, f"{bias}&{separate}", separate, layers=layers)
        rows += norm("self_attn.k_norm", "attn_k_norm", head_dim, need=need, layers=layers)
    return (
        *linear("self_attn.q_proj", "attn_q", f"heads*{head_dim},hidden", "attention_bias", layers=kind), *rows,
        *linear("self_attn.o_proj", "attn_output", f"hidden,heads*{head_dim}", "attention_bias", layers=kind),
        *norm("self_attn.q_norm", "attn_q_norm", head_dim, layers=kind),
    )


def _double_wide() -> tuple[TensorRow, ...]:
    rows = gated_mlp(layers="double_wide")
    return tuple(replace(row, dims=tuple(dims.replace("ffn", "2*ffn") for dims in row.dims)) for row in rows)


def _gemma4_experts() -> tuple[TensorRow, ...]:
    need = "enable_moe_block"
    return (
        *linear("router.proj", "ffn_gate_inp", "experts,hidden", need=need),
        tensor("router.scale", "ffn_gate_inp.scale", "hidden", need),
        tensor("router.per_expert_scale", "ffn_down_exps.scale", "experts", need),
        tensor("experts.gate_up_proj", "ffn_gate_up_exps.weight", "experts,2*moe_ffn,hidden", need),
        tensor("experts.down_proj", "ffn_down_exps.weight", "experts,hidden,moe_ffn", need),
        *norm("post_feedforward_layernorm_1", "post_ffw_norm_1", need=need),
        *norm("post_feedforward_layernorm_2", "post_ffw_norm_2", need=need),
        *norm("pre_feedforward_layernorm_2", "pre_ffw_norm_2", need=need),
    )


_PER_LAYER = "hidden_size_per_layer_input"


def _per_layer_model(need: str = REQUIRED) -> tuple[TensorRow, ...]:
    """Embeddings of a token for each layer, and what makes more of them out of its main embedding.

    Where fewer tokens have some, a GGUF has zeros for the others, which stand for images and sounds.
    """
    rows, width = "vocab_size_per_layer_input", f"layers*{_PER_LAYER}"
    table = tensor("model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight", f"{rows},{width}", need)
    return (
        replace(table, gguf_dims=(f"vocab,{width}",), trail=f"vocab-{rows}"),
        *linear("model.per_layer_model_projection", "per_layer_model_proj", f"layers*{_PER_LAYER},hidden", need=need),
        *norm("model.per_layer_projection_norm", "per_layer_proj_norm", _PER_LAYER, need=need),
    )


def _per_layer_input(need: str = REQUIRED) -> tuple[TensorRow, ...]:
    return (
        *linear("per_layer_input_gate", "inp_gate", f"{_PER_LAYER},hidden", need=need),
        *linear("per_layer_projection", "proj", f"hidden,{_PER_LAYER}", need=need),
        *norm("post_per_layer_input_norm", "post_norm", need=need),
    )


_NORMS = (
    *norm("input_layernorm", "attn_norm"), *norm("post_attention_layernorm", "post_attention_norm"),
    *norm("pre_feedforward_layernorm", "ffn_norm"), *norm("post_feedforward_layernorm", "post_ffw_norm"),
)


def _gemma3n_layer() -> tuple[TensorRow, ...]:
    """What a layer has for four streams of hidden states, of which it computes one, and a learned residual."""
    n = "altup_num_inputs"
    return (
        tensor("altup.correct_output_scale", "altup_correct_scale.weight", "hidden"),
        *linear("altup.correction_coefs", "altup_correct_coef", f"{n},{n}"),
        *linear("altup.prediction_coefs", "altup_predict_coef", f"{n}*{n},{n}"),
        *linear("altup.modality_router", "altup_router", f"{n},hidden"),
        *norm("altup.router_norm", "altup_router_norm"),
        *linear("laurel.linear_left", "laurel_l", "laurel_rank,hidden"),
        *linear("laurel.linear_right", "laurel_r", "hidden,laurel_rank"),
        *norm("laurel.post_laurel_norm", "laurel_post_norm"),
    )


def _streams(hf: str, gguf: str) -> TensorRow:
    """A matrix for each stream but the first, which a GGUF stacks."""
    names = tuple(f"model.{hf}.{i}.weight" for i in range(3))
    return TensorRow(names, (f"{gguf}.weight",), ("hidden,hidden",), gguf_dims=("3,hidden,hidden",))


def _widths(via: str) -> tuple[Key, ...]:
    return tuple(replace(key, kind="u32[]", via=via) if key.field == "intermediate_size" else key for key in DIMS)


_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_GEMMA4_DEFAULTS = {
    **_TOKENS, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "attention_bias": False, "sliding_window_pattern": 6, "attention_k_eq_v": False, "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False, "rope_parameters": _GEMMA4_ROPE,
}


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="gemma3n_text", required={"attention.sliding_window": ""}, gguf="gemma3n",
        **class_names("Gemma3nForCausalLM", "Gemma3nTextModel", types=("gemma3n_text",), bare=("Gemma3nTextModel",)),
        gguf_only=(),
        tensors=(
            embedding(), *_per_layer_model(), _streams("altup_projections", "altup_proj"),
            _streams("altup_unembed_projections", "altup_unembd_proj"),
            *block(
                *_NORMS, *_attention("sliding_attention", "head_dim", "kv_heads"),
                *_attention("full_attention", "head_dim", "kv_heads"), *gated_mlp(), *_gemma3n_layer(),
                *_per_layer_input(),
            ),
            *final_norm(), *head(),
        ),
        keys=(
            *_widths("width_a_layer"), GROUPED, ROPE, RMS_EPS, HEAD_DIM,
            Key("final_logit_softcapping", ("final_logit_softcapping",), "f32", constant=30.0),
            Key("attention.sliding_window", ("sliding_window",)), _LAYERS,
            Key("embedding_length_per_layer_input", (_PER_LAYER,), constant=256),
            Key("", ("vocab_size_per_layer_input",), via="row_a_token"), replace(_SHARED_KV, via="shared_kv_from_20"),
            Key("altup.active_idx", ("altup_active_idx",), constant=0),
            Key("altup.num_inputs", ("altup_num_inputs",), constant=4), must_be("altup_correct_scale", True),
            must_be("laurel_rank", 64), Key("", ("activation_sparsity_pattern",), "f32[]", via="ten_sparse_layers"),
            must_be("attention_bias", False), _GELU,
        ),
        nested_rope=True,
        defaults={"": {
            **_TOKENS, "hidden_size": 2048, "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2,
            "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
            "attention_bias": False, "sliding_window": 512, "sliding_window_pattern": 5,
            "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
            "altup_active_idx": 0, "altup_correct_scale": True, "altup_num_inputs": 4, "num_kv_shared_layers": 15,
            "laurel_rank": 64, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        }},
    ),
    Architecture(
        id="gemma4_text", gguf="gemma4",
        **class_names("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM", types=("gemma4_text", "gemma4_unified_text")),
        tensors=(
            embedding(), *_per_layer_model(_PER_LAYER),
            *block(
                *_NORMS, *_attention("sliding_attention", "head_dim", "kv_heads"),
                *_attention("full_attention", "global_head_dim", "num_global_key_value_heads", "!attention_k_eq_v"),
                *gated_mlp(layers="!double_wide"), *_double_wide(), *_gemma4_experts(), *_per_layer_input(_PER_LAYER),
                tensor("layer_scalar", "layer_output_scale.weight", "1"),
            ),
            *final_norm(), *head(),
        ),
        keys=(
            *_widths("double_wide"), replace(GROUPED, kind="u32[]", via="window_kv_heads"), ROPE, RMS_EPS,
            replace(_LAYERS, via="last_full_layer_types"),
            replace(number("head_dim"), gguf="attention.key_length_swa", via="window_heads"),
            Key("attention.key_length", ("global_head_dim",), via="global_heads"),
            Key("", ("num_global_key_value_heads",), via="global_kv_heads"), Key("", ("per_layer_config",)),
            Key("attention.sliding_window", ("sliding_window",)),
            Key("final_logit_softcapping", ("final_logit_softcapping",), "f32"),
            Key("embedding_length_per_layer_input", (_PER_LAYER,), via="number_or_0"),
            Key("", ("vocab_size_per_layer_input",), via="row_a_token"), _SHARED_KV,
            *rename((COUNT, USED, WIDTH), num_experts="num_experts", num_experts_per_tok="top_k_experts"),
            flag("enable_moe_block"), Key("", ("attention_k_eq_v",), "bool", via="values_are_keys"),
            flag("use_double_wide_mlp"), Key("", ("use_bidirectional_attention",), "str", allowed=("vision",)),
            must_be("attention_bias", False), _GELU,
        ),
        required={
            "attention.sliding_window": "", "attention.sliding_window_pattern": "", "attention.key_length_swa": "",
            "attention.value_length_swa": "", "embedding_length_per_layer_input": "",
        },
        nested_rope=True, freqs_always=True,
        defaults={
            "": _GEMMA4_DEFAULTS,
            "gemma4_text": {
                "max_position_embeddings": 131072, "sliding_window": 512, "vocab_size_per_layer_input": 262144,
                "hidden_size_per_layer_input": 256, "enable_moe_block": False,
            },
            "gemma4_unified_text": {
                "max_position_embeddings": 262144, "sliding_window": 1024, "use_bidirectional_attention": "vision",
            },
        },
    ),
)
