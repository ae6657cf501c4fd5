"""Rows of the architecture table: decoders with many experts whose windowed layers have heads of their own."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope, nothing
from aprfmt.arch.converters.common import gating, shared_rotary_dim, unless_named
from aprfmt.arch.converters.experts import (
    DENSE, SPARSE, after, counted_dense_from, counted_dense_to, dense_by_tensors, limits,
)
from aprfmt.arch.converters.layers import flags_of
from aprfmt.arch.converters.windows import half_rotary, heads_by_window_from, of_kind, step_heads, windowed_heads
from aprfmt.arch.fields import as_int, as_mapping
from aprfmt.arch.grammar import layer_kinds
from aprfmt.arch.row import MOST, OWN, Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DIMS, GROUPED, SLIDING_LAYERS, WINDOW, convert, gated_mlp, hf_names, linear, must_be, network, norm, rename, tensor,
)
from aprfmt.arch.rows.parts_moe import (
    GROUPS, MTP, NO_BIAS, WIDTH, draft_layer, moe_keys, router_and_experts, selection_bias, shared_expert,
)
from aprfmt.errors import CorruptError, RefusedError


def _enumerated_dense_normalize(value: object, scope: Scope) -> object:
    """By the layers with experts, which a text lists; all but the first three unless something is said."""
    listed, n_layers = scope.h.extra.pop("moe_layers_enum", None), scope.h.num_layers
    if value is not None or n_layers is None:
        return DEFAULT
    if listed is None:
        return after(3, n_layers)
    if not isinstance(listed, str) or not all(part.strip().isdecimal() for part in listed.split(",") if part.strip()):
        raise CorruptError("moe_layers_enum is not a list of layers, separated by commas")
    routed = {int(part) for part in listed.split(",") if part.strip()}
    return [SPARSE if i in routed else DENSE for i in range(n_layers)]


enumerated_dense = Converter(counted_dense_to, counted_dense_from, normalize=_enumerated_dense_normalize)


def _both_kinds(slides: list[bool], scope: Scope) -> object:
    """Which layers have a window, in each spelling that the family's configs have for it."""
    kinds = ["sliding_attention" if one else "full_attention" for one in slides]
    if not any("hybrid_layer_pattern" in key.hf for key in scope.row.keys):
        return kinds
    return ConfigKeys(layer_types=kinds, hybrid_layer_pattern=[int(one) for one in slides])


def _hybrid_normalize(value: object, scope: Scope) -> object:
    """By words, else by flags; else every sixth layer, and the first, sees everything."""
    flags, n_layers = scope.h.extra.get("hybrid_layer_pattern"), scope.h.num_layers
    if isinstance(value, list):
        return _both_kinds([kind == "sliding_attention" for kind in value], scope)
    if flags is not None:
        return _both_kinds(flags_of(flags, "hybrid_layer_pattern"), scope)
    return DEFAULT if n_layers is None else _both_kinds([i > 0 and (i + 1) % 6 > 0 for i in range(n_layers)], scope)


def _hybrid_to(value: object, scope: Scope) -> list[bool] | None:
    return (
        None if value is None else [kind == "sliding_attention" for kind in value] if isinstance(value, list) else None
    )


def _hybrid_from(value: object, scope: Scope) -> object:
    return DEFAULT if value is None else _both_kinds(flags_of(value, scope.key.gguf), scope)


def _heads_by_window_to(value: object, scope: Scope) -> list[int] | None:
    """Key-value heads of each layer: of layers with a window, and of the others."""
    full, windowed = as_int(value, scope.name), as_int(scope.h.extra.get(_WINDOWED), _WINDOWED)
    kinds = layer_kinds(scope.h.extra)
    if full is None or windowed is None or kinds is None:
        return None
    return [windowed if kind == "sliding_attention" else full for kind in kinds]


_WINDOWED = "swa_num_key_value_heads"


def _windowed_from(value: object, scope: Scope) -> object:
    heads = scope.gguf("attention.head_count_kv")
    found = of_kind(heads, scope, slides=True)
    return DEFAULT if found is None else found


def _twice_the_heads(scope: Scope) -> int | None:
    """What transformers' class gives layers with a window."""
    return None if scope.h.num_kv_heads is None else 2 * scope.h.num_kv_heads


def _same_heads_to(value: object, scope: Scope) -> list[int] | None:
    count, kinds = as_int(value, scope.name), layer_kinds(scope.h.extra)
    return None if count is None or kinds is None else [count] * len(kinds)


def _first_of(value: object, scope: Scope) -> object:
    return as_int(value[0] if isinstance(value, list) and value else value, scope.key.gguf)


def _inclusive_window(value: object, scope: Scope) -> object:
    """`sliding_window_size` counts the positions before the last one."""
    size = as_int(scope.h.extra.pop("sliding_window_size", None), "sliding_window_size")
    return DEFAULT if size is None or scope.h.hf_model_type != "mimo_v2_flash" else size + 1


def _fused_from(value: object, scope: Scope) -> object:
    return "fused_qkv" if "blk.0.attn_qkv.weight" in scope.names else DEFAULT


