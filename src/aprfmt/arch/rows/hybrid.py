"""Rows of the architecture table: decoders that mix attention with state-space layers or short convolutions."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converters.layers import LINEAR
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope, default, nothing
from aprfmt.arch.converters.common import ATTENTION, attention_layers, expand
from aprfmt.arch.converters.layers import FULL, SLIDING
from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.grammar import layer_kinds
from aprfmt.arch.row import REQUIRED, Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DIMS, EXPERTS, GROUPED, RMS_EPS, ROPE, ROPE_DIM, SCALES, SILU, VOCAB, More, attention, block, class_names,
    embedding, experts, flag, fused_experts, gated_mlp, head, linear, must_be, network, norm, split, tensor,
)
from aprfmt.arch.rows.parts_encoder import ENCODER
from aprfmt.arch.rows.parts_ssm import dual, mixer
from aprfmt.errors import CorruptError, RefusedError


def _as_wide_from(value: object, scope: Scope) -> int | None:
    return scope.h.hidden_size if scope.gguf("embedding_length_out") else None


as_wide = Converter(nothing, _as_wide_from)


def _some_conv_to(value: object, scope: Scope) -> None:
    """The runtime's memory of a hybrid asserts that both kinds of layers are there."""
    kinds = layer_kinds(scope.h.extra, scope.h.num_layers)
    if kinds and len({kind in ATTENTION for kind in kinds}) == 1:
        raise RefusedError(
            f"all layers are of one kind, {kinds[0]}: llama.cpp's {scope.row.gguf} loads networks that mix attention "
            "and convolutions only"
        )


def _mixed_from(value: object, scope: Scope) -> object:
    """Kinds of layers by their KV heads: a layer without any has what the family has beside attention."""
    heads = scope.gguf("attention.head_count_kv")
    if heads is None:
        return DEFAULT
    if not isinstance(heads, list):
        heads = [heads] * (scope.h.num_layers or 0)
    sees = SLIDING if scope.gguf("attention.sliding_window") else FULL
    return [sees if n else _other(scope) for n in heads]


def _other(scope: Scope) -> str:
    return "conv" if any(row.layers == "conv" for row in scope.row.tensors) else LINEAR


def _mixed_derive(scope: Scope) -> list[str] | None:
    """By the indices of the layers that have attention, as older configs list them; else all have it."""
    n_layers, h = scope.h.num_layers, scope.h
    if n_layers is None:
        return None
    listed = h.extra.get("full_attn_idxs")
    indices = range(n_layers) if listed is None else listed
    if not isinstance(indices, range | list):
        raise CorruptError("full_attn_idxs is not a list")
    return [FULL if i in indices else _other(scope) for i in range(n_layers)]


def _lone_width_to(value: object, scope: Scope) -> object:
    """Width of the dense MLP; of a network without experts that is the shared expert's."""
    return value if scope.h.num_experts else scope.h.extra.get("shared_intermediate_size", value)


def _rope_switch_to(value: object, scope: Scope) -> bool:
    if value not in (None, "rope", "nope"):
        raise RefusedError(f"a GGUF cannot have position_embedding_type {value!r:.40}")
    return bool(value == "rope")


