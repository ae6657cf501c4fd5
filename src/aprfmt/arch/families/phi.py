"""Phi."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from aprfmt.arch.blocks.decoder import (
    DIMS, GROUPED, LAYER_EPS, NO_WINDOW, RMS_EPS, ROPE, ROPE_DIM, SILU, WINDOW, attention, flag, fused_mlp, hf_names,
    linear, must_be, network, norm, plain_mlp, tensor,
)
from aprfmt.arch.blocks.moe import mixtral_experts, moe_decoder, moe_keys
from aprfmt.arch.blocks.tower import (
    IMAGE, TOWER_WIDTH, USE_GELU, epsilon, layers, mlp, norms, projector, sees, sizes, tower_attention, whole,
)
from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.converters.common import integer, or_zero
from aprfmt.arch.fields import as_int
from aprfmt.arch.rope import attention_factor
from aprfmt.arch.row import OPTIONAL, OUTPUT, REQUIRED, Architecture, Difference, Key, TensorRow, Tower
from aprfmt.errors import RefusedError


def _mscales_from_gguf(value: object, scope: Scope) -> object:
    """PhiMoE's longrope states its attention factor twice; a GGUF has one."""
    scaling = scope.h.extra.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type") == "longrope":
        factor = attention_factor(scope.h, "longrope", scaling)
        for name in ("short_mscale", "long_mscale"):
            scaling.setdefault(name, 1.0 if factor is None else factor)
    return DEFAULT


mscales = Converter(nothing, _mscales_from_gguf)
_SPARSEMIXER = Difference(
    "llama.cpp's phimoe uses RMSNorm instead of LayerNorm, and one softmax over both experts instead of sparsemixer",
)


def _patch(scope: Scope) -> int:
    """Pixels along one side of a patch, which only the preprocessor states."""
    return scope.size("preprocessor_config.patch_size") or as_int(scope.gguf("vision.patch_size"), scope.name) or 0


def _grid_to_gguf(value: object, scope: Scope) -> object:
    """The image size with a learned position per patch."""
    positions, patch = as_int(value, scope.name) or 0, _patch(scope)
    if isqrt(positions) ** 2 != positions:
        raise RefusedError(f"{scope.name} is {positions}; llama.cpp supports square images only")
    return isqrt(positions) * patch or None


