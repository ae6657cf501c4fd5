"""Llama 4."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    ROPE_DIM, VOCAB, attention, class_names, experts, gated_mlp, linear, must_be, rename, split, tensor,
)
from aprfmt.arch.blocks.moe import NO_BIAS, WIDTH, moe_decoder, moe_keys, shared_expert
from aprfmt.arch.converter import Converter, Scope, implied, refuse_if
from aprfmt.arch.converters.windows import every_fourth_full, fourth_full_to_gguf
from aprfmt.arch.families.llama import every_fourth
from aprfmt.arch.row import Architecture, Key, TensorRow


def _is_unstepped(value: object, scope: Scope) -> bool:
    step, n_layers = scope.size("interleave_moe_layer_step") or 1, scope.h.num_layers or 0
    return isinstance(value, list) and value != list(range(step - 1, n_layers, step))


_BARE_EXPERTS = 128
"""Number of experts of the Llama 4 whose Q and K llama.cpp does not normalize."""


stepped_moe_layers = Converter(
    refuse_if(
        _is_unstepped,
        "{name} does not match interleave_moe_layer_step, by which llama.cpp's {gguf} finds the MoE layers",
    ),
)
not_of_128_experts = implied(
    lambda scope: scope.h.num_experts != _BARE_EXPERTS,
    f"{{name}} is {{value}}: llama.cpp's {{gguf}} norms Q and K unless the model has {_BARE_EXPERTS} experts",
)
_FOURTH = Key("", ("layer_types",), "str[]", converter=every_fourth_full)


def _llama4_experts() -> tuple[TensorRow, ...]:
    """Gate and up side by side, as [experts, in, out]."""
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
        *experts("feed_forward.experts.{e}.", layers="moe"),  # as llm-compressor writes them
        *shared_expert("feed_forward.shared_expert", "moe_ffn", layers="moe"),
        *gated_mlp(hf="feed_forward", layers="dense"),
    )


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="llama4_text", gguf="llama4",
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
            replace(_FOURTH, converter=Converter(fourth_full_to_gguf, lambda value, scope: None)),
            Key("", ("use_qk_norm",), "bool", converter=not_of_128_experts),
            must_be("attention_chunk_size", 8192), Key("", ("attn_temperature_tuning",), "bool", allowed=(True, 4)),
            must_be("floor_scale", 8192), must_be("attn_scale", 0.1),
        ),
    ),
)
