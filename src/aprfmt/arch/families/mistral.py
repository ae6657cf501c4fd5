"""Mistral, Ministral, Mixtral."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    LLAMA_KEYS, NO_WINDOW, PAD, ROPE_DIM, SILU, SLIDING_LAYERS, VOCAB, WINDOW, attention, block, decoder, hf_names,
    must_be, tensor, variant,
)
from aprfmt.arch.blocks.mla import mla_decoder, mla_keys
from aprfmt.arch.blocks.moe import mixtral_experts, moe_decoder, moe_keys
from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.converters.common import BETA, yarn_log
from aprfmt.arch.fields import as_float, as_int, from_f32
from aprfmt.arch.rope import original_context, scaling_of
from aprfmt.arch.row import OPTIONAL, Architecture, Key


def _temperature_from_gguf(value: object, scope: Scope) -> object:
    """transformers requires a temperature for Ministral 3: 0 has no effect."""
    original = "original_max_position_embeddings"
    scope.h.extra["rope_scaling"] = {
        "rope_type": "default", original: original_context(scope.h, scaling_of(scope.h)), **scaling_of(scope.h),
        BETA: from_f32(value, scope.key.gguf) or 0.0,
    }
    return DEFAULT


llama_4_scaling = Converter(
    lambda value, scope: as_float(scaling_of(scope.h).get(BETA), BETA) or None, _temperature_from_gguf,
)


_PLAIN = decoder(*attention(permuted=True))


def _temperature_length(value: object, scope: Scope) -> int | None:
    """The number of positions after which queries are scaled, if they are."""
    scaling = scaling_of(scope.h)
    key = "original_max_position_embeddings"
    return as_int(scaling.get(key), key) if scaling.get(BETA) else None


llama_4_length = Converter(_temperature_length, lambda value, scope: DEFAULT)
_MISTRAL = Architecture(
    # transformers' Llama requires heads that divide the hidden size
    id="mistral", gguf="llama", when="attention.sliding_window&!expert_count|uneven_heads&!expert_count",
    **hf_names("Mistral", "mistral"), rope_type=0,
    tensors=_PLAIN, keys=(*LLAMA_KEYS, SILU, WINDOW), differs=(NO_WINDOW,),
)

ROWS: tuple[Architecture, ...] = (
    variant(
        _MISTRAL, "ministral", "llama", hf_names("Ministral", "ministral"), SLIDING_LAYERS,
        when="attention.sliding_window&attention.sliding_window_pattern&!expert_count",
    ),
    # A Llama whose layers have windows; its GGUF is that of a Ministral.
    variant(
        _MISTRAL, "cwm", "llama", hf_names("Cwm", "cwm"), SLIDING_LAYERS, must_be("mlp_bias", False),
        must_be("attention_bias", False),
    ),
    _MISTRAL,
    # Mistral inside Mistral3, the wrapper
    replace(_MISTRAL, id="mistral3", gguf="mistral3", hf_classes=(), model_types=(), bare_classes=(), when=""),
    Architecture(
        id="ministral3", gguf="mistral3", when="attention.temperature_scale|rope.scaling.yarn_log_multiplier",
        **hf_names("Ministral3", "ministral3"), rope_type=0,
        tensors=_PLAIN,
        keys=(
            *LLAMA_KEYS, Key("rope.scaling.yarn_log_multiplier", (), "f32", converter=yarn_log),
            Key("attention.temperature_scale", (), "f32", converter=llama_4_scaling), SILU, PAD, WINDOW,
        ),
        differs=(NO_WINDOW,),
    ),
    Architecture(
        id="mixtral", gguf="llama", when="expert_count", **hf_names("Mixtral", "mixtral"), rope_type=0,
        tensors=moe_decoder(*attention(permuted=True), *mixtral_experts()),
        keys=moe_keys(VOCAB, ROPE_DIM, WINDOW, count="num_local_experts"), differs=(NO_WINDOW,),
    ),
    Architecture(
        id="mistral4", gguf="mistral4",
        **hf_names("Mistral4", "mistral4", "MistralLarge3"), rope_type=0,
        # All experts are in two tensors; Mistral's own layout has one per expert.
        tensors=(
            *sorted(mla_decoder(), key=lambda row: "{e}" in row.hf[0]),
            *block(  # as written by other programs
                tensor(
                    "mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight", "experts,2*moe_ffn,hidden", OPTIONAL,
                    layers="moe",
                )
            ),
        ),
        keys=(
            *(key for key in mla_keys() if key.gguf != "expert_gating_func"), Key("expert_gating_func", constant=1),
            Key("attention.temperature_scale", (), "f32", converter=llama_4_scaling),
            Key("attention.temperature_length", converter=llama_4_length, needed="attention.temperature_scale"),
            must_be("rope_interleave", True), PAD,
        ),
    ),
)