def _grid_from_gguf(value: object, scope: Scope) -> object:
    side, patch = as_int(value, scope.name) or 0, _patch(scope)
    return (side // patch) ** 2 if side and patch else DEFAULT


def _patches_from_gguf(value: object, scope: Scope) -> object:
    pixels, patch = as_int(value, scope.name) or 0, _patch(scope)
    return pixels // patch**2 if pixels and patch else DEFAULT


all_but_last = integer(lambda depth: depth - 1 if depth else None, lambda depth: depth + 1)
pixels_of_patches = Converter(
    lambda value, scope: (as_int(value, scope.name) or 0) * _patch(scope) ** 2 or None, _patches_from_gguf,
)
_P = "model.vision_tower.vision_tower.vision_model."


def _phi4_layer(where: str) -> tuple[TensorRow, ...]:
    rows = (*norms("layer_norm1", "layer_norm2"), *tower_attention(), *mlp())
    return tuple(replace(row, layers=where) for row in rows)


def _behind(*rows: TensorRow) -> tuple[TensorRow, ...]:
    """Tensors that a GGUF cannot store and a checkpoint may lack."""
    return tuple(replace(row, gguf=(), gguf_dims=(), need=OPTIONAL) for row in rows)


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="phi", gguf="phi2", **hf_names("Phi", "phi"),
        tensors=network(
            *norm("input_layernorm", "attn_norm", bias=REQUIRED), *attention(REQUIRED, REQUIRED, o_proj="dense"),
            *norm("self_attn.q_layernorm", "attn_q_norm", "head_dim", "qk_layernorm", "qk_layernorm"),
            *norm("self_attn.k_layernorm", "attn_k_norm", "head_dim", "qk_layernorm", "qk_layernorm"),
            *plain_mlp(REQUIRED, "mlp.fc1", "mlp.fc2"),
            last="model.final_layernorm", norm_bias=REQUIRED, head_bias=OUTPUT,
        ),
        keys=(
            *DIMS, GROUPED, ROPE, LAYER_EPS, ROPE_DIM, must_be("qk_layernorm", False),
            must_be("hidden_act", "gelu_new"),
        ),
    ),
    Architecture(
        id="phi3", gguf="phi3", **hf_names("Phi3", "phi3"),
        tensors=network(
            *norm("input_layernorm", "attn_norm"), *linear("self_attn.qkv_proj", "attn_qkv", "q+2*kv,hidden"),
            *linear("self_attn.o_proj", "attn_output", "hidden,q"), *norm("post_attention_layernorm", "ffn_norm"),
            *fused_mlp(),
        ),
        keys=(
            *DIMS, GROUPED, ROPE, Key("rope.scaling.original_context_length", ("original_max_position_embeddings",)),
            RMS_EPS, ROPE_DIM, Key("attention.sliding_window", ("sliding_window",), converter=or_zero), SILU,
        ),
        differs=(NO_WINDOW,),
    ),
    Architecture(
        id="phimoe", gguf="phimoe", **hf_names("Phimoe", "phimoe", "PhiMoE"),
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias"), *mixtral_experts(),
            norm_bias=REQUIRED, head_bias="lm_head_bias&output",
        ),
        keys=moe_keys(
            ROPE_DIM, WINDOW, flag("attention_bias"), flag("lm_head_bias"),
            Key("", converter=mscales), Key("", ("router_jitter_noise",), "f32"), count="num_local_experts",
        ),
        differs=(_SPARSEMIXER, NO_WINDOW),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="phi4_vision", **whole("Phi4ForCausalLMV", types=("phi4-siglip",)), when="projector_type=phi4", text="",
        prefixes=(("vision_tower.", "model.vision_tower.vision_tower."), ("mm_projector.", "model.mm_projector.")),
        tensors=(
            tensor(
                f"{_P}embeddings.patch_embedding.weight", "v.patch_embd.weight",
                f"{TOWER_WIDTH},3*patch_size*patch_size", gguf_dims=(f"{TOWER_WIDTH},3,patch_size,patch_size",),
                columns=("swap:1,patch_size*patch_size,3",),
            ),
            tensor(f"{_P}embeddings.patch_embedding.bias", "v.patch_embd.bias", TOWER_WIDTH),
            tensor(f"{_P}embeddings.position_embedding.weight", "v.position_embd.weight", f"num_patches,{TOWER_WIDTH}"),
            *layers(*_phi4_layer("!unread"), hf=f"{_P}encoder.layers.{{n}}."),
            *_behind(*layers(*_phi4_layer("unread"), hf=f"{_P}encoder.layers.{{n}}.")),
            *_behind(
                *norm(f"{_P}post_layernorm", "", TOWER_WIDTH, REQUIRED),
                tensor(f"{_P}head.probe", "", f"1,1,{TOWER_WIDTH}"),
                tensor(f"{_P}head.attention.in_proj_weight", "", f"3*{TOWER_WIDTH},{TOWER_WIDTH}"),
                tensor(f"{_P}head.attention.in_proj_bias", "", f"3*{TOWER_WIDTH}"),
                *linear(f"{_P}head.attention.out_proj", "", f"{TOWER_WIDTH},{TOWER_WIDTH}", REQUIRED),
                *norm(f"{_P}head.layernorm", "", TOWER_WIDTH, REQUIRED),
                *linear(f"{_P}head.mlp.fc1", "", f"intermediate_size,{TOWER_WIDTH}", REQUIRED),
                *linear(f"{_P}head.mlp.fc2", "", f"{TOWER_WIDTH},intermediate_size", REQUIRED),
            ),
            *linear("model.mm_projector.0", "mm.0", f"hidden,{TOWER_WIDTH}", REQUIRED),
            *linear("model.mm_projector.2", "mm.2", "hidden,hidden", REQUIRED),
        ),
        f32=(".position_embd.",),
        keys=sees(
            Key("vision.patch_size", ("preprocessor_config.patch_size",)),
            *sizes(image_size="", patch_size="", block_count=""),
            Key("vision.block_count", ("vision_config.num_hidden_layers",), converter=all_but_last),
            Key("vision.image_size", ("vision_config.num_patches",),
                converter=Converter(_grid_to_gguf, _grid_from_gguf)), *IMAGE,
            projector("phi4"),
            Key(
                "vision.image_min_pixels", ("preprocessor_config.min_num_patches", "min_num_patches"),
                converter=pixels_of_patches,
            ),
            Key(
                "vision.image_max_pixels", ("preprocessor_config.max_num_patches", "max_num_patches"),
                converter=pixels_of_patches,
            ),
            USE_GELU, epsilon("vision", "vision_config.layer_norm_eps"),
        ),
        config={"vision_config.model_type": "siglip2_vision_model"},
    ),
)
