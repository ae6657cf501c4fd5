"""Gemma 1 to 3 and EmbeddingGemma."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from aprfmt.arch.blocks.decoder import (
    ALWAYS_WINDOW, DECODER, attention, class_names, gated_mlp, hf_names, must_be, network, norm, tensor,
)
from aprfmt.arch.blocks.encoder import ENCODER
from aprfmt.arch.blocks.tower import (
    IMAGE, TOWER_WIDTH, USE_GELU, epsilon, layers, mlp, norms, patches, projector, sees, sizes, tower_attention, whole,
)
from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.converters.common import any_window, softcap
from aprfmt.arch.converters.layers import (
    FULL, layer_types, layer_types_from_gguf, own_layer_types, own_layers_to_gguf, some_layer_types,
)
from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.row import HEAD, REQUIRED, Architecture, Key, TensorRow, Tower
from aprfmt.errors import RefusedError


_BOTH = ("dense_2_in", "dense_2_out", "dense_3_in", "dense_3_out")


def _both_dense_to_gguf(value: object, scope: Scope) -> object:
    """The width of one of two layers after pooling, if both are as llama.cpp computes them."""
    extra = scope.h.extra
    whole = all(extra.get(name) for name in _BOTH) and not (extra.get("dense_2_bias") or extra.get("dense_3_bias"))
    return value if whole else None


_WIDE_HEADS = {"gemma2": 46, "gemma3": 62}
"""GGUF architecture -> number of layers of the one size that scales by hidden / heads, by which llama.cpp recognizes
it.
"""


def _any_layers_to_gguf(value: object, scope: Scope) -> list[bool] | None:
    sliding = own_layers_to_gguf(value, scope)
    return sliding if sliding and any(sliding) else None


def _any_layers_from_gguf(value: object, scope: Scope) -> object:
    if not scope.gguf("attention.sliding_window"):
        return [FULL] * (scope.h.num_layers or 0)
    return layer_types_from_gguf(value, scope)


def _query_scale(scope: Scope) -> int | None:
    """The value by whose square root llama.cpp divides attention scores."""
    wide = scope.h.num_layers == _WIDE_HEADS.get(scope.row.gguf)
    return scope.h.plain_head_dim if wide else scope.h.head_dim


def _query_scale_to_gguf(value: object, scope: Scope) -> None:
    number, runtime = as_float(value, scope.name), _query_scale(scope)
    if number is not None and runtime is not None and number != runtime:
        raise RefusedError(
            f"{scope.name} is {number:g}; llama.cpp's {scope.row.gguf} scales by {runtime} at these dimensions",
            hint="GGUF has no key for it",
        )


any_layer_types = replace(layer_types, to_gguf=_any_layers_to_gguf, from_gguf=_any_layers_from_gguf)
query_scale = Converter(
    _query_scale_to_gguf, lambda value, scope: DEFAULT if (scale := _query_scale(scope)) is None else scale,
)
_BOTH_DENSE = "dense_2_out&dense_3_in&!dense_2_bias&!dense_3_bias"
"""llama.cpp has two layers after pooling, without biases."""
_ODD_LAYERS = Key("attention.sliding_window_pattern", ("layer_types",), "bool[]", converter=own_layer_types)
_SOME_LAYERS = replace(_ODD_LAYERS, converter=some_layer_types)
_QUERY_SCALE = Key("", ("query_pre_attn_scalar",), converter=query_scale)
_NO_BIAS = must_be("attention_bias", False)
_GELU = must_be("hidden_activation", "gelu_pytorch_tanh")
_CAUSAL = Key("", ("use_bidirectional_attention",), "bool", allowed=(False,))


def _gemma(*more: TensorRow, after: str = "ffn_norm") -> tuple[TensorRow, ...]:
    """Gemma's decoder: its norms scale by their weight + 1."""
    return network(
        *norm("input_layernorm", "attn_norm", value="plus_one"), *attention("attention_bias", "attention_bias"),
        *norm("post_attention_layernorm", after, value="plus_one"), *more, *gated_mlp(), norm_value="plus_one",
    )


def _sandwiched(*more: TensorRow) -> tuple[TensorRow, ...]:
    """Gemma's decoder with norms before and after attention and MLP."""
    return _gemma(
        *norm("pre_feedforward_layernorm", "ffn_norm", value="plus_one"),
        *norm("post_feedforward_layernorm", "post_ffw_norm", value="plus_one"), *more, after="post_attention_norm",
    )


_GEMMA3 = _sandwiched(
    *norm("self_attn.q_norm", "attn_q_norm", "head_dim", value="plus_one"),
    *norm("self_attn.k_norm", "attn_k_norm", "head_dim", value="plus_one"),
)
_GEMMA3_KEYS = (
    *DECODER, Key("final_logit_softcapping", ("final_logit_softcapping",), "f32"),
    Key("", ("attn_logit_softcapping",), "f32", allowed=(False,)), _QUERY_SCALE, _NO_BIAS, _GELU,
)
_SCALE = 4
"""llama.cpp's default of pooled patches in each direction."""


