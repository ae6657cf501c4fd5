"""GLM's towers."""

from __future__ import annotations

from aprfmt.arch.blocks.decoder import linear, norm, tensor
from aprfmt.arch.blocks.hearing import CONVOLUTIONS, D_MODEL, HEARING_EPS, MEL, POSITIONS, keys_in, own_sizes, whisper
from aprfmt.arch.blocks.tower import (
    IMAGE, TOWER_WIDTH, hears, layers, mlp, norms, patches_in_time, preprocessor, projector, sees, sizes, whole,
)
from aprfmt.arch.converter import DEFAULT, Converter, Scope, if_given
from aprfmt.arch.converters.towers import activation
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import REQUIRED, Key, TensorRow, Tower


def _pixels_of_token(scope: Scope) -> int:
    """Pixels of the square of patches that becomes one token, by the preprocessor's words."""
    patch, side = (scope.size(f"preprocessor_config.{name}") or 0 for name in ("patch_size", "merge_size"))
    return (patch * side) ** 2


def _tokens_to(value: object, scope: Scope) -> object:
    tokens = as_int(value, scope.name)
    return tokens * _pixels_of_token(scope) if tokens is not None else None


def _tokens_from(value: object, scope: Scope) -> object:
    pixels = as_int(value, scope.name)
    patch, side = scope.gguf("vision.patch_size"), scope.gguf("vision.spatial_merge_size")
    if pixels is None or not isinstance(patch, int) or not isinstance(side, int) or not patch * side:
        return DEFAULT
    return pixels // (patch * side) ** 2


tokens_as_pixels = Converter(_tokens_to, _tokens_from)
_V = "visual."
_SIDE = "spatial_merge_size"
_BIAS = "vision_config.attention_bias"
_PREFIXES = (("model.visual.", _V),)


def _tensors(
    *own: TensorRow, ffn: str, inner: str, bias: bool, qk_norm: bool, qkv_bias: str | None
) -> tuple[TensorRow, ...]:
    """`ffn` is the width of an MLP, `inner` that of the projector; `bias` is that of an MLP."""
    head_dim = f"{TOWER_WIDTH}/num_heads"
    qk = (*norm("attn.q_norm", "attn_q_norm", head_dim), *norm("attn.k_norm", "attn_k_norm", head_dim))
    return (
        *patches_in_time(f"{_V}patch_embed.proj"),
        tensor(f"{_V}patch_embed.proj.bias", "v.patch_embd.bias", TOWER_WIDTH), *own,
        *layers(
            *norms("norm1", "norm2", bias=False),
            *linear("attn.qkv", "attn_qkv", f"3*{TOWER_WIDTH},{TOWER_WIDTH}", qkv_bias),
            *linear("attn.proj", "attn_out", f"{TOWER_WIDTH},{TOWER_WIDTH}", qkv_bias), *(qk if qk_norm else ()),
            *mlp("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj", bias=bias, ffn=ffn), hf=f"{_V}blocks.{{n}}.",
            depth="depth",
        ),
        *norm(f"{_V}post_layernorm", "v.post_ln", TOWER_WIDTH),
        tensor(f"{_V}downsample.weight", "mm.patch_merger.weight", f"hidden,{TOWER_WIDTH},{_SIDE},{_SIDE}"),
        tensor(f"{_V}downsample.bias", "mm.patch_merger.bias", "hidden"),
        *linear(f"{_V}merger.proj", "mm.model.fc", "hidden,hidden"),
        *norm(f"{_V}merger.post_projection_norm", "mm.post_norm", "hidden", REQUIRED),
        *linear(f"{_V}merger.gate_proj", "mm.gate", f"{inner},hidden"),
        *linear(f"{_V}merger.up_proj", "mm.up", f"{inner},hidden"),
        *linear(f"{_V}merger.down_proj", "mm.down", f"hidden,{inner}"),
    )


