"""Rows of the architecture table: MiniMax's lightning attention, with full attention in every few layers."""

from __future__ import annotations

from aprfmt.arch.converter import Converter, Scope
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import Architecture, Key
from aprfmt.arch.rows.parts import ROPE_DIM, attention, class_names, experts, linear, must_be, norm
from aprfmt.arch.rows.parts_moe import moe_decoder, moe_keys
from aprfmt.errors import RefusedError


_EIGHTH = 8
"""MiniMax's runtime takes each eighth layer for one of full attention where a file does not say it."""


def _lightning_layers_to(value: object, scope: Scope) -> list[bool] | None:
    if not isinstance(value, list):
        return None
    recurrent = [not mark for mark in value]
    return None if recurrent == [bool((i + 1) % _EIGHTH) for i in range(len(value))] else recurrent


def _lightning_layers_from(value: object, scope: Scope) -> object:
    if isinstance(value, list):
        return [int(not flag) for flag in value]
    period = as_int(scope.gguf("full_attention_interval"), "full_attention_interval") or _EIGHTH
    return [int((i + 1) % period == 0) for i in range(scope.h.num_layers or 0)]


def _same_alpha_to(value: object, scope: Scope) -> None:
    if value != scope.h.extra.get("layernorm_full_attention_alpha"):
        raise RefusedError(f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} scales every residual alike")


one_alpha = Converter()
same_alpha = Converter(_same_alpha_to, lambda value, scope: scope.h.extra.get("layernorm_full_attention_alpha"))
lightning_layers = Converter(_lightning_layers_to, _lightning_layers_from)

_LIGHTNING, _ATTENTION = "linear_attention", "full_attention"
_SCALES = ("layernorm_full_attention", "layernorm_linear_attention", "layernorm_mlp")

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="minimax_text_01", gguf="minimax-01",
        **class_names("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM", types=("minimax_text_01", "minimax_m1")),
        required={"residual_scale": ""},
        tensors=moe_decoder(
            *linear("self_attn.qkv_proj", "attn_qkv", "3*q,hidden", layers=_LIGHTNING),
            *norm("self_attn.norm", "attn_norm_2", "q", layers=_LIGHTNING),
            *linear("self_attn.output_gate", "attn_gate", "q,hidden", layers=_LIGHTNING),
            *linear("self_attn.out_proj", "attn_output", "hidden,q", layers=_LIGHTNING), *attention(layers=_ATTENTION),
            *linear("block_sparse_moe.gate", "ffn_gate_inp", "experts,hidden"),
            *experts("block_sparse_moe.experts.{e}.", ("w1", "w3", "w2")),
        ),
        keys=(
            *moe_keys(count="num_local_experts"),
            Key("residual_scale", (f"{_SCALES[0]}_alpha",), "f32", converter=one_alpha),
            *(Key("", (f"{name}_alpha",), "f32", converter=same_alpha) for name in _SCALES[1:]),
            *(must_be(f"{name}_beta", 1.0) for name in _SCALES), ROPE_DIM,
            Key("attention.recurrent_layers", ("attn_type_list",), "bool[]", converter=lightning_layers),
            must_be("postnorm", True), must_be("shared_intermediate_size", 0),
        ),
        defaults={
            "": {f"{name}_{end}": 1.0 for name in _SCALES for end in ("alpha", "beta")}
            | {"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "postnorm": False,
               "shared_intermediate_size": 0, "num_local_experts": 8, "num_experts_per_tok": 2}
        },
    ),
)