def _lfm2_width(value: object, scope: Scope) -> object:
    """LFM2 as it is held: the width that the MLP really has, with nothing left to adjust."""
    width, extra = as_int(value, scope.name), scope.h.extra
    if width is None or not extra.get("block_auto_adjust_ff_dim"):
        return DEFAULT
    width = 2 * width // 3
    if (factor := as_float(extra.get("block_ffn_dim_multiplier"), "block_ffn_dim_multiplier")) is not None:
        width = int(factor * width)
    multiple = as_int(extra.get("block_multiple_of"), "block_multiple_of") or 1
    return ConfigKeys({scope.name: -(-width // multiple) * multiple, "block_auto_adjust_ff_dim": False})


some_conv = Converter(_some_conv_to, default)
lfm2_width = Converter(normalize=_lfm2_width)
never_adjusted = Converter(nothing, lambda value, scope: False)
mixed_layers = Converter(nothing, _mixed_from, _mixed_derive)
lone_width = Converter(_lone_width_to)
some_experts = Converter(from_gguf=lambda value, scope: value or 0)
# The runtime refuses more used experts than there are.
used_experts = Converter(lambda value, scope: value if scope.h.num_experts else None)
rope_switch = Converter(_rope_switch_to, lambda value, scope: "rope" if value else None)

_BLOCKS, _CONTEXT, _WIDTH, _FFN, _HEADS = DIMS
_SSM, _ATTENTION = "linear_attention|mamba", "full_attention|attention"
_CONV = "conv_L_cache"


def _short_conv() -> tuple[TensorRow, ...]:
    """The conv layers of LFM2: three projections of the input, a gated convolution over a few tokens."""
    at, bias = More(layers="conv"), "conv_bias"
    return (
        tensor("conv.conv.weight", "shortconv.conv.weight", f"hidden,1,{_CONV}", gguf_dims=(f"hidden,{_CONV}",), **at),
        tensor("conv.conv.bias", "shortconv.conv.bias", "hidden", bias, **at),
        *linear("conv.in_proj", "shortconv.in_proj", "3*hidden,hidden", bias, **at),
        *linear("conv.out_proj", "shortconv.out_proj", "hidden,hidden", bias, **at),
    )


def _lfm2(*mlp: TensorRow, begin: str = "model.") -> tuple[TensorRow, ...]:
    return (
        embedding(f"{begin}embed_tokens"), *norm(f"{begin}embedding_norm", "token_embd_norm"),
        *block(
            *norm("operator_norm", "attn_norm"), *_short_conv(), *attention(o_proj="out_proj", layers="!conv"),
            *norm("self_attn.q_layernorm", "attn_q_norm", "head_dim", layers="!conv"),
            *norm("self_attn.k_layernorm", "attn_k_norm", "head_dim", layers="!conv"), *norm("ffn_norm", "ffn_norm"),
            *mlp,
            hf=f"{begin}layers.{{n}}.",
        ),
        *head(),
    )


_SOME_HEADS = replace(GROUPED, kind="i32[]", converter=attention_layers)
"""KV heads by layer, 0 where a layer has no attention: that is how a GGUF tells the kinds of layers."""
_KINDS = Key("", ("layer_types",), converter=mixed_layers)
_LFM2_EPS = replace(RMS_EPS, hf=("norm_eps",))
_LFM2_END = (VOCAB, Key("shortconv.l_cache", (_CONV,)), must_be("conv_bias", False), Key("", converter=some_conv))
_LFM2 = {
    "max_position_embeddings": 128000, "norm_eps": 1e-5, "num_key_value_heads": 8, "conv_L_cache": 3,
    "conv_bias": False, "rope_theta": 1e6, "tie_word_embeddings": True,
}

_GRANITE_SHARED = (
    split(
        "shared_mlp.input_linear.weight", "2*shared_intermediate_size,hidden",
        dict.fromkeys(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), "shared_intermediate_size,hidden"),
    ),
    *linear("shared_mlp.output_linear", "ffn_down_shexp", "hidden,shared_intermediate_size"),
)


def _granite_mlp() -> tuple[TensorRow, ...]:
    """Routed experts beside a shared one; a network without experts has the shared one as its MLP."""
    lone = (replace(row, gguf=tuple(n.replace("_shexp", "") for n in row.gguf)) for row in _GRANITE_SHARED)
    return (
        *linear("block_sparse_moe.router.layer", "ffn_gate_inp", "experts,hidden", layers="moe"),
        *fused_experts("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight", layers="moe"),
        *(replace(row, layers="moe") for row in _GRANITE_SHARED), *(replace(row, layers="dense") for row in lone),
    )


_MAMBA_D = ("mamba_expand*hidden", "mamba_d_state")
_GRANITE_MIXER = dual(
    *_MAMBA_D, "mamba_n_heads", "mamba_n_groups", "mamba_d_conv", "mamba_proj_bias", "mamba_conv_bias"
)


_GRANITE = Architecture(
    id="granitemoehybrid", required={"attention.head_count_kv": ""}, gguf="granitehybrid",
    when="logit_scale|embedding_scale",  # Bamba has none
    **class_names("GraniteMoeHybridForCausalLM", types=("granitemoehybrid",)), rope_type=0,
    tensors=network(
        *norm("input_layernorm", "attn_norm"), *mixer("mamba.", _GRANITE_MIXER, _SSM),
        *attention("attention_bias", "attention_bias", permuted=True, layers=_ATTENTION),
        *norm("post_attention_layernorm", "ffn_norm"), *_granite_mlp(),
    ),
    keys=(
        _BLOCKS, _CONTEXT, _WIDTH, replace(_FFN, converter=lone_width), _HEADS, _SOME_HEADS, ROPE, RMS_EPS,
        replace(EXPERTS[0], hf=("num_local_experts",), converter=some_experts),
        replace(EXPERTS[1], converter=used_experts),
        VOCAB, ROPE_DIM, *SCALES, Key("expert_shared_feed_forward_length", ("shared_intermediate_size",)),
        Key("ssm.conv_kernel", ("mamba_d_conv",)), Key("ssm.state_size", ("mamba_d_state",)),
        Key("ssm.group_count", ("mamba_n_groups",)),
        Key("ssm.inner_size", ("mamba_expand",), converter=expand, allowed=(2,)),
        Key("ssm.time_step_rank", ("mamba_n_heads",)),
        Key("rope.scaling.finetuned", ("position_embedding_type",), "bool", converter=rope_switch), _KINDS, SILU,
        flag("attention_bias"), must_be("mamba_proj_bias", False), must_be("mamba_conv_bias", True),
    ),
    defaults={"": {
        "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "attention_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
        "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
        "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_conv_bias": True, "mamba_proj_bias": False,
    }},
)


_LFM2_MLP = gated_mlp(hf="feed_forward", names=("w1", "w3", "w2"))
_LFM2_ROW = Architecture(
    id="lfm2", required={"attention.head_count_kv": ""}, gguf="lfm2",
    **class_names("Lfm2ForCausalLM", "LFM2ForCausalLM", "Lfm2Model", types=("lfm2",), bare=("Lfm2Model",)),
    tensors=(
        *_lfm2(*_LFM2_MLP), tensor("1_Dense.linear.weight", "dense_2.weight", "dense_1_out,hidden", "dense_1_out"),
        tensor("1_Dense.linear.bias", "dense_2.bias", "dense_1_out", "dense_1_bias"),
    ),
    keys=(
        _BLOCKS, _CONTEXT, _WIDTH, replace(_FFN, hf=("intermediate_size", "block_ff_dim"), converter=lfm2_width),
        _HEADS,
        _SOME_HEADS, ROPE, _LFM2_EPS, *_LFM2_END, _KINDS, ENCODER[1], Key("embedding_length_out", ("dense_1_out",)),
        Key("", ("dense_1_in",), converter=as_wide), Key("", ("dense_1_bias",), "bool"),
        Key("", ("block_auto_adjust_ff_dim",), "bool", converter=never_adjusted), Key("", ("full_attn_idxs",)),
        Key("", ("block_ffn_dim_multiplier",), "f32"), Key("", ("block_multiple_of",)),
    ),
    defaults={
        "": _LFM2 | {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
    },
)

ROWS: tuple[Architecture, ...] = (
    _LFM2_ROW,
    replace(
        _LFM2_ROW, id="lfm2_bidirectional", hf_class="Lfm2BidirectionalModel",
        hf_classes=("Lfm2BidirectionalModel", "Lfm2BidirectionalForMaskedLM"), bare_classes=("Lfm2BidirectionalModel",),
        prefixes=(("lfm2.", "model."),), model_types=(), when="attention.causal=False",
        keys=(*_LFM2_ROW.keys, ENCODER[0]),
    ),
    replace(
        _LFM2_ROW, id="lfm2_audio_tokenizer", hf_class="Lfm25AudioTokenizer", hf_classes=("Lfm25AudioTokenizer",),
        bare_classes=("Lfm25AudioTokenizer",), model_types=(), when="attention.sliding_window",
        ignored=("istft.window",),
        tensors=(*_lfm2(*_LFM2_MLP, begin="lfm."), *linear("lin", "dense_2", "output_size,hidden", REQUIRED)),
        keys=(
            *(key for key in _LFM2_ROW.keys if not key.gguf.startswith("embedding_length_out")),
            Key("attention.sliding_window", ("sliding_window",)), Key("embedding_length_out", ("output_size",)),
        ),
    ),
    Architecture(
        id="lfm2_moe", required={"expert_gating_func": "", "attention.head_count_kv": ""}, gguf="lfm2moe",
        **class_names("Lfm2MoeForCausalLM", types=("lfm2_moe",)),
        tensors=_lfm2(
            *gated_mlp(hf="feed_forward", names=("w1", "w3", "w2"), layers="dense"),
            *linear("feed_forward.gate", "ffn_gate_inp", "experts,hidden", layers="moe"),
            tensor("feed_forward.expert_bias", "exp_probs_b.bias", "experts", "use_expert_bias", layers="moe"),
            *experts("feed_forward.experts.{e}.", ("w1", "w3", "w2"), layers="moe"),
        ),
        keys=(
            *DIMS, _SOME_HEADS, ROPE, _LFM2_EPS, *EXPERTS, Key("leading_dense_block_count", ("num_dense_layers",)),
            Key("expert_gating_func", constant=2), *_LFM2_END, _KINDS, must_be("use_expert_bias", True),
            must_be("norm_topk_prob", True), must_be("routed_scaling_factor", 1.0),
        ),
        defaults={"": {
            **_LFM2, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792,
        }},
    ),
    _GRANITE,
    replace(
        _GRANITE, id="granite4", required={"logit_scale": ""}, gguf="granite",
        hf_when="layer_types&!layer_types=linear_attention&!layer_types=mamba",
        when="ssm.inner_size",  # GraniteForCausalLM has no such key
    ),
)
