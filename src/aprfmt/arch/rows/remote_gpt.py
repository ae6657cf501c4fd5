"""Rows of the architecture table: kin of GPT-2 whose code came with their checkpoints."""

from __future__ import annotations

from aprfmt.arch.row import HEAD, REQUIRED, Architecture, Key
from aprfmt.arch.rows.parts import DIMS, EPSILON, block, conv1d, final_norm, hf_names, must_be, norm, rename, tensor

ROWS: tuple[Architecture, ...] = (
    # As inceptionai/jais-family-590m and core42/jais-13b have it; a GGUF has both scales in the matrices.
    Architecture(
        id="jais",
        gguf="jais",
        **hf_names("JAIS", "jais", end="LMHeadModel"),
        gguf_only=(),
        head_always=True,
        ignored=(".attn.bias", ".attn.masked_bias", ".relative_pe.slopes"),
        tensors=(
            tensor("transformer.wte.weight", "token_embd.weight", "vocab,hidden", value="times:mup_embeddings_scale"),
            *block(
                *norm("ln_1", "attn_norm", bias=REQUIRED),
                *conv1d("attn.c_attn", "attn_qkv", "hidden", "3*hidden"),
                *conv1d("attn.c_proj", "attn_output", "hidden", "hidden"),
                *norm("ln_2", "ffn_norm", bias=REQUIRED),
                *conv1d("mlp.c_fc", "ffn_up", "hidden", "ffn"),
                *conv1d("mlp.c_fc2", "ffn_gate", "hidden", "ffn"),
                *conv1d("mlp.c_proj", "ffn_down", "ffn", "hidden"),
                hf="transformer.h.{n}.",
            ),
            *final_norm("transformer.ln_f", REQUIRED),
            tensor(
                "lm_head.weight", "output.weight", "vocab,hidden", HEAD, value="times:mup_output_alpha*mup_width_scale"
            ),
        ),
        keys=(
            *rename(
                DIMS,
                num_layers="n_layer",
                max_position_embeddings="n_positions",
                hidden_size="n_embd",
                intermediate_size="n_inner",
                num_heads="n_head",
            ),
            EPSILON,
            Key("attention.max_alibi_bias", kind="f32", constant=8.0),
            Key("", ("mup_embeddings_scale", "embeddings_scale"), "f32"),
            Key("", ("mup_width_scale", "width_scale"), "f32"),
            Key("", ("mup_output_alpha",), "f32"),
            Key("", ("mup_scale_qk_dot_by_d", "scale_qk_dot_by_d"), "bool", constant=True),
            must_be("activation_function", "swiglu"),
            must_be("position_embedding_type", "alibi"),
        ),
        defaults={
            "": {
                "layer_norm_epsilon": 1e-5,
                "mup_embeddings_scale": 1.0,
                "mup_width_scale": 1.0,
                "mup_output_alpha": 1.0,
                "tie_word_embeddings": True,
            }
        },
    ),
)
