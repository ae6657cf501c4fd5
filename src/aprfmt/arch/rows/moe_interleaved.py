"""Rows of the architecture table: decoders that mix layers with and without a window, mostly with routed experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope
from aprfmt.arch.converters.common import (
    absent_0, any_window, dense_first, dense_first_to, every_fourth, gating, gguf_int, leading_dense, shared_width,
    unscaled,
)
from aprfmt.arch.converters.layers import (
    FULL, SLIDING, kinds_of, layer_types, layer_types_from, layer_types_to, number_or_0, periodic, positive, slides_of,
)
from aprfmt.arch.converters.windows import FOURTH, full_every_fourth
from aprfmt.arch.fields import as_float, as_int, as_mapping, shorten
from aprfmt.arch.row import Architecture, Difference, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DIMS, GROUPED, HEAD_DIM, LAYER_EPS, ROPE, ROPE_DIM, SILU, SLIDING_LAYERS, VOCAB, WINDOW, attention, class_names,
    experts, fused_experts, gated_mlp, hf_names, linear, must_be, network, norm, rename, split, tensor,
)
from aprfmt.arch.rows.parts_moe import (
    COUNT, DENSE_LAYERS, GROUPS, MTP, NO_BIAS, SIGMOID, USED, WEIGHTS_NORM, WEIGHTS_SCALE, WIDTH, draft_layer,
    moe_decoder, moe_keys, mtp_names, router_and_experts, selection_bias, shared_expert,
)
from aprfmt.errors import RefusedError


def _stepped_to(value: object, scope: Scope) -> None:
    step, n_layers = scope.size("interleave_moe_layer_step") or 1, scope.h.num_layers or 0
    if isinstance(value, list) and value != list(range(step - 1, n_layers, step)):
        raise RefusedError(
            f"{scope.name} is not every layer at a step of {step} (interleave_moe_layer_step), where llama.cpp's "
            f"{scope.row.gguf} looks for experts"
        )


def _all_sparse_to(value: object, scope: Scope) -> None:
    if isinstance(value, list) and "dense" in value:
        raise RefusedError(f"{scope.name} has dense layers: llama.cpp's {scope.row.gguf} gives every layer experts")


_BARE_EXPERTS = 128
"""So many experts has the Llama 4 whose Q and K llama.cpp does not norm."""


def _normed_to(value: object, scope: Scope) -> None:
    if bool(value) == (scope.h.num_experts == _BARE_EXPERTS):
        raise RefusedError(
            f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} norms Q and K but for networks of {_BARE_EXPERTS} "
            "experts"
        )


stepped_moe_layers = Converter(_stepped_to)
all_sparse = Converter(_all_sparse_to)
not_of_128_experts = Converter(_normed_to, lambda value, scope: scope.h.num_experts != _BARE_EXPERTS)
like_experts = Converter(derive=lambda scope: scope.h.moe_intermediate_size)
norm_of_softmax = Converter(
        lambda value, scope: value or scope.config("expert_selection_fn") == "softmax", lambda value, scope: bool(value)
    )


def _fourth_full_to(value: object, scope: Scope) -> None:
    kinds = value if isinstance(value, list) else []
    if kinds and slides_of(kinds) != periodic(FOURTH, len(kinds)):
        raise RefusedError(f"{scope.name}: llama.cpp's {scope.row.gguf} lets exactly every fourth layer see everything")


def _fourth_full(scope: Scope) -> list[str] | None:
    period = as_int(scope.config("global_attn_every_n_layers"), "global_attn_every_n_layers") or FOURTH
    return None if scope.h.num_layers is None else kinds_of(periodic(period, scope.h.num_layers))


def _dense_prefix(scope: Scope) -> list[str] | None:
    """Layers without experts stand first and have a period of their own."""
    n_layers, dense = scope.h.num_layers, scope.size("first_k_dense_replace") or 0
    own = as_int(scope.config("prefix_dense_sliding_window_pattern"), "prefix_dense_sliding_window_pattern") or 1
    pattern = scope.h.extra.get("sliding_window_pattern", scope.defaults.get("sliding_window_pattern"))
    if n_layers is None:
        return None
    rest = periodic(as_int(pattern, "sliding_window_pattern") or FOURTH, max(0, n_layers - dense))
    return kinds_of([*periodic(own, min(dense, n_layers)), *rest])


def _own_dense_first_to(value: object, scope: Scope) -> list[bool] | None:
    """Which layers have a window, where they are not those that llama.cpp takes by itself."""
    slides = slides_of(value) if value is not None else []
    return None if not any(slides) or slides == periodic(FOURTH, len(slides), first=0) else slides


def _own_dense_first_from(value: object, scope: Scope) -> object:
    if value is None and scope.gguf("attention.sliding_window"):
        return full_every_fourth(scope)
    return layer_types_from(value, scope) if value is not None else [FULL] * (scope.h.num_layers or 0)


def _heads_a_layer_to(value: object, scope: Scope) -> object:
    return value or [scope.h.num_heads] * (scope.h.num_layers or 0)


def _heads_a_layer_from(value: object, scope: Scope) -> object:
    """Heads of each layer; the config's one number is that of the first."""
    if not isinstance(value, list) or not value:
        return DEFAULT if value is None else ConfigKeys(num_attention_heads=value)
    return ConfigKeys(num_attention_heads=value[0], num_attention_heads_per_layer=value)


