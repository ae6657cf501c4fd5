"""Rows of the architecture table: Granite SWA and Muse Glimmer, which mix layers with and without a window."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.converters.layers import kinds_of, layer_types, periodic, positive, slides_of
from aprfmt.arch.converters.windows import FOURTH, full_every_fourth
from aprfmt.arch.row import Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DECODER, ROPE_DIM, SCALES, SILU, VOCAB, attention, class_names, decoder, flag, gated_mlp, hf_names, linear, must_be,
    network, norm, rename, tensor,
)
from aprfmt.arch.rows.parts_moe import COUNT, NO_BIAS, USED
from aprfmt.errors import CorruptError, RefusedError


def _rope_pattern_to(value: object, scope: Scope) -> list[bool] | None:
    """Which layers are rotated, where not all are, from the base frequency of each: 0 for those that are not."""
    listed = value if value is not None else scope.h.extra.get("no_rope_layers")
    if listed is None:
        return None
    if not isinstance(listed, list):
        raise CorruptError(f"{scope.name} is not a list")
    if value is not None and {theta for theta in listed if theta} - {scope.h.rope_theta}:
        raise RefusedError(f"{scope.name}: a GGUF of {scope.row.gguf} has one base frequency for all layers")
    return None if all(listed) else [bool(item) for item in listed]


def _rope_pattern_from(value: object, scope: Scope) -> object:
    return [scope.h.rope_theta if rotated else 0 for rotated in value] if isinstance(value, list) else DEFAULT


def _window_theta_to(value: object, scope: Scope) -> None:
    """llama.cpp rotates the layers with a window and no others, all by one base frequency."""
    kinds = scope.h.extra.get("layer_types")
    if not isinstance(value, list) or not isinstance(kinds, list):
        return
    if [theta or 0 for theta in value] != [scope.h.rope_theta if one else 0 for one in slides_of(kinds)]:
        raise RefusedError(
            f"{scope.name}: llama.cpp's {scope.row.gguf} rotates the layers with a window, and no others"
        )


def _window_theta_from(value: object, scope: Scope) -> object:
    kinds = scope.h.extra.get("layer_types")
    return [scope.h.rope_theta if one else 0 for one in slides_of(kinds)] if isinstance(kinds, list) else DEFAULT


dense_first_layer_types = replace(layer_types, derive=full_every_fourth)
last_dense_layer_types = replace(
        layer_types, derive=lambda scope: kinds_of([*reversed(periodic(FOURTH, scope.h.num_layers or 0, first=0))])
    )
rotated_with_window = Converter(_window_theta_to, _window_theta_from)
rope_pattern = Converter(_rope_pattern_to, _rope_pattern_from)

_ALWAYS_WINDOW = Key("attention.sliding_window", ("sliding_window",))
_LAYERS = Key("attention.sliding_window_pattern", ("layer_types",), "bool[]", converter=layer_types)


def _granite(*mlp: TensorRow) -> tuple[TensorRow, ...]:
    """Granite's decoder with attention that may look at nothing."""
    sinks = tensor("self_attn.sinks", "attn_sinks.weight", "heads")
    return decoder(*attention("attention_bias", "attention_bias", permuted=True), sinks, mlp=mlp)


def _granite_experts() -> tuple[TensorRow, ...]:
    """Gate over up in one tensor, on both sides."""
    sparse, shared = "block_sparse_moe", "shared_intermediate_size"
    rows = {"ffn_gate_up_exps": "experts,2*ffn,hidden", "ffn_down_exps": "experts,hidden,ffn"}
    return (
        *linear(f"{sparse}.router", "ffn_gate_inp", "experts,hidden"),
        *linear(f"{sparse}.router.layer", "ffn_gate_inp", "experts,hidden"),
        *(
            tensor(f"{sparse}.{hf}", f"{gguf}.weight", dims)
            for names in (
                ("experts.gate_up_proj", "experts.down_proj"), ("input_linear.weight", "output_linear.weight"),
            )
            for hf, (gguf, dims) in zip(names, rows.items(), strict=True)
        ),
        *linear("shared_mlp.input_linear", "ffn_up_shexp", f"2*{shared},hidden", need=shared),
        *linear("shared_mlp.output_linear", "ffn_down_shexp", f"hidden,{shared}", need=shared),
    )


