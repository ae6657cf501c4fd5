"""Rows of the architecture table: decoders with routed experts whose code came with their checkpoints."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, Scope, default, nothing
from aprfmt.arch.converters.common import if_given
from aprfmt.arch.fields import as_float, shorten
from aprfmt.arch.row import OPTIONAL, Architecture, Difference, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DIMS, GROUPED, HEAD_DIM, RMS_EPS, ROPE, ROPE_DIM, SLIDING_LAYERS, VOCAB, WHOLE_HEADS, WINDOW, attention,
    class_names, convert, experts, gated_mlp, hf_names, linear, must_be, network, norm, rename, tensor,
)
from aprfmt.arch.rows.parts_moe import COUNT, USED, WIDTH, moe_decoder, moe_keys, router_and_experts
from aprfmt.errors import RefusedError
from aprfmt.io.jsonx import to_f32


def _root_to(value: object, scope: Scope) -> float | None:
    """What attention scores are multiplied with; one over the root of a head where nothing is said."""
    scale, size = as_float(value, scope.name), scope.h.head_dim
    return scale if scale is not None or not size else size**-0.5


def _root_from(value: object, scope: Scope) -> object:
    scale, size = as_float(value, scope.key.gguf), scope.h.head_dim
    return DEFAULT if scale is None or (size and to_f32(size**-0.5) == scale) else shorten(scale)


_ORIGINAL = ("original", "yarn")
"""How Grok 2 calls yarn."""


def _yarn_to(value: object, scope: Scope) -> str | None:
    return "yarn" if value in _ORIGINAL else None


def _if_yarn_to(value: object, scope: Scope) -> object:
    return value if scope.config("rope_type") in _ORIGINAL else None


def _chunk_width_to(value: object, scope: Scope) -> int | None:
    return scope.h.head_dim


_EVERY = 4
"""Of so many layers llama.cpp's smallthinker leaves the first without window and rotation, if it has windows."""


def _layout(scope: Scope) -> list[int]:
    return [int(layer % _EVERY != 0) for layer in range(scope.h.num_layers or 0)]


def _as_layout(value: object, scope: Scope) -> list[int]:
    return value if isinstance(value, list) else [0] * (scope.h.num_layers or 0)


def _layout_window_to(value: object, scope: Scope) -> object:
    """The window, if a layer has it; the runtime knows one length, in three of four layers."""
    layout = _as_layout(scope.config("sliding_window_layout"), scope)
    if not any(layout):
        return None
    if value != _WINDOW or layout != _layout(scope):
        raise RefusedError(
            f"llama.cpp's {scope.row.gguf} has windows of {_WINDOW} tokens in all but every {_EVERY}th layer from the "
            f"first on; this model has {value} in layers {layout}"
        )
    return value


_WINDOW = 4096


def _window_layout_from(value: object, scope: Scope) -> object:
    if not scope.kv:
        return DEFAULT
    return _layout(scope) if scope.gguf("attention.sliding_window") else [0] * (scope.h.num_layers or 0)


def _rope_layout_to(value: object, scope: Scope) -> None:
    windows = any(_as_layout(scope.config("sliding_window_layout"), scope))
    expected = _layout(scope) if windows else [1] * (scope.h.num_layers or 0)
    if isinstance(value, list) and value != expected:
        raise RefusedError(f"llama.cpp's {scope.row.gguf} rotates the layers {expected}, not those of {scope.name}")


def _rope_layout_from(value: object, scope: Scope) -> object:
    if not scope.kv:
        return DEFAULT
    return _layout(scope) if scope.gguf("attention.sliding_window") else [1] * (scope.h.num_layers or 0)


def _all_layers_to(value: object, scope: Scope) -> None:
    if isinstance(value, list) and not all(value):
        raise RefusedError(f"{scope.name} has layers without experts, which llama.cpp's {scope.row.gguf} does not know")


def _all_layers_from(value: object, scope: Scope) -> object:
    return [1] * (scope.h.num_layers or 0) if scope.kv else DEFAULT


def _in_each_to(value: object, scope: Scope) -> list[float] | None:
    number = as_float(value, scope.name)
    return None if number is None else [number] * (scope.h.num_layers or 0)


def _in_each_from(value: object, scope: Scope) -> object:
    return value[0] if isinstance(value, list) and value else DEFAULT


inverse_root = Converter(_root_to, _root_from)
original_yarn = Converter(_yarn_to, lambda value, scope: _ORIGINAL[0] if value == "yarn" else None)
if_yarn = Converter(_if_yarn_to)
chunk_width = Converter(_chunk_width_to, default)
softmax_switch = Converter(lambda value, scope: 1 if value else 2, lambda value, scope: value == 1)
layout_window = Converter(_layout_window_to)
window_layout = Converter(nothing, _window_layout_from)
rope_layout = Converter(_rope_layout_to, _rope_layout_from)
all_layers = Converter(_all_layers_to, _all_layers_from)
in_each_layer = Converter(_in_each_to, _in_each_from)

