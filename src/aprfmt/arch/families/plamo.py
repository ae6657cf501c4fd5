"""PLaMo."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DECODER, DIMS, HEAD_DIM, KV_HEADS_BY_LAYER, NO_WINDOW, RMS_EPS, ROPE, SILU, VOCAB, WINDOW, class_names, gated_mlp,
    hf_names, linear, must_be, network, norm, rename, tensor,
)
from aprfmt.arch.blocks.ssm import mixer
from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.converters.common import computed, largest
from aprfmt.arch.converters.hybrid import attending, hybrid_kinds
from aprfmt.arch.grammar import layer_kinds
from aprfmt.arch.row import Architecture, Key, TensorRow
from aprfmt.errors import CorruptError
from aprfmt.text import first_few


def _mamba_step_from_gguf(value: object, scope: Scope) -> object:
    """The shortest distance between attention layers."""
    found, n_layers = attending(scope), scope.h.num_layers
    if found is None or not n_layers:
        return DEFAULT
    for step in range(2, 2 * n_layers + 1):
        if layer_kinds({"mamba_step": step}, n_layers) == hybrid_kinds(found, n_layers):
            return step
    raise CorruptError(
        f"{scope.row.gguf}.attention.head_count_kv: the attention layers {first_few(found)} are not evenly spaced"
    )


def _least_rank(scope: Scope) -> int | None:
    """PLaMo 2's rank: a sixteenth of the hidden size, but at least 64."""
    return max(64, scope.h.hidden_size // 16) if scope.h.hidden_size else None


period_of_window = Converter(lambda value, scope: value if scope.config("window_size") else None)
mamba_step = Converter(nothing, _mamba_step_from_gguf)
most = Converter(from_gguf=largest)
_BLOCKS, _CONTEXT, _WIDTH, _FFN, _HEADS = DIMS
_QKV = "q+2*kv,hidden"


def _layers(*mixer: TensorRow) -> tuple[TensorRow, ...]:
    """Norms before and after the mixer and the MLP; constants are added to their weights."""
    return network(
        *norm("pre_mixer_norm", "attn_norm", value="plus_one"), *mixer,
        tensor("post_mixer_norm.weight", "post_attention_norm", "hidden", value="plus_fifth"),
        *norm("pre_mlp_norm", "ffn_norm", value="plus_one"), *linear("mlp.gate_up_proj", "ffn_up", "2*ffn,hidden"),
        *linear("mlp.down_proj", "ffn_down", "hidden,ffn"),
        tensor("post_mlp_norm.weight", "post_ffw_norm", "hidden", value="plus_root_of_125th"),
        hf="model.layers.layers.{n}.", norm_value="plus_one",
    )


_SSM, _ATTENTION = "linear_attention", "full_attention"
_COUNT, _STATE, _RANK = "mamba_num_heads", "mamba_d_state", "mamba_dt_rank"
_INNER = f"{_COUNT}*head_dim"
_MAMBA = (
    *linear("in_proj", "ssm_in", f"2*{_INNER},hidden"),
    tensor("conv1d.weight", "ssm_conv1d.weight", f"{_INNER},1,mamba_d_conv", gguf_dims=(f"{_INNER},mamba_d_conv",)),
    *linear("bcdt_proj", "ssm_x", f"{_RANK}+2*{_STATE},{_INNER}"), *linear("dt_proj", "ssm_dt", f"{_COUNT},{_RANK}"),
    tensor("dt_bias", "ssm_dt.bias", _COUNT), tensor("A_log", "ssm_a", _COUNT, value="minus_exp"),
    tensor("D", "ssm_d", _COUNT), tensor("dt_norm_weight", "ssm_dt_norm", _RANK),
    tensor("B_norm_weight", "ssm_b_norm", _STATE), tensor("C_norm_weight", "ssm_c_norm", _STATE),
    *linear("out_proj", "ssm_out", f"hidden,{_INNER}"),
)


def _unshared(value: object, scope: Scope) -> object:
    """Key-value heads that each serve `n_shared_head` heads."""
    heads, shared = scope.h.num_heads, scope.size("n_shared_head")
    return -(-heads // shared) if heads and shared else DEFAULT


def _shared_from_gguf(value: object, scope: Scope) -> object:
    heads, kv_heads = scope.h.num_heads, scope.h.num_kv_heads
    return heads // kv_heads if scope.kv and heads and kv_heads else DEFAULT


# Each KV head serves every `heads/n_shared_head`-th head, in llama.cpp as many neighbours.
_NEIGHBOURS = ("swap:1,n_shared_head,heads/n_shared_head",)

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="plamo2", gguf="plamo2", **class_names("Plamo2ForCausalLM", "PLaMo2ForCausalLM", types=("plamo2",)),
        tensors=_layers(
            *mixer("mixer.", _MAMBA, _SSM), *linear("mixer.qkv_proj", "attn_qkv", _QKV, layers=_ATTENTION),
            tensor("mixer.q_weight", "attn_q_norm.weight", "heads,head_dim", layers=_ATTENTION),
            tensor("mixer.k_weight", "attn_k_norm.weight", "kv_heads,head_dim", layers=_ATTENTION),
            *linear("mixer.o_proj", "attn_output", "hidden,q", layers=_ATTENTION),
        ),
        keys=(
            VOCAB, _BLOCKS, replace(_HEADS, kind="u32[]", converter=most), KV_HEADS_BY_LAYER, _CONTEXT, _WIDTH,
            *rename((HEAD_DIM,), head_dim="hidden_size_per_head"), RMS_EPS, ROPE, Key("ssm.state_size", (_STATE,)),
            Key("ssm.conv_kernel", ("mamba_d_conv",)), Key("ssm.time_step_rank", (_COUNT,)),
            Key("ssm.inner_size", converter=computed("mamba_num_heads*head_dim")), Key("ssm.group_count", constant=0),
            _FFN, Key("", (_RANK,), converter=Converter(derive=_least_rank)),
            Key("", ("mamba_step",), converter=mamba_step), Key("", ("attention_window_size",)),
            Key("", ("full_attention_idx",), "i32[]"), must_be("mamba_enabled", True),
        ),
        differs=(NO_WINDOW,),
    ),
    Architecture(
        id="plamo3", gguf="plamo3", **class_names("Plamo3ForCausalLM", "PLaMo3ForCausalLM", types=("plamo3",)),
        nested_rope=True,
        tensors=_layers(
            *linear("mixer.qkv_proj", "attn_qkv", _QKV),
            *norm("mixer.q_norm", "attn_q_norm", "head_dim", value="plus_one"),
            *norm("mixer.k_norm", "attn_k_norm", "head_dim", value="plus_one"),
            *linear("mixer.o_proj", "attn_output", "hidden,q"),
        ),
        keys=(
            *DECODER, VOCAB, replace(WINDOW, hf=("window_size", "sliding_window")),
            Key("attention.sliding_window_pattern", ("sliding_window_pattern",), converter=period_of_window),
            must_be("rope_scaling_factor", 1),
        ),
    ),
    # As in pfnet/plamo-13b, whose config states no context length.
    Architecture(
        id="plamo", gguf="plamo", **hf_names("Plamo", "plamo"),
        tensors=network(
            *norm("norm", "attn_norm"), *linear("self_attn.q_proj", "attn_q", "hidden,hidden", order=_NEIGHBOURS),
            *linear("self_attn.k_proj", "attn_k", "kv,hidden"), *linear("self_attn.v_proj", "attn_v", "kv,hidden"),
            *linear("self_attn.o_proj", "attn_output", "hidden,hidden", columns=_NEIGHBOURS), *gated_mlp(),
            hf="model.layers.layers.{n}.",
        ),
        keys=(
            *DIMS, Key("attention.head_count_kv", field="num_kv_heads", converter=Converter(normalize=_unshared)),
            Key("", ("n_shared_head",), converter=Converter(from_gguf=_shared_from_gguf)), RMS_EPS, SILU,
        ),
    ),
)