def _patches(scope: Scope) -> int:
    """Patches along one side of an image; 0 if unknown."""
    image, patch = (scope.size(f"vision_config.{name}") for name in ("image_size", "patch_size"))
    return image // patch if image and patch else 0


def _pooled_to_gguf(value: object, scope: Scope) -> object:
    side = isqrt(as_int(value, scope.name) or 0)
    scale = _patches(scope) // side if side else 0
    return scale if scale not in (0, _SCALE) else None


def _pooled_from_gguf(value: object, scope: Scope) -> object:
    scale = as_int(value, scope.name) or _SCALE
    return (_patches(scope) // scale) ** 2 or DEFAULT


pooled_patches = Converter(_pooled_to_gguf, _pooled_from_gguf)
_V = "vision_tower.vision_model."
_POSITIONS = "image_size/patch_size*image_size/patch_size"

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="gemma", gguf="gemma", **hf_names("Gemma", "gemma"),
        tensors=_gemma(),
        keys=(*DECODER, _NO_BIAS, _CAUSAL, Key("", ("hidden_act",), "str", allowed=("gelu_pytorch_tanh", "gelu"))),
    ),
    Architecture(
        id="gemma2", gguf="gemma2", **hf_names("Gemma2", "gemma2"),
        tensors=_sandwiched(),
        keys=(
            *DECODER, Key("attn_logit_softcapping", ("attn_logit_softcapping",), "f32", converter=softcap),
            Key("final_logit_softcapping", ("final_logit_softcapping",), "f32", converter=softcap), ALWAYS_WINDOW,
            _SOME_LAYERS, _QUERY_SCALE, _NO_BIAS, _GELU, _CAUSAL,
        ),
    ),
    Architecture(
        id="gemma3_text", gguf="gemma3",
        **class_names("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", types=("gemma3_text", "gemma3")),
        tensors=_GEMMA3,
        keys=(
            *_GEMMA3_KEYS, replace(ALWAYS_WINDOW, converter=any_window),
            replace(_ODD_LAYERS, converter=any_layer_types), _CAUSAL,
        ),
        nested_rope=True,
    ),
    Architecture(
        id="gemma_embedding", gguf="gemma-embedding", hf_class="Gemma3TextModel", model_type="gemma3_text",
        hf_classes=("Gemma3TextModel",), bare_classes=("Gemma3TextModel",), model_types=(), prefixes=(("model.", ""),),
        tensors=(
            *(
                replace(row, hf=tuple(name.removeprefix("model.") for name in row.hf))
                for row in _GEMMA3
                if row.need != HEAD
            ),
            tensor("2_Dense.linear.weight", "dense_2.weight", "dense_2_out,hidden", _BOTH_DENSE),
            tensor("3_Dense.linear.weight", "dense_3.weight", "hidden,dense_2_out", _BOTH_DENSE),
        ),
        keys=(
            *_GEMMA3_KEYS, ALWAYS_WINDOW, _ODD_LAYERS, ENCODER[1],
            *(
                Key(f"dense_{n}_feat_{side}", (f"dense_{n}_{side}",), converter=Converter(_both_dense_to_gguf))
                for n in (2, 3)
                for side in ("in", "out")
            ),
            *(Key("", (f"dense_{n}_bias",), "bool") for n in (2, 3)), must_be("use_bidirectional_attention", True),
        ),
        nested_rope=True,
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="gemma3_vision", **whole("Gemma3ForConditionalGeneration", types=("gemma3",)), when="projector_type=gemma3",
        prefixes=(
            ("model.vision_tower.vision_model.", _V), ("model.vision_tower.", _V), ("vision_tower.", _V),
            ("model.multi_modal_projector.", "multi_modal_projector."),
        ),
        tensors=(
            *patches(f"{_V}embeddings.patch_embedding"),
            tensor(
                f"{_V}embeddings.position_embedding.weight", "v.position_embd.weight", f"{_POSITIONS},{TOWER_WIDTH}",
            ),
            *layers(*norms("layer_norm1", "layer_norm2"), *tower_attention(), *mlp(), hf=f"{_V}encoder.layers.{{n}}."),
            *norm(f"{_V}post_layernorm", "v.post_ln", TOWER_WIDTH, REQUIRED),
            tensor(
                "multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight",
                f"{TOWER_WIDTH},hidden",
            ),
            *norm("multi_modal_projector.mm_soft_emb_norm", "mm.soft_emb_norm", TOWER_WIDTH, value="plus_one"),
        ),
        ignored=(), f32=(".position_embd.", ".patch_embd.weight"), f16=("input_projection",),
        keys=sees(
            *sizes(), *IMAGE, projector("gemma3"), epsilon("vision", "vision_config.layer_norm_eps"), USE_GELU,
            Key("vision.projector.scale_factor", ("mm_tokens_per_image",), converter=pooled_patches),
        ),
        config={"vision_config.model_type": "siglip_vision_model", "vision_config.vision_use_head": False},
    ),
)
