"""Granite: dense, MoE and hybrid with Mamba."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch import projectors
from aprfmt.arch.blocks.decoder import (
    ALWAYS_WINDOW, DECODER, DIMS, EXPERTS, KV_HEADS_BY_LAYER, LLAMA_KEYS, RMS_EPS, ROPE, ROPE_DIM, SILU, VOCAB,
    WINDOW_LAYERS, attention, block, class_names, decoder, embedding, final_norm, flag, fused_experts, gated_mlp, head,
    hf_names, linear, must_be, network, norm, rename, split, tensor,
)
from aprfmt.arch.blocks.moe import BIAS_FLAG, COUNT, USED, moe_decoder, moe_keys
from aprfmt.arch.blocks.ssm import dual, mixer
from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.converters.common import expand, integer, numbers
from aprfmt.arch.converters.hybrid import mixed_layers
from aprfmt.arch.converters.layers import layer_types, positive
from aprfmt.arch.converters.windows import full_every_fourth
from aprfmt.arch.fields import as_float
from aprfmt.arch.projectors import DEEPSTACK, MAP, TARGETS
from aprfmt.arch.row import Architecture, Key, TensorRow
from aprfmt.errors import CorruptError, RefusedError


SCALES = (
    Key("attention.scale", ("attention_multiplier",), "f32"), Key("embedding_scale", ("embedding_multiplier",), "f32"),
    Key("residual_scale", ("residual_multiplier",), "f32"), Key("logit_scale", ("logits_scaling",), "f32"),
)
"""Granite's multipliers."""


def _reciprocal(value: object, scope: Scope) -> object:
    factor = as_float(value, scope.name)
    if factor == 0:
        raise RefusedError(f"{scope.name} is 0: a GGUF has its reciprocal")
    return None if factor is None else 1 / factor


reciprocal = Converter(_reciprocal, _reciprocal)
"""A factor of the logits, by which a GGUF divides them."""


def _lone_width_to_gguf(value: object, scope: Scope) -> object:
    """Width of the dense MLP; in a network without experts that is the shared expert's."""
    return value if scope.h.num_experts else scope.h.extra.get("shared_intermediate_size", value)


def _rope_switch_to_gguf(value: object, scope: Scope) -> bool:
    if value not in (None, "rope", "nope"):
        raise RefusedError(f"GGUF does not support position_embedding_type {value!r:.40}")
    return bool(value == "rope")


some_experts = Converter(from_gguf=lambda value, scope: value or 0)
# llama.cpp refuses more used experts than experts.
used_experts = Converter(lambda value, scope: value if scope.h.num_experts else None)
rope_switch = Converter(_rope_switch_to_gguf, lambda value, scope: "rope" if value else None)
_BLOCKS, _CONTEXT, _WIDTH, _FFN, _HEADS = DIMS
_SSM, _ATTENTION = "linear_attention|mamba", "full_attention|attention"
_KINDS = Key("", ("layer_types",), converter=mixed_layers)
_GRANITE_SHARED = (
    split(
        "shared_mlp.input_linear.weight", "2*shared_intermediate_size,hidden",
        dict.fromkeys(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), "shared_intermediate_size,hidden"),
    ),
    *linear("shared_mlp.output_linear", "ffn_down_shexp", "hidden,shared_intermediate_size"),
)


def _granite_mlp() -> tuple[TensorRow, ...]:
    """Routed experts and a shared one; a network without experts uses the shared one as its MLP."""
    lone = (replace(row, gguf=tuple(n.replace("_shexp", "") for n in row.gguf)) for row in _GRANITE_SHARED)
    return (
        *linear("block_sparse_moe.router.layer", "ffn_gate_inp", "experts,hidden", layers="moe"),
        *fused_experts("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight", layers="moe"),
        *(replace(row, layers="moe") for row in _GRANITE_SHARED), *(replace(row, layers="dense") for row in lone),
    )


