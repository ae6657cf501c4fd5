"""Towers of SigLIP's kind: a plain vision transformer behind learned positions. Data only."""

from __future__ import annotations

from math import isqrt

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import REQUIRED, Key, Tower
from aprfmt.arch.rows.parts import norm, tensor
from aprfmt.arch.towers.parts import (
    GELU,
    IMAGE,
    WIDTH,
    attention,
    epsilon,
    layers,
    mlp,
    norms,
    patches,
    projector,
    sees,
    sizes,
)

_SCALE = 4
"""How many patches llama.cpp pools in each direction where a GGUF does not say it."""


def _patches(scope: Scope) -> int:
    """Patches along one side of an image; 0 where it is unknown."""
    image, patch = (scope.size(f"vision_config.{name}") for name in ("image_size", "patch_size"))
    return image // patch if image and patch else 0


def _pooled_to(value: object, scope: Scope) -> object:
    side = isqrt(as_int(value, scope.name) or 0)
    scale = _patches(scope) // side if side else 0
    return scale if scale not in (0, _SCALE) else None


def _pooled_from(value: object, scope: Scope) -> object:
    scale = as_int(value, scope.name) or _SCALE
    return (_patches(scope) // scale) ** 2 or DEFAULT


pooled_patches = Converter(_pooled_to, _pooled_from)

_V = "vision_tower.vision_model."
_POSITIONS = "image_size/patch_size*image_size/patch_size"


TOWERS: tuple[Tower, ...] = (
    Tower(
        id="gemma3_vision",
        gguf="clip",
        hf_class="Gemma3ForConditionalGeneration",
        model_type="gemma3",
        hf_classes=("Gemma3ForConditionalGeneration",),
        model_types=("gemma3",),
        when="projector_type=gemma3",
        prefixes=(
            ("model.vision_tower.vision_model.", _V),
            ("model.vision_tower.", _V),
            ("vision_tower.", _V),
            ("model.multi_modal_projector.", "multi_modal_projector."),
        ),
        tensors=(
            *patches(f"{_V}embeddings.patch_embedding"),
            tensor(f"{_V}embeddings.position_embedding.weight", "v.position_embd.weight", f"{_POSITIONS},{WIDTH}"),
            *layers(*norms("layer_norm1", "layer_norm2"), *attention(), *mlp(), hf=f"{_V}encoder.layers.{{n}}."),
            *norm(f"{_V}post_layernorm", "v.post_ln", WIDTH, REQUIRED),
            tensor("multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight", f"{WIDTH},hidden"),
            *norm("multi_modal_projector.mm_soft_emb_norm", "mm.soft_emb_norm", WIDTH, value="plus_one"),
        ),
        ignored=(),
        f32=(".position_embd.", ".patch_embd.weight"),
        f16=("input_projection",),
        keys=sees(
            *sizes(),
            *IMAGE,
            projector("gemma3"),
            epsilon("vision", "vision_config.layer_norm_eps"),
            GELU,
            Key("vision.projector.scale_factor", ("mm_tokens_per_image",), converter=pooled_patches),
        ),
        defaults={
            "": {
                "vision_config.hidden_size": 1152,
                "vision_config.intermediate_size": 4304,
                "vision_config.num_hidden_layers": 27,
                "vision_config.num_attention_heads": 16,
                "vision_config.patch_size": 14,
                "vision_config.image_size": 896,
                "vision_config.layer_norm_eps": 1e-6,
                "mm_tokens_per_image": 256,
                "preprocessor_config.image_mean": [0.5, 0.5, 0.5],
                "preprocessor_config.image_std": [0.5, 0.5, 0.5],
            }
        },
        config={"vision_config.model_type": "siglip_vision_model", "vision_config.vision_use_head": False},
    ),
)