def _window_rotary_to(value: object, scope: Scope) -> int | None:
    """Rotated values of a head in layers with a window."""
    part = _window_rope(scope).get("partial_rotary_factor", 1.0)
    number = as_float(part, "partial_rotary_factor")
    return None if number is None or not scope.h.head_dim else int(scope.h.head_dim * number)


def _window_rotary_from(value: object, scope: Scope) -> object:
    count, size, rope = as_int(value, scope.key.gguf), scope.h.head_dim, _window_rope(scope)
    if count and size and isinstance(rope, dict):
        rope["partial_rotary_factor"] = shorten(count / size)
    return DEFAULT


def _window_rope(scope: Scope) -> Mapping[str, object]:
    return as_mapping(as_mapping(scope.h.extra.get("rope_layers")).get(SLIDING))


every_fourth_full = Converter(_fourth_full_to, lambda value, scope: _fourth_full(scope), _fourth_full)
every_fourth_unchunked = Converter(_fourth_full_to, lambda value, scope: None)
dense_prefix_layer_types = replace(layer_types, derive=_dense_prefix)
full_unless_named = replace(
        layer_types,
        to_gguf=lambda value, scope: layer_types_to(value, scope) if scope.config("sliding_window") else None,
        derive=lambda scope: [FULL] * (scope.h.num_layers or 0),
    )
own_dense_first = Converter(
        _own_dense_first_to, _own_dense_first_from, lambda scope: [FULL] * (scope.h.num_layers or 0)
    )
heads_a_layer = Converter(_heads_a_layer_to, _heads_a_layer_from)
window_rotary = Converter(_window_rotary_to, _window_rotary_from)


def _dense_list_from(value: object, scope: Scope) -> object:
    """The same of a config that knows no other key for it."""
    n_layers, dense = scope.h.num_layers or 0, gguf_int(scope, "leading_dense_block_count")
    return ["dense" if i < dense else "sparse" for i in range(n_layers)]


leading_dense_list = Converter(dense_first_to, _dense_list_from, normalize=dense_first)

_ALWAYS_WINDOW = Key("attention.sliding_window", ("sliding_window",))
_LAYERS = Key("attention.sliding_window_pattern", ("layer_types",), "bool[]", converter=layer_types)
_FOURTH = Key("", ("layer_types",), "str[]", converter=every_fourth_full)
_SHARED = Key("expert_shared_count", ("num_shared_experts",))
_SHARED_WIDTH = Key("expert_shared_feed_forward_length", converter=shared_width)
_UNSCALED = Key("rope.scaling.type", kind="str", converter=unscaled)
_GATING = Key("expert_gating_func", ("score_func",), converter=gating)
_BY_TYPE = Key("", ("mlp_layer_types",), "str[]", converter=leading_dense)
_ONE_THETA = Difference("llama.cpp's mellum rotates sliding and full layers with one base frequency", "two_thetas")


