"""Rows of the architecture table: Kimi's delta attention, with latent attention in every few layers."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.converters.common import (
    absent_1, leading_dense, mla_key_length, mla_key_width, mla_value_length, mla_value_width,
)
from aprfmt.arch.converters.hybrid import attending, kda_config_from, kda_config, kda_heads, kinds_of, latent_layers
from aprfmt.arch.fields import as_mapping
from aprfmt.arch.row import PRODUCT, Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DIMS, EXPERTS, GROUPED, RMS_EPS, SILU, VOCAB, class_names, experts, flag, gated_mlp, hf_names, linear, must_be,
    norm, rename, tensor,
)
from aprfmt.arch.rows.parts_mla import MLA_REQUIRED, latent_attention
from aprfmt.arch.rows.parts_moe import DENSE_LAYERS, SIGMOID, WEIGHTS_SCALE, moe_decoder, packed_experts, shared_expert
from aprfmt.errors import RefusedError


def _kda_layers_normalize(value: object, scope: Scope) -> object:
    """By the list of the attending layers, counted from 1; by every fourth where nothing says it."""
    n_layers = scope.h.num_layers
    if value is not None or n_layers is None:
        return DEFAULT
    listed = as_mapping(scope.h.extra.get("linear_attn_config")).get("full_attn_layers")
    if listed is None:
        return kinds_of(range(4, n_layers, 4), n_layers)
    return kinds_of([i - 1 for i in listed if isinstance(i, int)] if isinstance(listed, list) else [], n_layers)


def _kda_layers_from(value: object, scope: Scope) -> object:
    found, n_layers = attending(scope), scope.h.num_layers
    return DEFAULT if found is None or n_layers is None else kinds_of(found, n_layers)


def _k3_config(value: object, scope: Scope) -> object:
    """The same, with what only the third Kimi has there. That it has no draft layers is what silence says too."""
    if not scope.h.extra.get("num_nextn_predict_layers"):
        scope.h.extra.pop("num_nextn_predict_layers", None)
    found = kda_config_from(value, scope)
    if not isinstance(found, dict):
        return found
    bound = scope.h.extra.get("linear_lower_bound")
    return {"use_full_rank_gate": True, **({"gate_lower_bound": bound} if bound is not None else {}), **found}


def _k3_config_to(value: object, scope: Scope) -> None:
    if as_mapping(value).get("use_full_rank_gate") is False:
        raise RefusedError(f"{scope.name}: llama.cpp's {scope.row.gguf} loads gates of full rank only")


def _one_group_to(value: object, scope: Scope) -> None:
    if value not in (None, 1):
        raise RefusedError(f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} chooses experts without groups")


def _no_low_rank_to(value: object, scope: Scope) -> None:
    if value is not None:
        raise RefusedError(f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} loads queries of full rank only")


kda_layers = Converter(nothing, _kda_layers_from, normalize=_kda_layers_normalize)
k3_config = Converter(_k3_config_to, _k3_config, normalize=_k3_config)
one_group = Converter(_one_group_to, lambda value, scope: 1)
no_low_rank = Converter(_no_low_rank_to, lambda value, scope: value)

_KDA, _ATTENTION = "linear_attention", "full_attention"
_HEADS, _SIZE, _KERNEL = "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"
_INNER = f"{_HEADS}*{_SIZE}"


def delta_attention(
    *gates: TensorRow, heads: str = _HEADS, size: str = _SIZE, kernel: str = _KERNEL, hf: str = "self_attn."
) -> tuple[TensorRow, ...]:
    """A delta net whose state decays channel by channel; each of Q, K and V goes through a convolution of its own."""
    inner = f"{heads}*{size}"
    wide = f"{inner},1,{kernel}"
    rows = (
        *(
            tensor(f"{n}_conv1d.weight", f"ssm_conv1d_{n}.weight", wide, gguf_dims=(f"1,{wide}",))
            for n in ("q", "k", "v")
        ),
        *(row for n in ("q", "k", "v") for row in linear(f"{n}_proj", f"attn_{n}", f"{inner},hidden")), *gates,
        *linear("b_proj", "ssm_beta", f"{heads},hidden"), tensor("dt_bias", "ssm_dt.bias", inner),
        *norm("o_norm", "ssm_norm", size), *linear("o_proj", "attn_output", f"hidden,{inner}"),
    )
    return tuple(replace(row, hf=tuple(hf + name for name in row.hf), layers=_KDA) for row in rows)


def low_rank(name: str) -> tuple[TensorRow, ...]:
    """A projection by way of as many values as a head has."""
    return (
        *linear(f"{name}_a_proj", f"ssm_{name}_a", f"{_SIZE},hidden"),
        *linear(f"{name}_b_proj", f"ssm_{name}_b", f"{_INNER},{_SIZE}"),
    )


_MLA = tuple(replace(row, layers=_ATTENTION) for row in latent_attention())
_MOE = (
    *linear("block_sparse_moe.gate", "ffn_gate_inp", "experts,hidden", layers="moe"),
    tensor("block_sparse_moe.gate.e_score_correction_bias", "exp_probs_b.bias", "experts", layers="moe"),
    *shared_expert("block_sparse_moe.shared_experts", "num_shared_experts*moe_ffn", layers="moe"),
    *gated_mlp(layers="dense"),
)
_COUNT, _USED, _WIDTH = EXPERTS
_SIZES = (
    *rename(DIMS, max_position_embeddings=("model_max_length", "max_position_embeddings")),
    replace(GROUPED, kind="i32[]", converter=latent_layers), RMS_EPS,
    *rename(
        (_COUNT, _USED), num_experts=("num_experts", "num_local_experts"),
        num_experts_per_tok=("num_experts_per_token", "num_experts_per_tok"),
    ),
    Key("expert_group_count", ("num_expert_group", "n_group"), converter=one_group),
    Key("expert_group_used_count", ("topk_group",), converter=absent_1), SIGMOID,
    must_be("moe_router_activation_func", "sigmoid"), must_be("moe_layer_freq", 1), VOCAB,
    Key("ssm.conv_kernel", (_KERNEL, "linear_attn_config.short_conv_kernel_size")),
    Key("kda.head_dim", (_SIZE, "linear_attn_config.head_dim")),
    Key("", (_HEADS, "linear_attn_config.num_heads"), converter=kda_heads),
    Key("attention.kv_lora_rank", ("kv_lora_rank",)), Key("attention.key_length", converter=mla_key_width),
    Key("attention.key_length_mla", ("qk_nope_head_dim",), converter=mla_key_length),
    Key("attention.value_length_mla", ("v_head_dim",), converter=mla_value_length),
    Key("rope.dimension_count", ("qk_rope_head_dim",)), must_be("mla_use_nope", True), _WIDTH,
    Key("expert_shared_count", ("num_shared_experts", "n_shared_experts")), DENSE_LAYERS,
    Key("", ("mlp_layer_types",), "str[]", converter=leading_dense), WEIGHTS_SCALE,
    Key("", ("layer_types",), converter=kda_layers), Key("", ("linear_attn_config",), converter=kda_config),
)
_DEFAULTS = {
    "hidden_act": "silu", "num_key_value_heads": 32, "num_experts": 256, "num_experts_per_token": 8,
    "num_shared_experts": 1, "routed_scaling_factor": 2.446, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "qk_nope_head_dim": 128, "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True,
    "model_max_length": 1048576, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False,
    "moe_intermediate_size": 1024, _SIZE: 128, _HEADS: 32, _KERNEL: 4, "pad_token_id": 163839, "bos_token_id": 163584,
    "eos_token_id": 163586,
}

_LATENT = "routed_expert_hidden_size"
_K3_DEFAULTS = {
    **{key: value for key, value in _DEFAULTS.items() if key not in ("pad_token_id", "bos_token_id", "eos_token_id")},
    "hidden_act": "situ", "mla_use_output_gate": True, "latent_moe_use_norm": True, "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0, "mla_use_nope": True,
}
_K3_PACKED = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": {
        "format": "mxfp4-pack-quantized", "targets": ["Linear"],
        "weights": {
            "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
        },
    }},
    "ignore": [
        "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*"
    ],
}
_K3_GATES = (
    *linear("g_proj", "ssm_g", f"{_INNER},hidden"),
    # As long as a head; only as many as there are heads are read.
    tensor("A_log", "ssm_a", _SIZE, gguf_dims=(_HEADS,), value="minus_exp", cut=f"{_SIZE}-{_HEADS}"),
)


def _product(hf: str, gguf: str) -> tuple[TensorRow, ...]:
    """A norm and a projection to one value, which are only used as their product."""
    names = (f"{hf}_norm.weight", f"{hf}_proj.weight")
    return (TensorRow(names, (f"{gguf}.weight",), ("hidden", "1,hidden"), gguf_dims=("hidden",), value=PRODUCT),)


def _latent_experts() -> tuple[TensorRow, ...]:
    """Experts that read and give fewer values than the network has."""
    hf, down, up, names = "block_sparse_moe.", f"{_LATENT},hidden", f"hidden,{_LATENT}", ("w1", "w3", "w2")
    experts_hf = f"{hf}experts.{{e}}."
    in_floats = experts(experts_hf, names, layers="moe")
    return (
        *linear(f"{hf}routed_expert_down_proj", "ffn_routed_down", down, layers="moe"),
        *linear(f"{hf}routed_expert_up_proj", "ffn_routed_up", up, layers="moe"),
        *norm(f"{hf}routed_expert_norm", "ffn_routed_norm", _LATENT, need="latent_moe_use_norm", layers="moe"),
        *packed_experts(experts_hf, names, ("weight_packed", "weight_scale"), "mxfp4", width=_LATENT, layers="moe"),
        *(replace(row, dims=(row.dims[0].replace("hidden", _LATENT),)) for row in in_floats),
    )


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="kimi_linear", gguf="kimi-linear", **hf_names("KimiLinear", "kimi_linear"),
        required={**MLA_REQUIRED, "expert_gating_func": "", "kda.head_dim": "", "ssm.conv_kernel": ""}, gguf_only=(),
        tensors=moe_decoder(
            *delta_attention(
                *low_rank("f"), *low_rank("g"), tensor("A_log", "ssm_a", f"1,1,{_HEADS},1", value="minus_exp")
            ),
            *_MLA, *_MOE, *experts("block_sparse_moe.experts.{e}.", ("w1", "w3", "w2"), layers="moe"),
        ),
        keys=(
            *_SIZES, Key("attention.q_lora_rank", ("q_lora_rank",), converter=no_low_rank),
            Key("attention.value_length", ("head_dim",), field="head_dim"), must_be("moe_renormalize", True),
            must_be("attention_bias", False), SILU,
        ),
        head_always=True,
        defaults={"": _DEFAULTS},
    ),
    Architecture(
        id="kimi_k3",
        required={
            **MLA_REQUIRED, "expert_gating_func": "", "kda.head_dim": "", "ssm.conv_kernel": "",
            "attn_res.block_size": "", "activation.situ_beta": "", "activation.situ_linear_beta": "",
        },
        gguf="kimi-k3", **class_names("KimiK3ForConditionalGeneration", types=("kimi_k3",)),
        inside=("text_config", "kimi_linear"), packed_config=_K3_PACKED, gguf_only=(),
        prefixes=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
        tensors=tuple(
            replace(row, hf=tuple(f"language_model.{name}" for name in row.hf))
            for row in (
                *moe_decoder(
                    *_product("self_attention_res", "attn_res_score"), *_product("mlp_res", "ffn_res_score"),
                    *delta_attention(*low_rank("f"), *_K3_GATES), *_MLA,
                    *linear(
                        "self_attn.g_proj", "attn_gate", "heads*v_head_dim,hidden", need="mla_use_output_gate",
                        layers=_ATTENTION,
                    ),
                    *_MOE, *_latent_experts(),
                ),
                *_product("model.output_attn_res", "output_res_score"),
            )
        ),
        keys=(
            *(key for key in _SIZES if key.converter is not kda_config), Key("attention.q_lora_rank", ("q_lora_rank",)),
            Key("attention.value_length", converter=mla_value_width),
            Key("expert_weights_norm", ("moe_renormalize",), "bool"), Key("expert_latent_length", (_LATENT,)),
            Key("kda.gate_lower_bound", ("linear_lower_bound", "linear_attn_config.gate_lower_bound"), "f32"),
            Key("activation.situ_beta", ("activation_situ_beta",), "f32"),
            Key("activation.situ_linear_beta", ("activation_situ_linear_beta",), "f32"),
            Key("attn_res.block_size", ("attn_res_block_size",)), Key("", ("linear_attn_config",), converter=k3_config),
            flag("mla_use_output_gate"), flag("latent_moe_use_norm"), must_be("attention_bias", False),
            must_be("hidden_act", "situ"),
        ),
        head_always=True,
        defaults={"": _K3_DEFAULTS},
    ),
)