_UNTIED = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_W123 = ("w1", "w3", "w2")
_SPARSE = (must_be("decoder_sparse_step", 1), must_be("mlp_only_layers", []))
_ROUTED = rename((COUNT, USED), num_experts=("num_local_experts", "num_experts"))


def _grok_keys(*family: Key) -> tuple[Key, ...]:
    """Caps and scales; the experts' activation has no name in a config."""
    return (
        *DIMS, GROUPED, *family, RMS_EPS, *_ROUTED, HEAD_DIM,
        Key("router_logit_softcapping", ("router_logit_softcapping",), "f32"),
        Key("attention.output_scale", ("attn_output_multiplier",), "f32", converter=inverse_root),
        Key("embedding_scale", ("embedding_multiplier_scale",), "f32"),
        Key("logit_scale", ("output_multiplier_scale",), "f32"), WHOLE_HEADS,
    )


_GROK_DEFAULTS = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "num_local_experts": 8, "num_experts_per_tok": 2,
    "router_logit_softcapping": 30.0,
}
_YARN = {
    "factor": "scaling_factor", "yarn_ext_factor": "extrapolation_factor", "yarn_attn_factor": "attn_factor",
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}


ROWS: tuple[Architecture, ...] = (
    # As keyfan/grok-1-hf has it.
    Architecture(
        id="grok", gguf="grok", **hf_names("Grok", "grok-1"), gguf_only=(),
        tensors=network(
            *norm("rms_norm", "attn_norm"), *linear("multi_head_attention.query", "attn_q", "q,hidden"),
            *linear("multi_head_attention.key", "attn_k", "kv,hidden"),
            *linear("multi_head_attention.value", "attn_v", "kv,hidden"),
            *linear("multi_head_attention.linear", "attn_output", "hidden,q"), *norm("rms_norm_1", "attn_output_norm"),
            *norm("rms_norm_2", "ffn_norm"), *linear("router", "ffn_gate_inp", "experts,hidden"),
            *experts("moe.{e}.", ("linear", "linear_v", "linear_1")), *norm("rms_norm_3", "layer_output_norm"),
            hf="transformer.decoder_layer.{n}.", embed="transformer.in_out_embed", last="transformer.rms_norm",
        ),
        keys=_grok_keys(ROPE, Key("attn_logit_softcapping", ("max_attn_value",), "f32")),
        defaults={"": {**_GROK_DEFAULTS, "max_attn_value": 30.0, "tie_word_embeddings": True}},
    ),
    # As xai-org/grok-2 has it.
    Architecture(
        id="grok2", gguf="grok", when="tensors=post_ffw_norm.weight", hf_class="Grok1ForCausalLM", model_type="git",
        hf_classes=("Grok1ForCausalLM",), model_types=(), gguf_only=(),
        tensors=network(
            *norm("pre_attn_norm", "attn_norm"), *attention(), *norm("post_attn_norm", "attn_output_norm"),
            *norm("pre_moe_norm", "ffn_norm"), *gated_mlp(),
            *linear("block_sparse_moe.gate", "ffn_gate_inp", "experts,hidden"),
            *experts("block_sparse_moe.experts.{e}.", _W123), *norm("post_moe_norm", "post_ffw_norm"),
        ),
        keys=_grok_keys(
            Key("rope.freq_base", ("rope_theta",), "f32", field="rope_theta"),
            Key("rope.scaling.type", ("rope_type",), "str", converter=original_yarn),
            Key("rope.scaling.original_context_length", ("original_max_position_embeddings",), converter=if_yarn),
            *(Key(f"rope.scaling.{gguf}", (hf,), "f32", converter=if_yarn) for gguf, hf in _YARN.items()), WIDTH,
            Key("attn_logit_softcapping", ("attn_logit_softcapping",), "f32"),
            Key("final_logit_softcapping", ("final_logit_softcapping",), "f32"),
            Key("attention.temperature_length", ("attn_temperature_len",)), must_be("residual_moe", True),
            must_be("sliding_window_size", -1), Key("", ("global_attn_every_n",)),
        ),
        defaults={"": {**_GROK_DEFAULTS, "attn_logit_softcapping": 30.0, "tie_word_embeddings": False}},
    ),
    # As Snowflake/snowflake-arctic-instruct has it.
    Architecture(
        id="arctic", gguf="arctic", **hf_names("Arctic", "arctic"), rope_type=0,
        tensors=network(
            *norm("input_layernorm", "attn_norm"), *attention(permuted=True), *norm("residual_layernorm", "ffn_norm"),
            *linear("residual_mlp.w1", "ffn_gate", "hidden,hidden"),
            *linear("residual_mlp.w3", "ffn_up", "hidden,hidden"),
            *linear("residual_mlp.w2", "ffn_down", "hidden,hidden"), *norm("post_attention_layernorm", "ffn_norm_exps"),
            *linear("block_sparse_moe.gate", "ffn_gate_inp", "experts,hidden"),
            *experts("block_sparse_moe.experts.{e}.", _W123),
        ),
        keys=moe_keys(
            VOCAB, ROPE_DIM, WHOLE_HEADS, must_be("use_residual", True), must_be("parallel_attn_mlp_res", True),
            must_be("moe_layer_frequency", 1), Key("", ("sliding_window",)), count="num_local_experts",
        ),
        defaults={"": {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 4096}},
    ),
    # As inclusionAI/GroveMoE-Inst has it.
    Architecture(
        id="grovemoe", gguf="grovemoe", required={"expert_group_scale": "", "experts_per_group": ""},
        **class_names("GroveMoeForCausalLM", "modeling_grove_moe.GroveMoeForCausalLM", types=("grove_moe",)),
        gguf_only=(),
        tensors=moe_decoder(
            *attention(qk_norm="head_dim"), *router_and_experts(),
            *(
                tensor(
                    f"mlp.chunk_experts.{{e}}.{name}_proj.weight", f"ffn_{name}_chexps.weight",
                    "hidden,head_dim" if name == "down" else "head_dim,hidden", count="experts/2",
                )
                for name in ("gate", "up", "down")
            ),
            TensorRow(("mlp.expert_bias",), (), ("experts",), OPTIONAL),
        ),
        keys=moe_keys(
            WIDTH, Key("expert_chunk_feed_forward_length", converter=chunk_width), Key("experts_per_group", constant=2),
            Key("expert_group_scale", kind="f32", constant=0.05), must_be("attention_bias", False),
            must_be("norm_topk_prob", True), must_be("use_sliding_window", False), *_SPARSE,
        ),
        differs=(
            Difference(
                "llama.cpp gives GroveMoE's chunk experts what the routed experts have made of a token, not the token"
            ),
        ),
        defaults={"": {**_UNTIED, "norm_topk_prob": True, "max_position_embeddings": 40960}},
    ),
    # As PowerInfer/SmallThinker-4BA0.6B-Instruct and SmallThinker-21BA3B-Instruct have it.
    Architecture(
        id="smallthinker", gguf="smallthinker", **hf_names("SmallThinker", "smallthinker", "Smallthinker"),
        gguf_only=(),
        tensors=moe_decoder(
            *attention(), *linear("block_sparse_moe.primary_router", "ffn_gate_inp", "experts,hidden"),
            *experts("block_sparse_moe.experts.{e}.", ("gate", "up", "down")),
        ),
        keys=(
            *(key for key in DIMS if key.field != "intermediate_size"), GROUPED, ROPE, RMS_EPS,
            *rename(
                (COUNT, USED), num_experts=("moe_num_primary_experts",),
                num_experts_per_tok=("moe_num_active_primary_experts",),
            ),
            HEAD_DIM, replace(WIDTH, hf=("moe_ffn_hidden_size",)),
            replace(WIDTH, hf=("moe_ffn_hidden_size",), gguf="feed_forward_length"),
            Key("expert_gating_func", ("moe_primary_router_apply_softmax",), "u32", converter=softmax_switch),
            Key("attention.sliding_window", ("sliding_window_size",), converter=layout_window),
            Key("", ("sliding_window_layout",), "i32[]", converter=window_layout),
            Key("", ("rope_layout",), "i32[]", converter=rope_layout),
            Key("", ("moe_layer_layout",), "i32[]", converter=all_layers), must_be("moe_enable_early_router", True),
            must_be("moe_enable_secondary_experts", False), must_be("moe_shared_primary_experts", 0),
            must_be("use_qk_norm", False),
        ),
        defaults={
            "": {
                **_UNTIED, "sliding_window_size": 4096, "moe_primary_router_apply_softmax": False,
                "max_position_embeddings": 131072,
            }
        },
    ),
    # As deepgrove/maple-preview has it.
    Architecture(
        id="maple", gguf="maple",
        required={"attention.sliding_window": "", "attention.sliding_window_pattern": "", "swiglu_clamp_exp": ""},
        **hf_names("Maple", "maple"), gguf_only=(),
        tensors=moe_decoder(*attention(qk_norm="head_dim"), *router_and_experts()),
        keys=(
            *convert(moe_keys(WIDTH, VOCAB, ROPE_DIM, WINDOW, SLIDING_LAYERS), intermediate_size=if_given),
            Key("swiglu_clamp_exp", ("swiglu_limit",), "f32[]", converter=in_each_layer),
            must_be("nope_on_global_attention", True), must_be("norm_topk_prob", True),
            must_be("num_shared_experts", 0), must_be("use_bias", False), must_be("use_qk_norm", True),
            must_be("moe_router_enable_expert_bias", False),
        ),
        defaults={
            "": {
                **_UNTIED, "max_position_embeddings": 131072, "partial_rotary_factor": 0.5, "sliding_window": 512,
                "sliding_window_pattern": 4, "swiglu_limit": 7.0,
            }
        },
    ),
)