def _llama4_experts() -> tuple[TensorRow, ...]:
    """Gate beside up, as [experts, in, out]."""
    halves = dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), "experts,moe_ffn,hidden")
    return (
        *linear("feed_forward.router", "ffn_gate_inp", "experts,hidden", layers="moe"),
        split(
            "feed_forward.experts.gate_up_proj", "experts,hidden,2*moe_ffn", halves, transposed=True,
            order=("deal:experts,moe_ffn,moe_ffn",), layers="moe",
        ),
        tensor(
            "feed_forward.experts.down_proj", "ffn_down_exps.weight", "experts,moe_ffn,hidden", transposed=True,
            gguf_dims=("experts,hidden,moe_ffn",), layers="moe",
        ),
        *shared_expert("feed_forward.shared_expert", "moe_ffn", layers="moe"),
        *gated_mlp(hf="feed_forward", layers="dense"),
    )


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="llama4_text", required={"interleave_moe_layer_step": "", "expert_feed_forward_length": ""}, gguf="llama4",
        **class_names("Llama4ForCausalLM", "Llama4TextModel", types=("llama4_text",), bare=("Llama4TextModel",)),
        rope_type=0,
        tensors=moe_decoder(*attention("attention_bias", "attention_bias"), *_llama4_experts()),
        keys=(
            *rename(
                moe_keys(VOCAB, ROPE_DIM, WIDTH, NO_BIAS, count="num_local_experts"),
                intermediate_size="intermediate_size_mlp", moe_intermediate_size="intermediate_size",
            ),
            Key("interleave_moe_layer_step", ("interleave_moe_layer_step",)),
            Key("", ("moe_layers",), "i32[]", converter=stepped_moe_layers),
            Key("", ("no_rope_layers",), "i32[]", converter=every_fourth), Key("", ("no_rope_layer_interval",)),
            replace(_FOURTH, converter=every_fourth_unchunked),
            Key("", ("use_qk_norm",), "bool", converter=not_of_128_experts),
            must_be("attention_chunk_size", 8192), Key("", ("attn_temperature_tuning",), "bool", allowed=(True, 4)),
            must_be("floor_scale", 8192), must_be("attn_scale", 0.1),
        ),
        defaults={"": {
            "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 48,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "num_experts_per_tok": 1, "num_local_experts": 16, "interleave_moe_layer_step": 1,
            "use_qk_norm": True, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
            "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1, "attention_bias": False,
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        }},
    ),
    Architecture(
        id="afmoe",
        required={"expert_shared_count": "", "expert_feed_forward_length": "", "attention.sliding_window": ""},
        gguf="afmoe", **hf_names("Afmoe", "afmoe"), gguf_only=(),
        tensors=network(
            *norm("input_layernorm", "attn_norm"), *attention("attention_bias", "attention_bias", qk_norm="head_dim"),
            *linear("self_attn.gate_proj", "attn_gate", "q,hidden"),
            *norm("post_attention_layernorm", "post_attention_norm"), *norm("pre_mlp_layernorm", "ffn_norm"),
            *norm("post_mlp_layernorm", "post_ffw_norm"),
            *linear("mlp.router.gate", "ffn_gate_inp", "experts,hidden", layers="moe"),
            tensor("mlp.expert_bias", "exp_probs_b.bias", "experts", layers="moe"), *experts(layers="moe"),
            *fused_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj", layers="moe"),
            *shared_expert("mlp.shared_experts", "num_shared_experts*moe_ffn", "num_shared_experts", "moe"),
            *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(
            VOCAB, ROPE_DIM, *GROUPS, WIDTH, _SHARED,
            Key("leading_dense_block_count", ("num_dense_layers",), converter=absent_0),
            replace(WEIGHTS_SCALE, hf=("route_scale",)), replace(WEIGHTS_NORM, hf=("route_norm",)), _GATING, WINDOW,
            _FOURTH, Key("", ("global_attn_every_n_layers",)), must_be("mup_enabled", True), NO_BIAS,
        ),
        defaults={"": {
            "head_dim": 128, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "moe_intermediate_size": 1408,
            "num_dense_layers": 1, "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2,
            "route_scale": 1.0, "route_norm": True, "score_func": "sigmoid", "global_attn_every_n_layers": 4,
            "sliding_window": 1024, "mup_enabled": False, "attention_bias": False, "tie_word_embeddings": False,
        }},
    ),
    Architecture(
        id="exaone_moe",
        required={"attention.sliding_window": "", "expert_gating_func": "", "expert_feed_forward_length": ""},
        gguf="exaone-moe", **hf_names("ExaoneMoe", "exaone_moe", "ExaoneMoE"), head_always=True,
        tensors=moe_decoder(
            *attention(qk_norm="head_dim"),
            *router_and_experts(
                "moe&!draft",
                (
                    replace(selection_bias("moe&!draft"), hf=("mlp.e_score_correction_bias",)),
                    selection_bias("moe&!draft"),
                ),
            ),
            *shared_expert("mlp.shared_experts", "num_shared_experts*moe_ffn", layers="moe&!draft"),
            *gated_mlp(layers="dense|draft"), *draft_layer(),
        ),
        drafts=mtp_names(),
        keys=moe_keys(
            VOCAB, *GROUPS, WIDTH, _SHARED, _SHARED_WIDTH, WEIGHTS_SCALE, WEIGHTS_NORM, SIGMOID, DENSE_LAYERS, _BY_TYPE,
            _ALWAYS_WINDOW, SLIDING_LAYERS,
            Key("nextn_predict_layers", ("num_nextn_predict_layers",), converter=number_or_0),
            Key("rope.scaling.type", kind="str", constant="none"),
        ),
        defaults={"": {
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096,
            "sliding_window_pattern": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64,
            "num_experts_per_tok": 8, "num_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
            "n_group": 1, "topk_group": 1, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 53,
            "pad_token_id": 0,
        }},
    ),
    Architecture(
        id="cohere2_moe",
        required={
            "attention.sliding_window": "", "logit_scale": "", "leading_dense_block_count": "",
            "expert_feed_forward_length": "",
        },
        gguf="cohere2moe", **hf_names("Cohere2Moe", "cohere2_moe"), rope_type=0, gguf_only=(),
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
            HEAD_DIM, Key("logit_scale", ("logit_scale",), "f32"), _ALWAYS_WINDOW,
            replace(_LAYERS, converter=dense_prefix_layer_types), VOCAB, DENSE_LAYERS, _BY_TYPE,
            Key("expert_gating_func", ("expert_selection_fn",), converter=gating),
            Key("expert_weights_norm", ("norm_topk_prob",), "bool", converter=norm_of_softmax),
            replace(_SHARED, converter=positive), _SHARED_WIDTH,
            must_be("shared_expert_combination_strategy", "average"),
            must_be("prefix_dense_sliding_window_pattern", 1), ROPE_DIM, MTP, _UNSCALED, NO_BIAS, SILU,
        ),
        defaults={"": {
            "head_dim": 128, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "logit_scale": 0.0625,
            "sliding_window": 4096, "sliding_window_pattern": 4, "num_experts": 8, "num_experts_per_tok": 2,
            "num_shared_experts": 0, "shared_expert_combination_strategy": "average", "expert_selection_fn": "softmax",
            "prefix_dense_sliding_window_pattern": 1, "norm_topk_prob": True, "attention_bias": False,
            "first_k_dense_replace": 0, "tie_word_embeddings": True, "bos_token_id": 5, "eos_token_id": 255001,
            "pad_token_id": 0,
        }},
    ),
    Architecture(
        id="mellum", required={"expert_feed_forward_length": ""}, gguf="mellum", **hf_names("Mellum", "mellum"),
        gguf_only=(), head_always=True, nested_rope=True,
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"), *router_and_experts("moe"),
            *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(
            WIDTH, WINDOW, replace(SLIDING_LAYERS, converter=full_unless_named),
            Key("", ("mlp_layer_types",), "str[]", converter=all_sparse), must_be("norm_topk_prob", True), NO_BIAS,
        ),
        differs=(_ONE_THETA,),
        defaults={"": {
            "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
            "sliding_window": 1024, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896,
            "norm_topk_prob": True, "attention_bias": False, "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        }},
    ),
    Architecture(
        id="laguna", required={"leading_dense_block_count": "", "expert_feed_forward_length": ""}, gguf="laguna",
        **hf_names("Laguna", "laguna"), gguf_only=(), nested_rope=True,
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"),
            *linear("self_attn.g_proj", "attn_gate", "heads,hidden", need="!gating=per-element"),
            *linear("self_attn.g_proj", "attn_gate", "q,hidden", need="gating=per-element"),
            *router_and_experts(
                "moe", (replace(selection_bias(), hf=("mlp.experts.e_score_correction_bias",)), selection_bias()),
            ),
            *shared_expert("mlp.shared_expert", "shared_expert_intermediate_size", layers="moe"),
            *shared_expert("mlp.shared_experts", "shared_expert_intermediate_size", layers="moe"),
            *gated_mlp(layers="dense"),
        ),
        keys=(
            *(key for key in moe_keys(VOCAB, WIDTH) if key.field != "num_heads"),
            Key("", ("num_attention_heads",), field="num_heads"),
            Key("attention.head_count", ("num_attention_heads_per_layer",), "u32[]", converter=heads_a_layer), ROPE_DIM,
            Key("rope.dimension_count_swa", converter=window_rotary), replace(_ALWAYS_WINDOW, converter=any_window),
            replace(_LAYERS, converter=own_dense_first),
            Key("expert_shared_feed_forward_length", ("shared_expert_intermediate_size",)),
            Key("expert_weights_norm", kind="bool", constant=True),
            replace(WEIGHTS_SCALE, hf=("moe_routed_scaling_factor",)), SIGMOID, DENSE_LAYERS,
            replace(_BY_TYPE, converter=leading_dense_list), Key("", ("gating",), "str"),
            must_be("moe_router_logit_softcapping", 0.0), NO_BIAS,
        ),
        defaults={"": {
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
            "sliding_window": 512, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "num_experts": 256, "num_experts_per_tok": 8, "attention_bias": False, "gating": True,
            "moe_routed_scaling_factor": 1.0, "moe_router_logit_softcapping": 0.0, "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            },
        }},
    ),
)
