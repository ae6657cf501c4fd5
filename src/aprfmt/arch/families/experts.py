"""MoE decoders of families with a single network."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    ALWAYS_WINDOW, DIMS, GROUPED, HEAD_DIM, RMS_EPS, ROPE, ROPE_DIM, SLIDING_LAYERS,
    VOCAB, WHOLE_HEADS, WINDOW, WINDOW_LAYERS, attention, class_names, convert, experts,
    flag, fused_experts, gated_mlp, hf_names, linear, must_be, network, norm, rename, split, tensor,
)
from aprfmt.arch.blocks.moe import (
    ALL_SPARSE, COUNT, DENSE_LAYERS, GROUPS, MLP_LAYER_TYPES, NO_BIAS, NUM_SHARED_EXPERTS, SIGMOID,
    USED, WEIGHTS_NORM, WEIGHTS_SCALE, WIDTH, moe_decoder, moe_keys, router_and_experts, selection_bias, shared_expert,
)
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Convert, Converter, Scope, if_given, nothing, refuse_if
from aprfmt.arch.converters.common import (
    absent_0, any_window, computed, dense_first, dense_first_to_gguf, gating, gguf_int, softcap, window_rotary,
)
from aprfmt.arch.converters.layers import (
    FULL, layer_types, layer_types_derive, layer_types_from_gguf, layer_types_to_gguf, periodic, slides_of,
)
from aprfmt.arch.converters.windows import FOURTH, every_fourth_full, full_every_fourth
from aprfmt.arch.fields import as_float
from aprfmt.arch.rope import NEAR_RAMP, yarn_distance
from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Difference, Key, TensorRow
from aprfmt.errors import RefusedError


same_theta = Converter(from_gguf=lambda value, scope: scope.h.rope_theta)


all_sparse = Converter(
    refuse_if(
        lambda value, scope: isinstance(value, list) and "dense" in value,
        "{name} has dense layers: llama.cpp's {gguf} needs experts in every layer",
    )
)


def _own_dense_first_to_gguf(value: object, scope: Scope) -> list[bool] | None:
    """Which layers have a sliding window, if they differ from llama.cpp's default."""
    slides = slides_of(value) if value is not None else []
    return None if not any(slides) or slides == periodic(FOURTH, len(slides), first=0) else slides


def _own_dense_first_from_gguf(value: object, scope: Scope) -> object:
    if value is None and scope.gguf("attention.sliding_window"):
        return full_every_fourth(scope)
    return layer_types_from_gguf(value, scope) if value is not None else [FULL] * (scope.h.num_layers or 0)


def _heads_a_layer_from_gguf(value: object, scope: Scope) -> object:
    """Heads per layer; the config's single number is that of the first."""
    if not isinstance(value, list) or not value:
        return DEFAULT if value is None else ConfigKeys(num_attention_heads=value)
    return ConfigKeys(num_attention_heads=value[0], num_attention_heads_per_layer=value)


full_unless_named = replace(
    layer_types,
    to_gguf=lambda value, scope: layer_types_to_gguf(value, scope) if scope.config("sliding_window") else None,
    derive=lambda scope: [FULL] * (scope.h.num_layers or 0),
)
own_dense_first = Converter(
    _own_dense_first_to_gguf, _own_dense_first_from_gguf, lambda scope: [FULL] * (scope.h.num_layers or 0)
)
heads_a_layer = Converter(
    lambda value, scope: value or [scope.h.num_heads] * (scope.h.num_layers or 0), _heads_a_layer_from_gguf
)


def _dense_list_from_gguf(value: object, scope: Scope) -> object:
    """The same for configs that have no other key for it."""
    n_layers, dense = scope.h.num_layers or 0, gguf_int(scope, "leading_dense_block_count")
    return ["dense" if i < dense else "sparse" for i in range(n_layers)]


_FOURTH = Key("", ("layer_types",), "str[]", converter=every_fourth_full)
_GATING = Key("expert_gating_func", ("score_func",), converter=gating)
_ONE_THETA = Difference("llama.cpp's mellum uses one rope_theta for sliding and full layers", "two_thetas")