def _fused_to(value: object, scope: Scope) -> None:
    """FP8 releases store the fused rows in the order of the devices that they were divided among."""
    packed = as_mapping(scope.h.extra.get("quantization_config"))
    if value == "fused_qkv" and packed.get("quant_method") == "fp8":
        raise RefusedError(
            f"{scope.name} is {value!r} and the weights are FP8: the rows of qkv_proj stand in an order of devices "
            "that no key tells",
            hint="an .apr or a folder can hold the model; for a GGUF take the BF16 release",
        )


heads_by_window = Converter(_heads_by_window_to, heads_by_window_from)
windowed_kv_heads = Converter(nothing, _windowed_from, _twice_the_heads)
mimo_window = Converter(normalize=_inclusive_window)
hybrid_layers = Converter(_hybrid_to, _hybrid_from, normalize=_hybrid_normalize)
fused_by_tensors = Converter(_fused_to, _fused_from)
same_heads = Converter(_same_heads_to, _first_of)
absent_null = unless_named(None)


def _mimo_attention() -> tuple[TensorRow, ...]:
    """Values of a length of their own; more key-value heads and a sink where there is a window."""
    fused, split, bias = (
        "attention_projection_layout=fused_qkv", "!attention_projection_layout=fused_qkv", "attention_bias",
    )
    rows: list[TensorRow] = []
    for layers, kv in (("full_attention", "kv_heads"), ("sliding_attention|draft", "swa_num_key_value_heads")):
        keys, values = f"{kv}*head_dim", f"{kv}*v_head_dim"
        rows += [
            *linear("self_attn.q_proj", "attn_q", "q,hidden", bias, split, layers=layers),
            *linear("self_attn.k_proj", "attn_k", f"{keys},hidden", bias, split, layers=layers),
            *linear("self_attn.v_proj", "attn_v", f"{values},hidden", bias, split, layers=layers),
            *linear("self_attn.qkv_proj", "attn_qkv", f"q+{keys}+{values},hidden", need=fused, layers=layers),
        ]
    sink = tensor("self_attn.attention_sink_bias", "attn_sinks.weight", "heads", layers="sliding_attention|draft")
    return (*rows, sink, *linear("self_attn.o_proj", "attn_output", "hidden,heads*v_head_dim"))


_WINDOWED_HEADS = "num_sliding_attention_heads"


def _step_attention() -> tuple[TensorRow, ...]:
    """More heads where there is a window; a gate for each head."""
    rows: list[TensorRow] = []
    for layers, heads in (("full_attention", "heads"), ("sliding_attention", _WINDOWED_HEADS)):
        rows += [
            *linear("self_attn.q_proj", "attn_q", f"{heads}*head_dim,hidden", layers=layers),
            *linear("self_attn.g_proj", "attn_gate", f"{heads},hidden", layers=layers),
            *linear("self_attn.o_proj", "attn_output", f"hidden,{heads}*head_dim", layers=layers),
        ]
    return (
        *rows, *linear("self_attn.k_proj", "attn_k", "kv,hidden"), *linear("self_attn.v_proj", "attn_v", "kv,hidden"),
        *norm("self_attn.q_norm", "attn_q_norm", "head_dim", value="plus_one"),
        *norm("self_attn.k_norm", "attn_k_norm", "head_dim", value="plus_one"),
    )


def _step_experts() -> tuple[TensorRow, ...]:
    """All experts of a projection in one tensor, and one that is shared."""
    layers = "moe&!draft"
    return (
        *linear("moe.gate", "ffn_gate_inp", "experts,hidden", layers=layers),
        tensor("moe.router_bias", "exp_probs_b.bias", "experts", layers=layers),
        *linear("moe.gate_proj", "ffn_gate_exps", "experts,moe_ffn,hidden", layers=layers),
        *linear("moe.up_proj", "ffn_up_exps", "experts,moe_ffn,hidden", layers=layers),
        *linear("moe.down_proj", "ffn_down_exps", "experts,hidden,moe_ffn", layers=layers),
        *shared_expert("share_expert", "share_expert_dim", layers=layers),
    )


