"""Grok 1 and 2."""

from __future__ import annotations

from aprfmt.arch.blocks.decoder import (
    DIMS, GROUPED, HEAD_DIM, RMS_EPS, ROPE, WHOLE_HEADS, attention, experts,
    gated_mlp, hf_names, linear, must_be, network, norm, rename,
)
from aprfmt.arch.blocks.moe import COUNT, USED, WIDTH
from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.fields import as_float, shorten
from aprfmt.arch.row import Architecture, Key
from aprfmt.io.jsonx import to_f32


def _root_to_gguf(value: object, scope: Scope) -> float | None:
    """The factor of attention scores; by default one over the square root of the head size."""
    scale, size = as_float(value, scope.name), scope.h.head_dim
    return scale if scale is not None or not size else size**-0.5


def _root_from_gguf(value: object, scope: Scope) -> object:
    scale, size = as_float(value, scope.key.gguf), scope.h.head_dim
    return DEFAULT if scale is None or (size and to_f32(size**-0.5) == scale) else shorten(scale)


_ORIGINAL = ("original", "yarn")
"""How Grok 2 calls yarn."""

original_yarn = Converter(
    lambda value, scope: "yarn" if value in _ORIGINAL else None,
    lambda value, scope: _ORIGINAL[0] if value == "yarn" else None,
)
if_yarn = Converter(lambda value, scope: value if scope.config("rope_type") in _ORIGINAL else None)
_ROUTED = rename((COUNT, USED), num_experts=("num_local_experts", "num_experts"))


def _grok_keys(*family: Key) -> tuple[Key, ...]:
    """Caps and scales; the experts' activation has no config key."""
    return (
        *DIMS, GROUPED, *family, RMS_EPS, *_ROUTED, HEAD_DIM,
        Key("router_logit_softcapping", ("router_logit_softcapping",), "f32"),
        Key("attention.output_scale", ("attn_output_multiplier",), "f32",
            converter=Converter(_root_to_gguf, _root_from_gguf)),
        Key("embedding_scale", ("embedding_multiplier_scale",), "f32"),
        Key("logit_scale", ("output_multiplier_scale",), "f32"),
        WHOLE_HEADS,
    )


_YARN = {
    "factor": "scaling_factor", "yarn_ext_factor": "extrapolation_factor", "yarn_attn_factor": "attn_factor",
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}

ROWS: tuple[Architecture, ...] = (
    # As keyfan/grok-1-hf has it.
    Architecture(
        id="grok", gguf="grok", **hf_names("Grok", "grok-1"),
        tensors=network(
            *norm("rms_norm", "attn_norm"),
            *linear("multi_head_attention.query", "attn_q", "q,hidden"),
            *linear("multi_head_attention.key", "attn_k", "kv,hidden"),
            *linear("multi_head_attention.value", "attn_v", "kv,hidden"),
            *linear("multi_head_attention.linear", "attn_output", "hidden,q"),
            *norm("rms_norm_1", "attn_output_norm"),
            *norm("rms_norm_2", "ffn_norm"),
            *linear("router", "ffn_gate_inp", "experts,hidden"),
            *experts("moe.{e}.", ("linear", "linear_v", "linear_1")),
            *norm("rms_norm_3", "layer_output_norm"),
            hf="transformer.decoder_layer.{n}.", embed="transformer.in_out_embed", last="transformer.rms_norm",
        ),
        keys=_grok_keys(ROPE, Key("attn_logit_softcapping", ("max_attn_value",), "f32")),
    ),
    # As xai-org/grok-2 has it.
    Architecture(
        id="grok2", gguf="grok", when="tensors=post_ffw_norm.weight", hf_class="Grok1ForCausalLM",
        model_type="git", hf_classes=("Grok1ForCausalLM",),
        model_types=(),
        tensors=network(
            *norm("pre_attn_norm", "attn_norm"),
            *attention(),
            *norm("post_attn_norm", "attn_output_norm"),
            *norm("pre_moe_norm", "ffn_norm"),
            *gated_mlp(),
            *linear("block_sparse_moe.gate", "ffn_gate_inp", "experts,hidden"),
            *experts("block_sparse_moe.experts.{e}.", ("w1", "w3", "w2")),
            *norm("post_moe_norm", "post_ffw_norm"),
        ),
        keys=_grok_keys(
            Key("rope.freq_base", ("rope_theta",), "f32", field="rope_theta"),
            Key("rope.scaling.type", ("rope_type",), "str", converter=original_yarn),
            Key("rope.scaling.original_context_length", ("original_max_position_embeddings",), converter=if_yarn),
            *(Key(f"rope.scaling.{gguf}", (hf,), "f32", converter=if_yarn) for gguf, hf in _YARN.items()),
            WIDTH, Key("attn_logit_softcapping", ("attn_logit_softcapping",), "f32"),
            Key("final_logit_softcapping", ("final_logit_softcapping",), "f32"),
            Key("attention.temperature_length", ("attn_temperature_len",)),
            must_be("residual_moe", True),
            must_be("sliding_window_size", -1),
            Key("", ("global_attn_every_n",)),
        ),
    ),
)
