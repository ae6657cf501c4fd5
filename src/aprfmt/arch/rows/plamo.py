"""Rows of the architecture table: PLaMo 3."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.row import Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DECODER,
    VOCAB,
    WINDOW,
    block,
    embedding,
    final_norm,
    head,
    linear,
    must_be,
    norm,
    tensor,
)

_QKV = "q+2*kv,hidden"


def _layers(*mixer: TensorRow) -> tuple[TensorRow, ...]:
    """Norms before and behind the mixer and the MLP; what they are long by is added to them where they are used."""
    return (
        embedding(),
        *block(
            *norm("pre_mixer_norm", "attn_norm", value="plus_one"),
            *mixer,
            tensor("post_mixer_norm.weight", "post_attention_norm", "hidden", value="plus_fifth"),
            *norm("pre_mlp_norm", "ffn_norm", value="plus_one"),
            *linear("mlp.gate_up_proj", "ffn_up", "2*ffn,hidden"),
            *linear("mlp.down_proj", "ffn_down", "hidden,ffn"),
            tensor("post_mlp_norm.weight", "post_ffw_norm", "hidden", value="plus_root_of_125th"),
            hf="model.layers.layers.{n}.",
        ),
        *final_norm(value="plus_one"),
        *head(),
    )


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="plamo3",
        gguf="plamo3",
        hf_class="Plamo3ForCausalLM",
        model_type="plamo3",
        hf_classes=("Plamo3ForCausalLM", "PLaMo3ForCausalLM"),
        model_types=("plamo3",),
        nested_rope=True,
        tensors=_layers(
            *linear("mixer.qkv_proj", "attn_qkv", _QKV),
            *norm("mixer.q_norm", "attn_q_norm", "head_dim", value="plus_one"),
            *norm("mixer.k_norm", "attn_k_norm", "head_dim", value="plus_one"),
            *linear("mixer.o_proj", "attn_output", "hidden,q"),
        ),
        keys=(
            *DECODER,
            VOCAB,
            replace(WINDOW, hf=("window_size", "sliding_window")),
            Key("attention.sliding_window_pattern", ("sliding_window_pattern",), via="period_of_window"),
            must_be("rope_scaling_factor", 1),
        ),
        defaults={"": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_local_theta": 10000.0}},
    ),
)