_MAMBA_D = ("mamba_expand*hidden", "mamba_d_state")
_GRANITE_MIXER = dual(
    *_MAMBA_D, "mamba_n_heads", "mamba_n_groups", "mamba_d_conv", "mamba_proj_bias", "mamba_conv_bias",
)
_GRANITE = Architecture(
    id="granitemoehybrid", gguf="granitehybrid",
    when="logit_scale|embedding_scale",  # Bamba has none
    **class_names("GraniteMoeHybridForCausalLM", types=("granitemoehybrid",)), rope_type=0,
    tensors=network(
        *norm("input_layernorm", "attn_norm"), *mixer("mamba.", _GRANITE_MIXER, _SSM),
        *attention("attention_bias", "attention_bias", permuted=True, layers=_ATTENTION),
        *norm("post_attention_layernorm", "ffn_norm"), *_granite_mlp(),
    ),
    keys=(
        _BLOCKS, _CONTEXT, _WIDTH, replace(_FFN, converter=Converter(_lone_width_to_gguf)), _HEADS, KV_HEADS_BY_LAYER,
        ROPE,
        RMS_EPS, replace(EXPERTS[0], hf=("num_local_experts",), converter=some_experts),
        replace(EXPERTS[1], converter=used_experts), VOCAB, ROPE_DIM, *SCALES,
        Key("expert_shared_feed_forward_length", ("shared_intermediate_size",)),
        Key("ssm.conv_kernel", ("mamba_d_conv",)), Key("ssm.state_size", ("mamba_d_state",)),
        Key("ssm.group_count", ("mamba_n_groups",)),
        Key("ssm.inner_size", ("mamba_expand",), converter=expand, allowed=(2,)),
        Key("ssm.time_step_rank", ("mamba_n_heads",)),
        Key("rope.scaling.finetuned", ("position_embedding_type",), "bool", converter=rope_switch), _KINDS, SILU,
        flag("attention_bias"), must_be("mamba_proj_bias", False), flag("mamba_conv_bias"),
    ),
)


def _rope_pattern_to_gguf(value: object, scope: Scope) -> list[bool] | None:
    """Which layers are rotated, if not all, from the base frequency of each: 0 for unrotated ones."""
    listed = value if value is not None else scope.h.extra.get("no_rope_layers")
    if listed is None:
        return None
    if not isinstance(listed, list):
        raise CorruptError(f"{scope.name} is not a list")
    if value is not None and {theta for theta in listed if theta} - {scope.h.rope_theta}:
        raise RefusedError(f"{scope.name}: a GGUF of {scope.row.gguf} has one rope_theta for all layers")
    if not any(listed):  # its graph then has positions that nothing uses, and the process aborts
        raise RefusedError(f"{scope.name}: llama.cpp's {scope.row.gguf} cannot run without RoPE in any layer")
    return None if all(listed) else [bool(item) for item in listed]


def _rope_pattern_from_gguf(value: object, scope: Scope) -> object:
    return [scope.h.rope_theta if rotated else 0 for rotated in value] if isinstance(value, list) else DEFAULT


dense_first_layer_types = replace(layer_types, derive=full_every_fourth)
rope_pattern = Converter(_rope_pattern_to_gguf, _rope_pattern_from_gguf)


def _granite(*mlp: TensorRow) -> tuple[TensorRow, ...]:
    """Granite's decoder with attention sinks."""
    sinks = tensor("self_attn.sinks", "attn_sinks.weight", "heads")
    return decoder(*attention("attention_bias", "attention_bias", permuted=True), sinks, mlp=mlp)


def _swa_experts() -> tuple[TensorRow, ...]:
    """Fused gate over up, on both sides."""
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
    *DECODER, VOCAB, ROPE_DIM, *SCALES, SILU, ALWAYS_WINDOW, replace(WINDOW_LAYERS, converter=dense_first_layer_types),
    Key("attention.rope_pattern", ("layer_rope_theta",), "bool[]", converter=rope_pattern),
    Key("", ("no_rope_layers",), "i32[]"), flag("attention_bias"),
)


def _mapping_to_gguf(value: object, scope: Scope) -> object:
    """From the GGUF, else from the lists of the whole model's config.json; nothing for Granite itself."""
    n_layers = scope.h.num_layers or 0
    if value is not None:
        return numbers(value, scope.name)[:n_layers]
    told = {name: scope.config(name) for name in (MAP, TARGETS)}
    return projectors.deepstack_mapping(told, n_layers) if any(told.values()) else None


