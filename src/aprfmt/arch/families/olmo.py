"""OLMo."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DECODER, DIMS, GROUPED, HEAD_DIM, PAD, ROPE, SILU, SLIDING_LAYERS, WHOLE_HEADS, WINDOW, attention, block, embedding,
    gated_mlp, head, hf_names, must_be, post_norm_decoder, variant,
)
from aprfmt.arch.blocks.moe import EQUAL_HEADS, NO_BIAS, moe_decoder, moe_keys, router_and_experts
from aprfmt.arch.converter import Converter, refuse_if
from aprfmt.arch.row import Architecture, Difference, Key


clip = Converter(refuse_if(lambda value, scope: value == 0, "{name} is 0, which llama.cpp's {gguf} treats as no limit"))
_OLMO2 = Architecture(
    id="olmo2", gguf="olmo2", **hf_names("Olmo2", "olmo2"),
    tensors=post_norm_decoder(*attention("attention_bias", "attention_bias", qk_norm="q")),
    keys=(*DECODER, WHOLE_HEADS, PAD, SILU, must_be("attention_bias", False)),
)
_ONE_THETA = Difference("llama.cpp's olmo2 uses one rope_theta for sliding and full layers", "two_thetas")

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="olmo", gguf="olmo", **hf_names("Olmo", "olmo", "OLMo"), rope_type=0,
        tensors=(
            embedding(), *block(*attention("attention_bias", "attention_bias", permuted=True), *gated_mlp()), *head(),
        ),
        keys=(
            *DIMS, GROUPED, ROPE, HEAD_DIM, Key("attention.layer_norm_epsilon", (), "f32", constant=1e-5),
            Key("attention.clamp_kqv", ("clip_qkv",), "f32", converter=clip), SILU, PAD,
            must_be("attention_bias", False),
        ),
    ),
    replace(
        variant(
            _OLMO2, "olmo3", "olmo2", hf_names("Olmo3", "olmo3"), WINDOW, SLIDING_LAYERS,
            when="attention.sliding_window",
        ),
        differs=(_ONE_THETA,), nested_rope=True,
    ),
    _OLMO2,
    Architecture(
        id="olmoe", gguf="olmoe", **hf_names("Olmoe", "olmoe"),
        tensors=moe_decoder(*attention("attention_bias", "attention_bias", qk_norm="q"), *router_and_experts()),
        keys=moe_keys(
            NO_BIAS, EQUAL_HEADS, WHOLE_HEADS, Key("", ("clip_qkv",), "f32", converter=clip),
            must_be("norm_topk_prob", False),
        ),
        differs=(Difference("llama.cpp's olmoe does not clip Q, K and V (clip_qkv)", "clip_qkv"),),
    ),
)
