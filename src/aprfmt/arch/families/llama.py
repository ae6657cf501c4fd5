"""Llama and variants of it."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DECODER, LLAMA_KEYS, PAD, SILU, attention, class_names, decoder, flag, gated_mlp, hf_names, must_be, norm,
    plain_mlp,
)
from aprfmt.arch.blocks.encoder import ENCODER
from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing, refuse_if
from aprfmt.arch.converters.common import is_list
from aprfmt.arch.converters.heads import pooling
from aprfmt.arch.row import REQUIRED, Architecture, Difference, Key, TensorRow


_STEP = 4
"""llama.cpp's SmolLM3 leaves every fourth layer unrotated, whatever a file says."""


def _rotated(n_layers: int, step: int) -> list[int]:
    return [int((i + 1) % step != 0) for i in range(n_layers)]


def _rotated_derive(scope: Scope) -> list[int]:
    step = scope.h.extra.get("no_rope_layer_interval")
    return _rotated(scope.h.num_layers or 0, step if isinstance(step, int) and step > 0 else _STEP)


every_fourth = Converter(
    refuse_if(
        lambda value, scope: isinstance(value, list) and [*map(int, map(bool, value))] != _rotated(len(value), _STEP),
        "{name}: llama.cpp's {gguf} skips RoPE in exactly every fourth layer",
    ),
    lambda value, scope: _rotated_derive(scope), _rotated_derive,
)
_IMAGE_TOKENS = ("IMGIMG", "<image>")


def _image_tokens(value: object, scope: Scope) -> object:
    """Chameleon's image tokens and their ids, which the class needs and a GGUF stores with its vocabulary."""
    tokens = scope.kv.get("tokenizer.ggml.tokens")
    if not scope.kv:
        return DEFAULT
    listed = tokens if is_list(tokens) else ()
    return {str(token): i for i, token in enumerate(listed) if str(token).startswith(_IMAGE_TOKENS)}


image_tokens = Converter(nothing, _image_tokens)
pooling_avg = replace(pooling, normalize=lambda value, scope: "mean" if value == "avg" else DEFAULT)
_BIASES = (flag("attention_bias"), flag("mlp_bias"))
_NO_BIASES = (must_be("attention_bias", False), must_be("mlp_bias", False))
_BIASED = decoder(*attention("attention_bias", "attention_bias", permuted=True), mlp=gated_mlp("mlp_bias"))


def _head_norms(side: str, heads: str) -> tuple[TensorRow, ...]:
    """A norm with bias per head, whose values follow the rotary order of the head."""
    rows = norm(f"self_attn.{side}_norm", f"attn_{side}_norm", f"{heads},head_dim", REQUIRED)
    order = (f"swap:{heads},2,head_dim/2",)
    return tuple(replace(row, dims=(f"{heads},head_dim",), order=order, flat=True) for row in rows)


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="llama", gguf="llama",
        **class_names(
            "LlamaForCausalLM", "LLaMAForCausalLM", "VLlama3ForCausalLM", "InternLM3ForCausalLM",
            "IQuestCoderForCausalLM", "TeleChat3ForCausalLM", "LlamaModel", "Emu3ForCausalLM", "Emu3TextModel",
            types=("llama", "smollm", "smollm2", "internlm3", "iquestcoder", "telechat3", "emu3_text_model"),
            bare=("LlamaModel", "Emu3TextModel"),
        ),
        rope_type=0,
        tensors=_BIASED, keys=(*LLAMA_KEYS, SILU, *_BIASES, Key("", ("clip_qkv",), "f32")),
        differs=(Difference("llama.cpp's llama does not clip Q, K and V (clip_qkv)", "clip_qkv"),),
    ),
    Architecture(
        id="llama_bidirec", gguf="llama-embed",
        **class_names("LlamaBidirectionalModel", types=("llama_bidirec",), bare=("LlamaBidirectionalModel",)),
        rope_type=0,
        tensors=_BIASED, keys=(*LLAMA_KEYS, ENCODER[0], replace(ENCODER[1], converter=pooling_avg), SILU, *_BIASES),
    ),
    Architecture(
        id="arcee", gguf="arcee", **hf_names("Arcee", "arcee"), rope_type=0,
        tensors=decoder(
            *attention("attention_bias", "attention_bias", permuted=True),
            mlp=plain_mlp("mlp_bias", "mlp.up_proj", "mlp.down_proj"),
        ),
        keys=(*LLAMA_KEYS, must_be("hidden_act", "relu2"), *_NO_BIASES),
    ),
    Architecture(
        id="smollm3", gguf="smollm3", **hf_names("SmolLM3", "smollm3"), rope_type=0,
        tensors=_BIASED,
        keys=(
            *LLAMA_KEYS, SILU, PAD, *_NO_BIASES, Key("", ("no_rope_layers",), "i32[]", converter=every_fourth),
            Key("", ("no_rope_layer_interval",)), must_be("use_sliding_window", False), Key("", ("sliding_window",)),
            Key("", ("layer_types",), "str"),
        ),
    ),
    Architecture(
        id="chameleon", gguf="chameleon",
        **class_names(
            "ChameleonForConditionalGeneration", "ChameleonForCausalLM", "ChameleonModel", types=("chameleon",),
            bare=("ChameleonModel",),
        ),
        rope_type=0,
        tensors=decoder(
            *attention("attention_bias", "attention_bias", permuted=True), *_head_norms("q", "heads"),
            *_head_norms("k", "kv_heads"), mlp=gated_mlp("mlp_bias"),
        ),
        keys=(
            *DECODER, Key("swin_norm", ("swin_norm",), "bool"), Key("", ("vocabulary_map",), converter=image_tokens),
            Key("", ("vq_config",)), SILU, *_NO_BIASES,
        ),
        differs=(
            Difference("llama.cpp feeds the MLP the attention output without the residual (swin_norm)", "swin_norm"),
        ),
    ),
)