def _odd_layer_types(value: object, scope: Scope) -> object:
    """Layer types, if they differ from the row's pattern, which llama.cpp implies."""
    return None if value == layer_types_derive(scope) else layer_types_to_gguf(value, scope)


def _untruncated_from_gguf(value: object, scope: Scope) -> object:
    """gpt-oss does not round the bounds of YaRN's ramp; a GGUF cannot express that."""
    scaling = scope.h.extra.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type") == "yarn":
        scaling["truncate"] = False
        if yarn_distance(scope.row, scope.h) > NEAR_RAMP:
            del scaling["truncate"]  # of no published model: as llama.cpp computes it
    return DEFAULT


odd_layer_types = replace(layer_types, to_gguf=_odd_layer_types)


def _gpt_oss_experts() -> tuple[TensorRow, ...]:
    """Gate and up rows alternate. Weights are [experts, in, out], or MXFP4 blocks of [experts, out, in]."""
    hf, turns = "mlp.experts.", ("deal:experts*moe_ffn,1,1",)
    halves = dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), "experts,moe_ffn,hidden")
    down = ("experts,hidden,moe_ffn",)

    def pieces(name: str) -> tuple[str, ...]:
        return (f"{hf}{name}_blocks", f"{hf}{name}_scales")

    def blocks(rows: str, columns: str) -> tuple[str, ...]:
        return (f"experts,{rows},{columns}/32,16", f"experts,{rows},{columns}/32")

    return (
        split(f"{hf}gate_up_proj", "experts,hidden,2*moe_ffn", halves, transposed=True, order=turns),
        tensor(f"{hf}down_proj", "ffn_down_exps.weight", "experts,moe_ffn,hidden", transposed=True, gguf_dims=down),
        TensorRow(
            pieces("gate_up_proj"),
            tuple(halves),
            blocks("2*moe_ffn", "hidden"),
            gguf_dims=tuple(halves.values()),
            order=turns, pack="mxfp4",
        ),
        TensorRow(
            pieces("down_proj"), ("ffn_down_exps.weight",), blocks("hidden", "moe_ffn"), gguf_dims=down, pack="mxfp4"
        ),
        split(
            f"{hf}gate_up_proj_bias", "experts,2*moe_ffn",
            dict.fromkeys(("ffn_gate_exps.bias", "ffn_up_exps.bias"), "experts,moe_ffn"),
            order=turns, flat=True,
        ),
        tensor(f"{hf}down_proj_bias", "ffn_down_exps.bias", "experts,hidden"),
    )


_EVERY = 4
"""Number of layers from which llama.cpp's smallthinker leaves the first without window and rotation, if it has windows.
"""


def _layout(scope: Scope) -> list[int]:
    return [int(layer % _EVERY != 0) for layer in range(scope.h.num_layers or 0)]


def _as_layout(value: object, scope: Scope) -> list[int]:
    return value if isinstance(value, list) else [0] * (scope.h.num_layers or 0)


_WINDOW = 4096


def _layout_window_to_gguf(value: object, scope: Scope) -> object:
    """The window, if a layer has it; llama.cpp supports one length, in three of four layers."""
    layout = _as_layout(scope.config("sliding_window_layout"), scope)
    if not any(layout):
        return None
    if value != _WINDOW or layout != _layout(scope):
        raise RefusedError(
            f"llama.cpp's {scope.row.gguf} has a sliding window of {_WINDOW} tokens in all layers except "
            f"every {_EVERY}th, starting with the first; this model has {value} in layers {layout}"
        )
    return value


def _layout_or(otherwise: int) -> Convert:
    """If the GGUF has windows: the layout that llama.cpp supports, else one value for all layers."""

    def from_gguf(value: object, scope: Scope) -> object:
        if not scope.kv:
            return DEFAULT
        windows = scope.gguf("attention.sliding_window")
        return _layout(scope) if windows else [otherwise] * (scope.h.num_layers or 0)

    return from_gguf


def _is_other_layout(value: object, scope: Scope) -> bool:
    windows = any(_as_layout(scope.config("sliding_window_layout"), scope))
    return isinstance(value, list) and value != (_layout(scope) if windows else [1] * (scope.h.num_layers or 0))


