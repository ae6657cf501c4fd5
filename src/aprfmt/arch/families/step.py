"""Step."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from aprfmt.arch.blocks.decoder import (
    DIMS, GROUPED, WINDOW, gated_mlp, hf_names, linear, must_be, network, norm, rename, tensor,
)
from aprfmt.arch.blocks.moe import MTP, NO_BIAS, WIDTH, draft_layer, moe_keys, shared_expert
from aprfmt.arch.blocks.tower import IMAGE, epsilon, layers, mlp, norms, projector, sees, whole
from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing, refuse_if
from aprfmt.arch.converters.common import gating, integer
from aprfmt.arch.converters.experts import DENSE, SPARSE, after, counted_dense_from_gguf, counted_dense_to_gguf, limits
from aprfmt.arch.converters.towers import ffn_by_ratio, ratio_of_ffn
from aprfmt.arch.converters.windows import hybrid_layers, step_heads, windowed_heads
from aprfmt.arch.fields import as_int
from aprfmt.arch.grammar import layer_kinds
from aprfmt.arch.row import HALF_ROTARY, MOST, OPTIONAL, OWN, REQUIRED, Architecture, Key, TensorRow, Tower
from aprfmt.errors import CorruptError


_HALF = "partial_rotary_factor"


def _rotated_parts(scope: Scope) -> list[float]:
    """Rotated dimensions of a head: all in sliding-window layers, half in the others."""
    return [1.0 if kind == "sliding_attention" else 0.5 for kind in layer_kinds(scope.h.extra) or ()]


def _half_rotary_from_gguf(value: object, scope: Scope) -> object:
    scope.h.extra[_HALF] = 0.5
    return _rotated_parts(scope) or DEFAULT


def _rotates_otherwise(value: object, scope: Scope) -> bool:
    return scope.h.extra.get(_HALF, 0.5) != 0.5 or (value is not None and value != _rotated_parts(scope))


half_rotary = Converter(
    refuse_if(
        _rotates_otherwise,
        "{name}: llama.cpp's {gguf} rotates whole heads in sliding-window layers, half of each head in the others",
    ),
    _half_rotary_from_gguf,
    normalize=lambda value, scope: DEFAULT if value is not None else _rotated_parts(scope) or DEFAULT, role=HALF_ROTARY,
)


def _enumerated_dense_normalize(value: object, scope: Scope) -> object:
    """From the MoE layers, listed in a string; all but the first three by default."""
    listed, n_layers = scope.h.extra.pop("moe_layers_enum", None), scope.h.num_layers
    if value is not None or n_layers is None:
        return DEFAULT
    if listed is None:
        return after(3, n_layers)
    if not isinstance(listed, str) or not all(part.strip().isdecimal() for part in listed.split(",") if part.strip()):
        raise CorruptError("moe_layers_enum is not a comma-separated list of layers")
    routed = {int(part) for part in listed.split(",") if part.strip()}
    return [SPARSE if i in routed else DENSE for i in range(n_layers)]


enumerated_dense = Converter(counted_dense_to_gguf, counted_dense_from_gguf, normalize=_enumerated_dense_normalize)


def _same_heads_to_gguf(value: object, scope: Scope) -> list[int] | None:
    count, kinds = as_int(value, scope.name), layer_kinds(scope.h.extra)
    return None if count is None or kinds is None else [count] * len(kinds)


same_heads = Converter(
    _same_heads_to_gguf,
    lambda value, scope: as_int(value[0] if isinstance(value, list) and value else value, scope.key.gguf),
)
_WINDOWED_HEADS = "num_sliding_attention_heads"


def _step_attention() -> tuple[TensorRow, ...]:
    """More heads in sliding-window layers; a gate per head."""
    rows: list[TensorRow] = []
    for kind, heads in (("full_attention", "heads"), ("sliding_attention", _WINDOWED_HEADS)):
        rows += [
            *linear("self_attn.q_proj", "attn_q", f"{heads}*head_dim,hidden", layers=kind),
            *linear("self_attn.g_proj", "attn_gate", f"{heads},hidden", layers=kind),
            *linear("self_attn.o_proj", "attn_output", f"hidden,{heads}*head_dim", layers=kind),
        ]
    return (
        *rows, *linear("self_attn.k_proj", "attn_k", "kv,hidden"), *linear("self_attn.v_proj", "attn_v", "kv,hidden"),
        *norm("self_attn.q_norm", "attn_q_norm", "head_dim", value="plus_one"),
        *norm("self_attn.k_norm", "attn_k_norm", "head_dim", value="plus_one"),
    )


def _step_experts() -> tuple[TensorRow, ...]:
    """A router with a bias, experts stacked in one tensor per projection, and a shared expert."""
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
"""Numbers of heads, which a GGUF states per layer."""


of_head_size = Converter(
    refuse_if(
        lambda value, scope: value is not None and value != scope.h.head_dim,
        "{name} is {value}: llama.cpp's {gguf} scales scores by the size of a head, {h.head_dim}",
    ),
    nothing,
)
squared = integer(lambda side: side**2 or None, lambda area: isqrt(area) or DEFAULT)
_V = "vision_model."
_W = "width"
_TENSORS = (
    tensor(f"{_V}conv1.weight", "v.patch_embd.weight", f"{_W},3,patch_size,patch_size"),
    tensor(f"{_V}positional_embedding", "v.position_embd.weight", f"image_size/patch_size*image_size/patch_size,{_W}"),
    *norm(f"{_V}ln_pre", "v.pre_ln", _W, REQUIRED),
    *layers(
        *norms("ln_1", "ln_2", width=_W), tensor("attn.in_proj_weight", "attn_qkv.weight", f"3*{_W},{_W}"),
        tensor("attn.in_proj_bias", "attn_qkv.bias", f"3*{_W}"),
        *linear("attn.out_proj", "attn_out", f"{_W},{_W}", REQUIRED), *mlp("mlp.c_fc", "mlp.c_proj", width=_W),
        tensor("ls_1.gamma", "ls1.weight", _W), tensor("ls_2.gamma", "ls2.weight", _W),
        hf=f"{_V}transformer.resblocks.{{n}}.", depth="vision_config.layers",
    ),
    tensor(f"{_V}vit_downsampler1.weight", "mm.0.weight", f"2*{_W},{_W},3,3"),
    tensor(f"{_V}vit_downsampler1.bias", "mm.0.bias", f"2*{_W}", OPTIONAL),
    tensor(f"{_V}vit_downsampler2.weight", "mm.1.weight", f"4*{_W},2*{_W},3,3"),
    tensor(f"{_V}vit_downsampler2.bias", "mm.1.bias", f"4*{_W}", OPTIONAL),
    tensor("vit_large_projector.weight", "mm.model.fc.weight", f"hidden,4*{_W}"),
)


def _step(id: str, hf_class: str, model_type: str) -> Tower:
    return Tower(
        id=id, **whole(hf_class, types=(model_type,)), when="projector_type=step3vl", text="",
        prefixes=(("model.vision_model.", _V), ("model.vit_large_projector.", "vit_large_projector.")),
        tensors=_TENSORS, f32=(".position_embd.",), convolutions=("mm.0.weight", "mm.1.weight"),
        keys=sees(
            Key("vision.image_size", ("vision_config.image_size",)),
            Key("vision.patch_size", ("vision_config.patch_size",)),
            Key("vision.embedding_length", ("vision_config.width", "vision_config.hidden_size")),
            Key(
                "vision.feed_forward_length", ("vision_config.intermediate_size",),
                converter=ffn_by_ratio("vision_config.width"),
            ),
            Key("", ("vision_config.mlp_ratio",), "f32", converter=ratio_of_ffn),
            Key("vision.block_count", ("vision_config.layers", "vision_config.num_hidden_layers")),
            Key("vision.attention.head_count", ("vision_config.heads", "vision_config.num_attention_heads")), *IMAGE,
            projector("step3vl"), epsilon("vision", "vision_config.layer_norm_eps"),
            Key("vision.projector.scale_factor", ("understand_projector_stride",), converter=squared),
            Key("vision.preproc_image_size", constant=3024),
        ),
        config={"vision_config.model_type": "perception_encoder"},
    )


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="step3p5", gguf="step35", **hf_names("Step3p5", "step3p5"), nested_rope=True,
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
            must_be("mlp_bias", False), Key("", ("query_pre_attn_scalar",), "f32", converter=of_head_size),
        ),
    ),
)

TOWERS: tuple[Tower, ...] = (
    _step("step_vl_vision", "StepVLForConditionalGeneration", "step_robotics"),
    _step("step3p7_vision", "Step3p7ForConditionalGeneration", "step3p7"),
)
