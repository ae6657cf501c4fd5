"""Rows of the architecture table: decoders whose layers differ in their heads and widths, or come in two stacks."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.row import Architecture, Difference, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DIMS, GROUPED, HEAD_DIM, RMS_EPS, ROPE, ROPE_DIM, SILU, VOCAB, WHOLE_HEADS, attention, block, embedding, gated_mlp,
    head, hf_names, linear, must_be, network, norm, rename, split, tensor,
)

_SIZES = (*DIMS, GROUPED)
_BY_BLOCK = {"intermediate_size": "block_widths", "num_heads": "block_heads", "num_kv_heads": "block_kv_heads"}
_BLOCK_SIZES = tuple(
    replace(key, kind="u32[]", via=_BY_BLOCK[key.field]) if key.field in _BY_BLOCK else key for key in _SIZES
)

_STACK = "num_layers_per_stack"


def _stack(module: str, first: str = "") -> tuple[TensorRow, ...]:
    """Layers with gated attention and norms without weights; published checkpoints have its matrices in two."""
    sides = {"gate_proj": "attn_gate", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v"}
    halves = dict.fromkeys(("ffn_gate.weight", "ffn_up.weight"), "ffn,hidden")
    quarters = {f"{name}.weight": "q,hidden" for name in sides.values()}
    return block(
        split("attn.gqkv_proj.weight", "4*q,hidden", quarters),
        *(row for hf, gguf in sides.items() for row in linear(f"self_attn.{hf}", gguf, "q,hidden")),
        *linear("attn.o_proj", "attn_output", "hidden,q"), *linear("self_attn.o_proj", "attn_output", "hidden,q"),
        split("mlp.gate_up_proj.weight", "2*ffn,hidden", halves), *gated_mlp(), hf=f"model.{module}.layers.{{n}}.",
        depth=_STACK, first=first,
    )


ROWS: tuple[Architecture, ...] = (
    # As apple/OpenELM-270M has it.
    Architecture(
        id="openelm", gguf="openelm", **hf_names("OpenELM", "openelm"), gguf_only=(), head_never=True,
        tensors=network(
            *norm("attn_norm", "attn_norm"), *linear("attn.qkv_proj", "attn_qkv", "q+2*kv,hidden"),
            *norm("attn.q_norm", "attn_q_norm", "head_dim"), *norm("attn.k_norm", "attn_k_norm", "head_dim"),
            *linear("attn.out_proj", "attn_output", "hidden,q"), *norm("ffn_norm", "ffn_norm"),
            split(
                "ffn.proj_1.weight", "2*ffn,hidden", dict.fromkeys(("ffn_gate.weight", "ffn_up.weight"), "ffn,hidden"),
            ),
            *linear("ffn.proj_2", "ffn_down", "hidden,ffn"),
            hf="transformer.layers.{n}.", embed="transformer.token_embeddings", last="transformer.norm",
        ),
        keys=(
            *rename(
                tuple(key for key in DIMS if key.field not in ("intermediate_size", "num_heads")),
                num_layers="num_transformer_layers", max_position_embeddings="max_context_length",
                hidden_size="model_dim",
            ),
            Key("feed_forward_length", ("ffn_multipliers",), "u32[]", via="multiplied_widths"),
            Key("", ("ffn_dim_divisor",)),
            Key("attention.head_count", ("num_query_heads",), "u32[]", field="num_heads", via="in_every_layer"),
            Key("attention.head_count_kv", ("num_kv_heads",), "u32[]", field="num_kv_heads", via="in_every_layer"),
            Key("rope.freq_base", ("rope_freq_constant",), "f32", field="rope_theta"),
            Key("attention.layer_norm_rms_epsilon", (), "f32", field="rms_norm_eps", constant=1e-6), HEAD_DIM, ROPE_DIM,
            must_be("activation_fn_name", "silu"), must_be("ffn_with_glu", True),
            must_be("normalization_layer_name", "rms_norm"), must_be("normalize_qk_projections", True),
            must_be("share_input_output_layers", True),
        ),
        defaults={"": {"tie_word_embeddings": True, "ffn_dim_divisor": 256, "rope_freq_constant": 10000}},
    ),
    # As Deci/DeciLM-7B and nvidia/Llama-3_1-Nemotron-51B-Instruct have it.
    Architecture(
        id="deci", gguf="deci", **hf_names("DeciLM", "nemotron-nas", also=("deci",)), rope_type=0,
        tensors=network(
            *norm("input_layernorm", "attn_norm", layers="heads"), *attention(permuted=True, layers="kv_heads"),
            *linear("self_attn.linear_attn", "attn_output", "hidden,hidden", layers="heads&!kv_heads"),
            *norm("post_attention_layernorm", "ffn_norm", layers="ffn"), *gated_mlp(layers="ffn"),
        ),
        keys=(
            *(
                replace(key, kind="u32[]", via=_BY_BLOCK[key.field]) if key.field in _BY_BLOCK else key
                for key in _SIZES
            ),
            Key("", ("num_key_value_heads_per_layer",), "u32[]", via="listed_kv_heads"),
            Key("", ("block_configs",), via="blocks"), Key("attention.key_length", via="block_head_dim"), ROPE, RMS_EPS,
            VOCAB, ROPE_DIM, WHOLE_HEADS, must_be("attention_bias", False), must_be("mlp_bias", False), SILU,
        ),
        differs=(Difference("llama.cpp's deci leaves out a layer that has attention but no MLP", "lone_attention"),),
        defaults={"": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048}},
    ),
    # What runs H_cycles times: L_cycles times the low stack, then the high one.
    Architecture(
        id="hrm_text", gguf="hrm_text", **hf_names("HrmText", "hrm_text"), gguf_only=(),
        required={f"hrm.{key}": "" for key in ("layers_per_stack", "h_cycles", "l_cycles")},
        tensors=(
            embedding(), tensor("model.z_L_init", "hrm.z_l_init", "hidden"), *_stack("L_module"),
            *_stack("H_module", _STACK), *head(),
        ),
        keys=(
            *DIMS, ROPE, RMS_EPS, HEAD_DIM, ROPE_DIM, Key("", ("initializer_range",), "f32"),
            Key("embedding_scale", ("embedding_scale",), "f32", via="scale_of_range"),
            Key("hrm.h_cycles", ("H_cycles",)), Key("hrm.l_cycles", ("L_cycles",)),
            Key("hrm.layers_per_stack", (_STACK,), via="layers_of_stack"), Key("hrm.prefix_lm", ("prefix_lm",), "bool"),
            SILU, must_be("attention_bias", False), must_be("mlp_bias", False),
        ),
        defaults={"": {
            "num_attention_heads": 12, "hidden_act": "silu", "max_position_embeddings": 2048, "initializer_range": 0.02,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
            "head_dim": 128, "H_cycles": 2, "L_cycles": 3, "prefix_lm": True,
        }},
        differs=(
            Difference(
                "llama.cpp's tokens see only those before them: a prompt whose tokens all see each other (prefix_lm) "
                "gets other logits",
                "prefix_lm",
            ),
        ),
    ),
)