_STEP_LISTS = {
    "num_heads": replace(DIMS[4], kind="i32[]", converter=step_heads, draft=MOST),
    "num_kv_heads": replace(GROUPED, kind="i32[]", converter=same_heads, draft=MOST),
}
"""Numbers of heads, which a GGUF has for each layer."""


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="mimo_v2_flash", required={"attention.sliding_window": "", "attention.sliding_window_pattern": ""},
        gguf="mimo2", **hf_names("MiMoV2Flash", "mimo_v2_flash", "MiMoV2", also=("mimo_v2",)), head_always=True,
        nested_rope=True, drafts=(("model.mtp.layers.{m}.", "model.layers.{n}."),),
        tensors=network(
            *norm("input_layernorm", "attn_norm"), *_mimo_attention(),
            *norm("post_attention_layernorm", "ffn_norm", layers="!draft"),
            *norm("pre_mlp_layernorm", "ffn_norm", layers="draft"),
            *router_and_experts("moe&!draft", (selection_bias("moe&!draft"),)), *gated_mlp(layers="dense|draft"),
            *draft_layer(), *norm("final_layernorm", "layer_output_norm", layers="draft"),
        ),
        keys=(
            Key("attention.value_length", ("v_head_dim",)),
            *rename(
                convert(
                    tuple(
                        replace(key, kind="i32[]", draft=MOST) if key.field == "num_kv_heads" else key
                        for key in moe_keys(
                            *(replace(key, allowed=(1,)) for key in GROUPS), WIDTH, count="n_routed_experts"
                        )
                    ),
                    num_kv_heads=heads_by_window,
                ),
                rms_norm_eps=("rms_norm_eps", "layernorm_epsilon"),
            ),
            Key("", ("swa_num_key_value_heads",), converter=windowed_kv_heads),
            Key("expert_gating_func", ("scoring_func",), converter=gating, allowed=("sigmoid",)),
            Key("rope.dimension_count", converter=shared_rotary_dim), replace(WINDOW, converter=mimo_window),
            Key("", ("sliding_window_size",)), replace(SLIDING_LAYERS, converter=hybrid_layers, draft=True),
            Key("", ("hybrid_layer_pattern",), "u32[]"),
            Key("attention.value_scale", ("attention_value_scale",), "f32", converter=absent_null),
            Key("", ("mlp_layer_types",), "str[]", converter=dense_by_tensors), Key("", ("moe_layer_freq",)), MTP,
            must_be("norm_topk_prob", True), Key("", ("routed_scaling_factor",), "f32", allowed=(1.0,)), NO_BIAS,
            must_be("add_swa_attention_sink_bias", True), must_be("add_full_attention_sink_bias", False),
            Key("", ("attention_projection_layout",), "str", converter=fused_by_tensors),
        ),
        defaults={"": {
            "n_routed_experts": 256, "num_experts_per_tok": 8, "num_key_value_heads": 4, "moe_intermediate_size": 2048,
            "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "scoring_func": "sigmoid", "head_dim": 192, "v_head_dim": 128, "sliding_window": 129,
            "attention_value_scale": 0.707, "attention_bias": False, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 5000000.0, "swa_rope_theta": 10000.0,
            "partial_rotary_factor": 0.334,
        }},
    ),
    Architecture(
        id="step3p5", required={"attention.sliding_window": "", "attention.sliding_window_pattern": ""}, gguf="step35",
        **hf_names("Step3p5", "step3p5"), head_always=True, nested_rope=True,
        tensors=network(
            *norm("input_layernorm", "attn_norm", value="plus_one"), *_step_attention(),
            *norm("post_attention_layernorm", "ffn_norm", value="plus_one"), *_step_experts(),
            *gated_mlp(layers="dense|draft"), *draft_layer("plus_one", "transformer.shared_head.norm"),
            *linear("transformer.shared_head.output", "nextn.shared_head_head", "vocab,hidden", layers="draft"),
            norm_value="plus_one",
        ),
        keys=(
            *rename(
                tuple(_STEP_LISTS.get(key.field, key) for key in moe_keys(count="n_routed_experts")),
                num_kv_heads=("num_key_value_heads", "num_attention_groups"),
                num_experts=("n_routed_experts", "moe_num_experts"),
                num_experts_per_tok=("num_experts_per_tok", "moe_top_k"),
            ),
            WIDTH,
            Key(
                "", ("num_sliding_attention_heads", "attention_other_setting.num_attention_heads"),
                converter=windowed_heads
            ),
            Key("expert_shared_feed_forward_length", ("share_expert_dim", "share_expert_dims")),
            Key("expert_weights_scale", ("moe_router_scaling_factor",), "f32"),
            Key("expert_weights_norm", ("norm_expert_weight",), "bool"),
            Key("expert_gating_func", ("moe_router_activation",), converter=gating),
            Key("moe_every_n_layers", ("moe_every_n_layer",)), WINDOW,
            Key("attention.sliding_window_pattern", ("layer_types",), "bool[]", converter=hybrid_layers, draft=OWN),
            Key("", ("partial_rotary_factors",), "f32[]", converter=half_rotary),
            Key("leading_dense_block_count", ("mlp_layer_types",), converter=enumerated_dense),
            Key("", ("moe_layers_enum",), "str"),
            Key("swiglu_clamp_exp", ("swiglu_limits",), "f32[]", converter=limits, draft=OWN),
            Key("swiglu_clamp_shexp", ("swiglu_limits_shared",), "f32[]", converter=limits, draft=OWN), MTP, NO_BIAS,
            must_be("mlp_bias", False),
        ),
        gguf_only=("rope_freqs.weight",),
        defaults={"": {
            "n_routed_experts": 288, "num_experts_per_tok": 8, "num_key_value_heads": 8, "moe_intermediate_size": 1280,
            "share_expert_dim": 1280, "moe_router_scaling_factor": 1.0, "norm_expert_weight": True,
            "moe_every_n_layer": 1, "moe_router_activation": "sigmoid", "head_dim": 128,
            "max_position_embeddings": 128000, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        }},
    ),
)