deepstack_mapping = Converter(_mapping_to_gguf, lambda value, scope: value)
_BIASES = (flag("attention_bias"), flag("mlp_bias"))
_BIASED = decoder(*attention("attention_bias", "attention_bias", permuted=True), mlp=gated_mlp("mlp_bias"))


def _granite_experts() -> tuple[TensorRow, ...]:
    return (
        *linear("block_sparse_moe.router.layer", "ffn_gate_inp", "experts,hidden"),
        *fused_experts("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    )


def _granite_shared() -> tuple[TensorRow, ...]:
    width, need = "shared_intermediate_size", "shared_intermediate_size"
    return (
        split(
            "shared_mlp.input_linear.weight", f"2*{width},hidden",
            dict.fromkeys(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), f"{width},hidden"), need,
        ),
        *linear("shared_mlp.output_linear", "ffn_down_shexp", f"hidden,{width}", need=need),
    )


one_more = integer(lambda layers: layers - 1 if layers else None, lambda layers: layers + 1)
_COUNT, _RANK = "num_adapters", "max_lora_rank"
_TURNED = "head_dim/2"


def _adapters(hf: str, slices: dict[str, tuple[str, str]], width: str) -> tuple[TensorRow, ...]:
    """Two matrices per adapter for each part of a projection, preceded by those of no adapter, which are zeros in a
    GGUF.

    `slices` are the parts: GGUF name -> (rows, size of the heads whose rows are permuted, "" for none).
    """

    def stacked(name: str, gguf: str, rows: str, columns: str, order: tuple[str, ...] = ()) -> TensorRow:
        one, all_of_them = f"{_COUNT},1,{rows},{columns}", f"{_COUNT}+1,{rows},{columns}"
        return TensorRow((name,), (gguf,), (one,), gguf_dims=(all_of_them,), lead=rows, order=order)

    single = len(slices) == 1
    return tuple(
        row
        for i, (gguf, (rows, heads)) in enumerate(slices.items())
        for row in (
            stacked(f"{hf}.lora_A" if single else f"{hf}.lora_A_slices.{i}", f"{gguf}.lora_a", _RANK, width),
            stacked(
                f"{hf}.lora_B" if single else f"{hf}.lora_B_slices.{i}", f"{gguf}.lora_b", rows, _RANK,
                (f"swap:{_COUNT}*{heads},2,{_TURNED}",) if heads else (),
            ),
        )
    )


_PARTS = {"attn_q": ("q", "heads"), "attn_k": ("kv", "kv_heads"), "attn_v": ("kv", "")}
_GATE_UP = {"ffn_gate": ("ffn", ""), "ffn_up": ("ffn", "")}
_SWITCH_BLOCKS, *_OTHERS = DECODER

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="granite", gguf="granite", rope_type=0,
        **hf_names("Granite", "granite", also=("granite4_vision_text", "granite_docling_text")),
        tensors=_BIASED,
        keys=(
            *LLAMA_KEYS, *SCALES, SILU, *_BIASES,
            Key("deepstack_mapping", (DEEPSTACK,), "i32[]", converter=deepstack_mapping), Key("", (MAP,)),
            Key("", (TARGETS,)),
        ),
    ),
    # Granite without norms after attention and MLP; its GGUF is that of a Granite.
    Architecture(
        id="hyperclovax", gguf="granite", **hf_names("HyperCLOVAX", "hyperclovax"), rope_type=0,
        tensors=network(
            *norm("input_layernorm", "attn_norm"),
            *attention("attention_bias", "attention_bias", permuted=True),
            *norm("post_attention_layernorm", "ffn_norm"), *gated_mlp("mlp_bias"),
            *(TensorRow((f"post_norm{i}.weight",), (), ("hidden",), "use_post_norm") for i in (1, 2)),
        ),
        keys=(
            *LLAMA_KEYS, *SCALES[:3], replace(SCALES[3], converter=reciprocal), SILU, *_BIASES,
            must_be("use_post_norm", False),
        ),
    ),
    Architecture(
        id="granitemoe", gguf="granitemoe", **hf_names("GraniteMoe", "granitemoe"), rope_type=0,
        tensors=moe_decoder(*attention("attention_bias", "attention_bias", permuted=True), *_granite_experts()),
        keys=moe_keys(
            VOCAB, ROPE_DIM, *SCALES, Key("expert_shared_feed_forward_length", needed="tensors=ffn_up_shexp.weight"),
            BIAS_FLAG, count="num_local_experts",
        ),
    ),
    Architecture(
        id="granitemoeshared", gguf="granitemoe", when="expert_shared_feed_forward_length",
        **hf_names("GraniteMoeShared", "granitemoeshared"), rope_type=0,
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", permuted=True), *_granite_experts(), *_granite_shared()
        ),
        keys=moe_keys(
            VOCAB, ROPE_DIM, *SCALES, Key("expert_shared_feed_forward_length", ("shared_intermediate_size",)),
            BIAS_FLAG, count="num_local_experts",
        ),
    ),
    # As in ibm-granite/granite-switch-4.1-3b-preview; one of its layers is the selector, and has no tensors.
    Architecture(
        id="granite_switch", gguf="graniteswitch", **hf_names("GraniteSwitch", "granite_switch"), rope_type=0,
        ignored=(".rotary_emb.inv_freq", "adapter_token_ids", "control_to_substitute_lut"),
        tensors=(
            embedding(),
            *block(
                *norm("input_layernorm", "attn_norm"),
                *linear(
                    "self_attn.qkv_proj.base_layer", "attn_qkv", "q+2*kv,hidden",
                    order=(f"head:q+kv,heads+kv_heads,2,{_TURNED}",),
                ),
                *_adapters("self_attn.qkv_proj", _PARTS, "hidden"),
                *linear("self_attn.o_proj.base_layer", "attn_output", "hidden,q"),
                *_adapters("self_attn.o_proj", {"attn_output": ("hidden", "")}, "q"),
                *norm("post_attention_layernorm", "ffn_norm"),
                split(
                    "shared_mlp.input_linear.base_layer.weight", "2*ffn,hidden",
                    {f"{name}.weight": "ffn,hidden" for name in _GATE_UP},
                ),
                *_adapters("shared_mlp.input_linear", _GATE_UP, "hidden"),
                *linear("shared_mlp.output_linear.base_layer", "ffn_down", "hidden,ffn"),
                *_adapters("shared_mlp.output_linear", {"ffn_down": ("hidden", "")}, "ffn"), depth="layers-1",
            ),
            *final_norm(), *head(),
        ),
        keys=(
            replace(_SWITCH_BLOCKS, converter=one_more), *_OTHERS, VOCAB, ROPE_DIM, *SCALES,
            Key("expert_used_count", constant=0), Key("", ("num_experts_per_tok",)),
            Key("expert_shared_feed_forward_length", ("shared_intermediate_size",)), Key("adapters.count", (_COUNT,)),
            Key("adapters.lora_rank", (_RANK,)), Key("adapters.token_ids_activate", ("adapter_token_ids",), "i32[]"),
            Key("adapters.token_ids_substitute", ("adapter_substitute_token_ids",), "i32[]"),
            Key("adapters.router_gain", ("control_token_gain",), "f32"), SILU,
            Key("expert_count", ("num_local_experts",), constant=0),
        ),
    ),
    _GRANITE,
    replace(
        _GRANITE, id="granite4", gguf="granite", hf_when="layer_types&!layer_types=linear_attention&!layer_types=mamba",
        when="ssm.inner_size",  # GraniteForCausalLM has no such key
    ),
    Architecture(
        id="granite_swa", gguf="granite_swa", **hf_names("GraniteSWA", "granite_swa"), rope_type=0,
        tensors=_granite(*gated_mlp("mlp_bias")), keys=(*_GRANITE_KEYS, flag("mlp_bias")),
    ),
    Architecture(
        id="granitemoe_swa", gguf="granite_swa", when="expert_count", **hf_names("GraniteMoeSWA", "granitemoe_swa"),
        rope_type=0,
        tensors=_granite(*_swa_experts()),
        keys=(
            *_GRANITE_KEYS, *rename((COUNT, USED), num_experts=("num_local_experts",)),
            Key("expert_shared_feed_forward_length", ("shared_intermediate_size",), converter=positive),
        ),
    ),
)
