"""Cohere's Command."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    ALWAYS_WINDOW, DIMS, GROUPED, HEAD_DIM, LAYER_EPS, ROPE, ROPE_DIM, SILU, VOCAB, WINDOW_LAYERS, attention, block,
    convert, embedding, final_norm, gated_mlp, head, hf_names, must_be, network, norm, rename,
)
from aprfmt.arch.blocks.moe import (
    COUNT, DENSE_LAYERS, MLP_LAYER_TYPES, MTP, NO_BIAS, NUM_SHARED_EXPERTS, SHARED_WIDTH, USED, WIDTH, draft_layer,
    router_and_experts, shared_expert,
)
from aprfmt.arch.converter import Converter, Scope
from aprfmt.arch.converters.common import gating, unscaled
from aprfmt.arch.converters.layers import kinds_of, layer_types, own_layer_types, periodic, positive, some_layer_types
from aprfmt.arch.converters.windows import FOURTH
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import Architecture, Key, TensorRow
from aprfmt.errors import RefusedError


_NORMED_LAYERS = 64
"""Number of layers from which llama.cpp's command-r requires norms of Q and K; below it has none."""


def _large_qk_norm_to_gguf(value: object, scope: Scope) -> None:
    normed, n_layers = bool(value), scope.h.num_layers or 0
    if normed != (n_layers >= _NORMED_LAYERS):
        raise RefusedError(
            f"use_qk_norm is {normed} with {n_layers} layers: llama.cpp's {scope.row.gguf} norms Q and K if, and only "
            f"if, a model has {_NORMED_LAYERS} layers or more"
        )


# Command-R states a small context, and its training context under another key.
trained_length = Converter(lambda value, scope: scope.size("model_max_length") or value)
_ODD_LAYERS = Key("attention.sliding_window_pattern", ("layer_types",), "bool[]", converter=own_layer_types)
_SOME_LAYERS = replace(_ODD_LAYERS, converter=some_layer_types)
_LOGIT_SCALE = Key("logit_scale", ("logit_scale",), "f32")
_UNSCALED = Key("rope.scaling.type", kind="str", converter=unscaled)
_NO_BIAS = must_be("attention_bias", False)


def _parallel(*attention_rows: TensorRow) -> tuple[TensorRow, ...]:
    """Cohere's parallel decoder: one norm of a layer feeds attention and MLP."""
    return (
        embedding(), *block(*norm("input_layernorm", "attn_norm"), *attention_rows, *gated_mlp()), *final_norm(),
        *head(),
    )


_COHERE = (*DIMS, GROUPED, ROPE, LAYER_EPS, HEAD_DIM, _LOGIT_SCALE, _UNSCALED, _NO_BIAS, SILU)
like_experts = Converter(derive=lambda scope: scope.h.moe_intermediate_size)
norm_of_softmax = Converter(
    lambda value, scope: value or scope.config("expert_selection_fn") == "softmax", lambda value, scope: bool(value),
)


def _dense_prefix(scope: Scope) -> list[str] | None:
    """Dense layers come first and have a window period of their own."""
    n_layers, dense = scope.h.num_layers, scope.size("first_k_dense_replace") or 0
    own = as_int(scope.config("prefix_dense_sliding_window_pattern"), "prefix_dense_sliding_window_pattern") or 1
    pattern = scope.h.extra.get("sliding_window_pattern", scope.defaults.get("sliding_window_pattern"))
    if n_layers is None:
        return None
    rest = periodic(as_int(pattern, "sliding_window_pattern") or FOURTH, max(0, n_layers - dense))
    return kinds_of([*periodic(own, min(dense, n_layers)), *rest])


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="cohere", gguf="command-r", **hf_names("Cohere", "cohere"), rope_type=0,
        tensors=_parallel(
            *attention("attention_bias", "attention_bias"),
            *norm("self_attn.q_norm", "attn_q_norm", "heads,head_dim", need="use_qk_norm"),
            *norm("self_attn.k_norm", "attn_k_norm", "kv_heads,head_dim", need="use_qk_norm"),
        ),
        keys=(
            *convert(_COHERE, max_position_embeddings=trained_length), Key("", ("model_max_length",)),
            Key("", ("use_qk_norm",), "bool", converter=Converter(_large_qk_norm_to_gguf)),
        ),
    ),
    Architecture(
        id="cohere2", gguf="cohere2", **hf_names("Cohere2", "cohere2"), rope_type=0,
        tensors=_parallel(*attention("attention_bias", "attention_bias")),
        keys=(*_COHERE, ALWAYS_WINDOW, _SOME_LAYERS, VOCAB, ROPE_DIM),
    ),
    Architecture(
        id="cohere2_moe", gguf="cohere2moe", **hf_names("Cohere2Moe", "cohere2_moe"), rope_type=0,
        tensors=network(
            *norm("input_layernorm", "attn_norm"), *attention("attention_bias", "attention_bias"),
            *router_and_experts("moe"),
            *shared_expert("mlp.shared_experts", "num_shared_experts*moe_ffn", "num_shared_experts", "moe"),
            *gated_mlp(layers="dense"), *draft_layer(),
        ),
        keys=(
            *(
                replace(key, hf=("prefix_dense_intermediate_size",), converter=like_experts)
                if key.field == "intermediate_size"
                else key
                for key in DIMS
            ),
            GROUPED, ROPE, LAYER_EPS, Key("attention.layer_norm_rms_epsilon", ("rms_norm_eps",), "f32"),
            *rename((COUNT, USED, WIDTH), num_experts="num_experts", moe_intermediate_size="intermediate_size"),
            HEAD_DIM, Key("logit_scale", ("logit_scale",), "f32"), ALWAYS_WINDOW,
            replace(WINDOW_LAYERS, converter=replace(layer_types, derive=_dense_prefix)), VOCAB, DENSE_LAYERS,
            MLP_LAYER_TYPES, Key("expert_gating_func", ("expert_selection_fn",), converter=gating),
            Key("expert_weights_norm", ("norm_topk_prob",), "bool", converter=norm_of_softmax),
            replace(NUM_SHARED_EXPERTS, converter=positive), SHARED_WIDTH,
            must_be("shared_expert_combination_strategy", "average"), must_be("prefix_dense_sliding_window_pattern", 1),
            ROPE_DIM, MTP, _UNSCALED, NO_BIAS, SILU,
        ),
    ),
)