_GRANITE_KEYS = (
    *DECODER, VOCAB, ROPE_DIM, *SCALES, SILU, _ALWAYS_WINDOW, replace(_LAYERS, converter=dense_first_layer_types),
    Key("attention.rope_pattern", ("layer_rope_theta",), "bool[]", converter=rope_pattern),
    Key("", ("no_rope_layers",), "i32[]"), flag("attention_bias"),
)
_GRANITE_REQUIRED = {"logit_scale": "", "attention.sliding_window": "", "attention.sliding_window_pattern": ""}
_GRANITE_DEFAULTS = {
    "sliding_window": 128, "attention_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
    "residual_multiplier": 1.0, "attention_multiplier": 1.0,
}


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="granite_swa", required=_GRANITE_REQUIRED, gguf="granite_swa", **hf_names("GraniteSWA", "granite_swa"),
        rope_type=0,
        tensors=_granite(*gated_mlp("mlp_bias")), keys=(*_GRANITE_KEYS, flag("mlp_bias")),
        defaults={
            "": {
                **_GRANITE_DEFAULTS, "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
                "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": 100257, "eos_token_id": 100257,
            }
        },
    ),
    Architecture(
        id="granitemoe_swa", required=_GRANITE_REQUIRED, gguf="granite_swa", when="expert_count",
        **hf_names("GraniteMoeSWA", "granitemoe_swa"), rope_type=0,
        tensors=_granite(*_granite_experts()),
        keys=(
            *_GRANITE_KEYS, *rename((COUNT, USED), num_experts=("num_local_experts",)),
            Key("expert_shared_feed_forward_length", ("shared_intermediate_size",), converter=positive),
        ),
        defaults={
            "": {
                **_GRANITE_DEFAULTS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "num_local_experts": 8,
                "num_experts_per_tok": 2, "shared_intermediate_size": 0, "tie_word_embeddings": False,
                "bos_token_id": 1, "eos_token_id": 2,
            }
        },
    ),
    Architecture(
        id="muse_glimmer_text", required={"attention.sliding_window": "", "logit_scale": ""}, gguf="muse-glimmer",
        **class_names("MuseGlimmerForCausalLM", "MuseGlimmerTextModel", types=("muse_glimmer_text",)), rope_type=0,
        gguf_only=(), flat_norms={"blk.{n}.attn_q_norm.weight": "qk_scale_factor", "blk.{n}.attn_k_norm.weight": ""},
        head_always=True,
        tensors=network(
            *norm("input_layernorm", "attn_norm", value="plus_one"),
            *attention("attention_bias", "attention_bias", permuted=True),
            *linear("self_attn.gate_proj", "attn_gate", "q,hidden"),
            *norm("post_attention_layernorm", "post_attention_norm", value="plus_one"),
            *norm("pre_feedforward_layernorm", "ffn_norm", value="plus_one"),
            *norm("post_feedforward_layernorm", "post_ffw_norm", value="plus_one"), *gated_mlp(),
        ),
        keys=(
            *DECODER, Key("final_logit_softcapping", ("final_logit_softcapping",), "f32"),
            Key("logit_scale", ("output_multiplier",), "f32"), _ALWAYS_WINDOW,
            replace(_LAYERS, converter=last_dense_layer_types),
            Key("", ("layer_rope_theta",), "f32[]", converter=rotated_with_window),
            Key("", ("qk_scale_factor",), "f32"),
            must_be("post_norm_eps", 1e-8), must_be("hidden_activation", "silu"), NO_BIAS,
        ),
        defaults={
            "": {
                "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
                "sliding_window": 2048, "final_logit_softcapping": 20.0, "qk_scale_factor": 3.87,
                "output_multiplier": 0.19611613513818404, "post_norm_eps": 1e-8, "attention_bias": False,
                "tie_word_embeddings": False, "bos_token_id": 200000, "eos_token_id": 200001,
            }
        },
    ),
)
