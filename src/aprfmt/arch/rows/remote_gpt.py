"""Rows of the architecture table: kin of GPT-2 whose code came with their checkpoints."""

from __future__ import annotations

from aprfmt.arch.converters.common import of_tensor
from aprfmt.arch.row import HEAD, REQUIRED, Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DIMS, EPSILON, HEAD_DIM, ROPE, block, conv1d, embedding, final_norm, gated_mlp, hf_names, linear, must_be, norm,
    rename, tensor,
)

ROWS: tuple[Architecture, ...] = (
    # As inceptionai/jais-family-590m and core42/jais-13b have it; a GGUF has both scales in the matrices.
    Architecture(
        id="jais", gguf="jais", **hf_names("JAIS", "jais", end="LMHeadModel"), gguf_only=(), head_always=True,
        ignored=(".attn.bias", ".attn.masked_bias", ".relative_pe.slopes"),
        tensors=(
            tensor("transformer.wte.weight", "token_embd.weight", "vocab,hidden", scale=(":mup_embeddings_scale",)),
            *block(
                *norm("ln_1", "attn_norm", bias=REQUIRED), *conv1d("attn.c_attn", "attn_qkv", "hidden", "3*hidden"),
                *conv1d("attn.c_proj", "attn_output", "hidden", "hidden"), *norm("ln_2", "ffn_norm", bias=REQUIRED),
                *conv1d("mlp.c_fc", "ffn_up", "hidden", "ffn"), *conv1d("mlp.c_fc2", "ffn_gate", "hidden", "ffn"),
                *conv1d("mlp.c_proj", "ffn_down", "ffn", "hidden"),
                hf="transformer.h.{n}.",
            ),
            *final_norm("transformer.ln_f", REQUIRED),
            tensor(
                "lm_head.weight", "output.weight", "vocab,hidden", HEAD, scale=(":mup_output_alpha*mup_width_scale",)
            ),
        ),
        keys=(
            *rename(
                DIMS, num_layers="n_layer", max_position_embeddings="n_positions", hidden_size="n_embd",
                intermediate_size="n_inner", num_heads="n_head",
            ),
            EPSILON, Key("attention.max_alibi_bias", kind="f32", constant=8.0),
            Key("", ("mup_embeddings_scale", "embeddings_scale"), "f32"),
            Key("", ("mup_width_scale", "width_scale"), "f32"), Key("", ("mup_output_alpha",), "f32"),
            Key("", ("mup_scale_qk_dot_by_d", "scale_qk_dot_by_d"), "bool", constant=True),
            must_be("activation_function", "swiglu"), must_be("position_embedding_type", "alibi"),
        ),
        defaults={
            "": {
                "layer_norm_epsilon": 1e-5, "mup_embeddings_scale": 1.0, "mup_width_scale": 1.0,
                "mup_output_alpha": 1.0, "tie_word_embeddings": True,
            }
        },
    ),
    # As lewtun/talkie-1930-13b-it-hf has it, which rotates the other way round than llama.cpp.
    Architecture(
        id="talkie", gguf="talkie", required={"logit_scale": ""}, **hf_names("Talkie", "talkie"), gguf_only=(),
        prefixes=(("lm_head.weight", "lm_head"),),
        tensors=(
            embedding("model.embed"),
            *block(
                *linear("attn.attn_query", "attn_q", "q,hidden", value="mirror:head_dim"),
                tensor("attn.head_gain.head_g", "attn_q_norm.weight", "heads", gguf_dims=("heads,1",)),
                *linear("attn.attn_key", "attn_k", "q,hidden", value="mirror:head_dim"),
                *linear("attn.attn_value", "attn_v", "q,hidden"), *linear("attn.attn_resid", "attn_output", "hidden,q"),
                tensor("attn_gain.a_g", "attn_output.scale", "1"),
                *gated_mlp(names=("mlp_gate", "mlp_linear", "mlp_resid")),
                tensor("mlp_gain.a_g", "ffn_down.scale", "1"),
                tensor("embed_skip.a_g", "layer_output_scale.weight", "1"), hf="model.blocks.{n}.",
            ),
            tensor("lm_head", "output.weight", "vocab,hidden", HEAD), TensorRow(("lm_head_gain.w_g",), (), ("1",)),
        ),
        keys=(
            *DIMS, ROPE, HEAD_DIM,
            # The smallest difference to 1 of a float32, which torch takes where nothing is said.
            Key("attention.layer_norm_rms_epsilon", kind="f32", field="rms_norm_eps", constant=1.1920929e-07),
            Key("logit_scale", ("lm_head_gain.w_g",), "f32", converter=of_tensor),
        ),
        defaults={"": {"tie_word_embeddings": False, "rope_theta": 1000000.0}},
    ),
)