def _in_each_to_gguf(value: object, scope: Scope) -> list[float] | None:
    number = as_float(value, scope.name)
    return None if number is None else [number] * (scope.h.num_layers or 0)


chunk_width = computed("head_dim")
softmax_switch = Converter(lambda value, scope: 1 if value else 2, lambda value, scope: value == 1)
rope_layout = Converter(
    refuse_if(_is_other_layout, "{name}: llama.cpp's {gguf} applies RoPE in exactly the sliding-window layers, if any"),
    _layout_or(1),
)
all_layers = Converter(
    refuse_if(
        lambda value, scope: isinstance(value, list) and not all(value),
        "{name} has layers without experts: llama.cpp's {gguf} needs experts in every layer",
    ),
    lambda value, scope: [1] * (scope.h.num_layers or 0) if scope.kv else DEFAULT,
)
in_each_layer = Converter(
    _in_each_to_gguf, lambda value, scope: value[0] if isinstance(value, list) and value else DEFAULT
)


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="dbrx", gguf="dbrx", **hf_names("Dbrx", "dbrx"),
        tensors=network(
            *norm("norm_attn_norm.norm_1", "attn_norm"),
            *linear("norm_attn_norm.attn.Wqkv", "attn_qkv", "q+2*kv,hidden"),
            *linear("norm_attn_norm.attn.out_proj", "attn_output", "hidden,q"),
            *norm("norm_attn_norm.norm_2", "attn_output_norm"),
            *linear("ffn.router.layer", "ffn_gate_inp", "experts,hidden"),
            *(
                tensor(
                    f"ffn.experts.mlp.{hf}", f"{gguf}.weight", "experts*ffn,hidden", gguf_dims=(dims,),
                    gguf_transposed=(gguf == "ffn_down_exps",),
                )
                for hf, gguf, dims in (
                    ("w1", "ffn_gate_exps", "experts,ffn,hidden"),
                    ("v1", "ffn_up_exps", "experts,ffn,hidden"),
                    ("w2", "ffn_down_exps", "experts,hidden,ffn"),
                )
            ),
            hf="transformer.blocks.{n}.", embed="transformer.wte", last="transformer.norm_f",
        ),
        keys=(
            *rename(
                DIMS, num_layers="n_layers", max_position_embeddings="max_seq_len", hidden_size="d_model",
                num_heads="n_heads", intermediate_size="ffn_config.ffn_hidden_size",
            ),
            replace(GROUPED, hf=("attn_config.kv_n_heads",)),
            ROPE, Key("", ("attn_config.rope_theta",), "f32", converter=same_theta),
            Key("attention.layer_norm_epsilon", (), "f32", constant=1e-5),
            Key("attention.clamp_kqv", ("attn_config.clip_qkv",), "f32", converter=softcap),
            *rename(
                (COUNT, USED), num_experts="ffn_config.moe_num_experts", num_experts_per_tok="ffn_config.moe_top_k"
            ),
            must_be("ffn_config.moe_normalize_expert_weights", 1.0),
            WHOLE_HEADS,
        ),
    ),
    Architecture(
        id="gpt_oss",
        packed_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
        gguf="gpt-oss", **hf_names("GptOss", "gpt_oss"),
        tensors=network(
            *norm("input_layernorm", "attn_norm"),
            *attention("attention_bias", "attention_bias"),
            tensor("self_attn.sinks", "attn_sinks.weight", "heads"),
            *norm("post_attention_layernorm", "post_attention_norm"),
            *linear("mlp.router", "ffn_gate_inp", "experts,hidden", REQUIRED),
            *_gpt_oss_experts(),
        ),
        keys=moe_keys(
            Key("attention.sliding_window", ("sliding_window",)),
            Key("attention.sliding_window_pattern", ("layer_types",), "bool[]", converter=odd_layer_types),
            Key("", converter=Converter(nothing, _untruncated_from_gguf)),
            Key("expert_feed_forward_length", ("intermediate_size",), field="intermediate_size"),
            must_be("swiglu_alpha", 1.702),
            must_be("swiglu_limit", 7.0),
            flag("attention_bias"),
            count="num_local_experts",
        ),
    ),
    Architecture(
        id="afmoe", gguf="afmoe", **hf_names("Afmoe", "afmoe"),
        tensors=network(
            *norm("input_layernorm", "attn_norm"),
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"),
            *linear("self_attn.gate_proj", "attn_gate", "q,hidden"),
            *norm("post_attention_layernorm", "post_attention_norm"),
            *norm("pre_mlp_layernorm", "ffn_norm"),
            *norm("post_mlp_layernorm", "post_ffw_norm"),
            *linear("mlp.router.gate", "ffn_gate_inp", "experts,hidden", layers="moe"),
            tensor("mlp.expert_bias", "exp_probs_b.bias", "experts", layers="moe"),
            *experts(layers="moe"),
            *fused_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj", layers="moe"),
            *shared_expert("mlp.shared_experts", "num_shared_experts*moe_ffn", "num_shared_experts", "moe"),
            *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(
            VOCAB, ROPE_DIM, *GROUPS, WIDTH,
            NUM_SHARED_EXPERTS, Key("leading_dense_block_count", ("num_dense_layers",), converter=absent_0),
            replace(WEIGHTS_SCALE, hf=("route_scale",)),
            replace(WEIGHTS_NORM, hf=("route_norm",)),
            _GATING, replace(WINDOW, needed=REQUIRED),
            _FOURTH, Key("", ("global_attn_every_n_layers",)),
            must_be("mup_enabled", True),
            NO_BIAS,
        ),
    ),
    Architecture(
        id="mellum", gguf="mellum", **hf_names("Mellum", "mellum"),
        nested_rope=True,
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"),
            *router_and_experts("moe"),
            *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(
            WIDTH, WINDOW, replace(SLIDING_LAYERS, converter=full_unless_named),
            Key("", ("mlp_layer_types",), "str[]", converter=all_sparse),
            must_be("norm_topk_prob", True),
            NO_BIAS,
        ),
        differs=(_ONE_THETA,),
    ),
    Architecture(
        id="laguna", gguf="laguna", **hf_names("Laguna", "laguna"),
        nested_rope=True,
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"),
            *linear("self_attn.g_proj", "attn_gate", "heads,hidden", need="!gating=per-element"),
            *linear("self_attn.g_proj", "attn_gate", "q,hidden", need="gating=per-element"),
            *router_and_experts(
                "moe", (replace(selection_bias(), hf=("mlp.experts.e_score_correction_bias",)), selection_bias())
            ),
            *shared_expert("mlp.shared_expert", "shared_expert_intermediate_size", layers="moe"),
            *shared_expert("mlp.shared_experts", "shared_expert_intermediate_size", layers="moe"),
            *gated_mlp(layers="dense"),
        ),
        keys=(
            *(key for key in moe_keys(VOCAB, WIDTH) if key.field != "num_heads"),
            Key("", ("num_attention_heads",), field="num_heads"),
            Key("attention.head_count", ("num_attention_heads_per_layer",), "u32[]", converter=heads_a_layer),
            ROPE_DIM, Key("rope.dimension_count_swa", converter=window_rotary),
            replace(ALWAYS_WINDOW, converter=any_window),
            replace(WINDOW_LAYERS, converter=own_dense_first),
            Key("expert_shared_feed_forward_length", ("shared_expert_intermediate_size",)),
            Key("expert_weights_norm", kind="bool", constant=True),
            replace(WEIGHTS_SCALE, hf=("moe_routed_scaling_factor",)),
            SIGMOID, DENSE_LAYERS,
            replace(
                MLP_LAYER_TYPES, converter=Converter(dense_first_to_gguf, _dense_list_from_gguf, normalize=dense_first)
            ),
            Key("", ("gating",), "str"),
            must_be("moe_router_logit_softcapping", 0.0),
            NO_BIAS,
        ),
    ),
    # As Snowflake/snowflake-arctic-instruct has it.
    Architecture(
        id="arctic", gguf="arctic", **hf_names("Arctic", "arctic"),
        rope_type=0,
        tensors=network(
            *norm("input_layernorm", "attn_norm"),
            *attention(permuted=True),
            *norm("residual_layernorm", "ffn_norm"),
            *linear("residual_mlp.w1", "ffn_gate", "hidden,hidden"),
            *linear("residual_mlp.w3", "ffn_up", "hidden,hidden"),
            *linear("residual_mlp.w2", "ffn_down", "hidden,hidden"),
            *norm("post_attention_layernorm", "ffn_norm_exps"),
            *linear("block_sparse_moe.gate", "ffn_gate_inp", "experts,hidden"),
            *experts("block_sparse_moe.experts.{e}.", ("w1", "w3", "w2")),
        ),
        keys=moe_keys(
            VOCAB, ROPE_DIM, WHOLE_HEADS, must_be("use_residual", True),
            must_be("parallel_attn_mlp_res", True),
            must_be("moe_layer_frequency", 1),
            Key("", ("sliding_window",)),
            count="num_local_experts",
        ),
    ),
    # As inclusionAI/GroveMoE-Inst has it.
    Architecture(
        id="grovemoe", gguf="grovemoe",
        **class_names("GroveMoeForCausalLM", "modeling_grove_moe.GroveMoeForCausalLM", types=("grove_moe",)),
        tensors=moe_decoder(
            *attention(qk_norm="head_dim"),
            *router_and_experts(),
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
            WIDTH, Key("expert_chunk_feed_forward_length", converter=chunk_width),
            Key("experts_per_group", constant=2),
            Key("expert_group_scale", kind="f32", constant=0.05),
            must_be("attention_bias", False),
            must_be("norm_topk_prob", True),
            must_be("use_sliding_window", False),
            *ALL_SPARSE,
        ),
        differs=(
            Difference(
                "llama.cpp feeds GroveMoE's chunk experts the output of the routed experts instead of the hidden state"
            ),
        ),
    ),
    # As PowerInfer/SmallThinker-4BA0.6B-Instruct and SmallThinker-21BA3B-Instruct have it.
    Architecture(
        id="smallthinker", gguf="smallthinker", **hf_names("SmallThinker", "smallthinker", "Smallthinker"),
        tensors=moe_decoder(
            *attention(),
            *linear("block_sparse_moe.primary_router", "ffn_gate_inp", "experts,hidden"),
            *experts("block_sparse_moe.experts.{e}.", ("gate", "up", "down")),
        ),
        keys=(
            *(key for key in DIMS if key.field != "intermediate_size"),
            GROUPED, ROPE, RMS_EPS,
            *rename(
                (COUNT, USED),
                num_experts=("moe_num_primary_experts",),
                num_experts_per_tok=("moe_num_active_primary_experts",),
            ),
            HEAD_DIM, replace(WIDTH, hf=("moe_ffn_hidden_size",)),
            replace(WIDTH, hf=("moe_ffn_hidden_size",), gguf="feed_forward_length"),
            Key("expert_gating_func", ("moe_primary_router_apply_softmax",), "u32", converter=softmax_switch),
            Key("attention.sliding_window", ("sliding_window_size",), converter=Converter(_layout_window_to_gguf)),
            Key("", ("sliding_window_layout",), "i32[]", converter=Converter(nothing, _layout_or(0))),
            Key("", ("rope_layout",), "i32[]", converter=rope_layout),
            Key("", ("moe_layer_layout",), "i32[]", converter=all_layers),
            must_be("moe_enable_early_router", True),
            must_be("moe_enable_secondary_experts", False),
            must_be("moe_shared_primary_experts", 0),
            must_be("use_qk_norm", False),
        ),
    ),
    # As deepgrove/maple-preview has it.
    Architecture(
        id="maple", gguf="maple", **hf_names("Maple", "maple"),
        tensors=moe_decoder(*attention(qk_norm="head_dim"), *router_and_experts()),
        keys=(
            *convert(moe_keys(WIDTH, VOCAB, ROPE_DIM, WINDOW, SLIDING_LAYERS), intermediate_size=if_given),
            Key("swiglu_clamp_exp", ("swiglu_limit",), "f32[]", converter=in_each_layer),
            must_be("nope_on_global_attention", True),
            must_be("norm_topk_prob", True),
            must_be("num_shared_experts", 0),
            must_be("use_bias", False),
            must_be("use_qk_norm", True),
            must_be("moe_router_enable_expert_bias", False),
        ),
    ),
)