_SIZES = sizes(block_count="depth", head_count="num_heads")
_HIDDEN_ACT = Key("", ("vision_config.hidden_act",), "str", converter=activation)
_EPS = Key("vision.attention.layer_norm_epsilon", ("vision_config.rms_norm_eps",), "f32")
_MERGE = Key("", (f"vision_config.{_SIDE}",))

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="glmasr_tower", **whole("GlmasrModel", types=("Glmasr",)), when="projector_type=glma", text="",
        tensors=(
            *whisper("audio_encoder.whisper.", *D_MODEL)[:-2],
            *norm("audio_encoder.layer_norm", "mm.a.norm_pre", "d_model", REQUIRED),
            *linear("audio_encoder.adapting.0", "mm.a.mlp.1", "2*hidden,merge_factor*d_model", REQUIRED),
            *linear("audio_encoder.adapting.2", "mm.a.mlp.2", "hidden,2*hidden", REQUIRED),
            TensorRow(
                ("audio_encoder.audio_bos_eos_token.weight",), ("v.boi", "v.eoi"), ("2,hidden",),
                gguf_dims=("hidden", "hidden"),
            ),
        ),
        f32=(".position_embd.",), f16=CONVOLUTIONS,
        keys=hears(
            *own_sizes("whisper_config"), projector("glma"), *keys_in("whisper_config", MEL, HEARING_EPS),
            Key("audio.projector.stack_factor", ("merge_factor",)), *keys_in("whisper_config", POSITIONS),
        ),
        config={"whisper_config.model_type": "whisper"},
    ),
    Tower(
        id="glm4v_vision",
        **whole("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration", types=("glm4v", "glm4v_moe")),
        when="projector_type=glm4v&!tensors=v.attn_q_norm.weight", text="model.language_model.", prefixes=_PREFIXES,
        tensors=_tensors(
            *norm(f"{_V}post_conv_layernorm", "v.norm_embd", TOWER_WIDTH),
            tensor(
                f"{_V}embeddings.position_embedding.weight", "v.position_embd.weight",
                f"image_size/patch_size*image_size/patch_size,{TOWER_WIDTH}",
            ),
            ffn="hidden", inner="intermediate_size", bias=False, qk_norm=False, qkv_bias=_BIAS,
        ),
        keys=sees(*_SIZES, *IMAGE, projector("glm4v"), _HIDDEN_ACT, _EPS, _MERGE, Key("", (_BIAS,), "bool")),
    ),
    Tower(
        id="glm_ocr_vision", **whole("GlmOcrForConditionalGeneration", types=("glm_ocr",)),
        when="projector_type=glm4v&tensors=v.attn_q_norm.weight", text="model.language_model.", prefixes=_PREFIXES,
        tensors=_tensors(ffn="intermediate_size", inner="3*hidden", bias=True, qk_norm=True, qkv_bias=_BIAS),
        keys=sees(*_SIZES, *IMAGE, projector("glm4v"), _HIDDEN_ACT, _EPS, _MERGE, Key("", (_BIAS,), "bool")),
    ),
    Tower(
        id="glm5_next_vision", **whole("Glm5NextForConditionalGeneration", types=("glm5_next",)),
        when="projector_type=glm5v", text="model.language_model.", prefixes=_PREFIXES,
        tensors=_tensors(
            ffn="intermediate_size", inner="projection_intermediate_size", bias=True, qk_norm=True, qkv_bias=_BIAS,
        ),
        keys=sees(
            *_SIZES, *IMAGE, projector("glm5v"), _HIDDEN_ACT, _EPS, Key(f"vision.{_SIDE}", (f"vision_config.{_SIDE}",)),
            Key("vision.swiglu_clamp", ("vision_config.swiglu_limit",), "f32", converter=if_given),
            preprocessor("vision.image_min_pixels", "min_image_tokens", converter=tokens_as_pixels),
            preprocessor("vision.image_max_pixels", "max_image_tokens", converter=tokens_as_pixels),
            Key("", ("preprocessor_config.patch_size",)), Key("", ("preprocessor_config.merge_size",)),
            Key("", ("vision_config.projection_intermediate_size",)), Key("", (_BIAS,), "bool"),
        ),
    ),
)
