"""PaddleOCR's tower: SigLIP over images of any size. Data only."""

from __future__ import annotations

from math import isqrt

from aprfmt.arch.converter import Converter, Scope, default
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import REQUIRED, Key, Tower
from aprfmt.arch.rows.parts import linear, norm, tensor
from aprfmt.arch.towers.parts import (
    GELU,
    IMAGE,
    WIDTH,
    attention,
    layers,
    mlp,
    norms,
    patches,
    preprocessor,
    projector,
    sees,
    sizes,
)


def _root_to(value: object, scope: Scope) -> object:
    number = as_int(value, scope.name)
    return isqrt(number) if number is not None else None


root = Converter(_root_to, default)

_V = "visual.vision_model."
_MERGED = f"{WIDTH}*spatial_merge_size*spatial_merge_size"

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="paddleocr_vision",
        gguf="clip",
        hf_class="PaddleOCRVLForConditionalGeneration",
        model_type="paddleocr_vl",
        hf_classes=("PaddleOCRVLForConditionalGeneration", "PaddleOCRVisionModel"),
        model_types=("paddleocr_vl",),
        when="projector_type=paddleocr",
        text="",
        prefixes=(("model.visual.vision_model.", _V), ("model.visual.", _V), ("model.projector.", "mlp_AR.")),
        tensors=(
            *patches(f"{_V}embeddings.patch_embedding"),
            tensor(
                f"{_V}embeddings.position_embedding.weight",
                "v.position_embd.weight",
                f"vision_config.image_size/patch_size*vision_config.image_size/patch_size,{WIDTH}",
            ),
            *layers(*norms("layer_norm1", "layer_norm2"), *attention(), *mlp(), hf=f"{_V}encoder.layers.{{n}}."),
            *norm(f"{_V}post_layernorm", "v.post_ln", WIDTH, REQUIRED),
            *norm("mlp_AR.pre_norm", "mm.input_norm", WIDTH, REQUIRED),
            *linear("mlp_AR.linear_1", "mm.1", f"{_MERGED},{_MERGED}", REQUIRED),
            *linear("mlp_AR.linear_2", "mm.2", f"hidden,{_MERGED}", REQUIRED),
        ),
        keys=sees(
            preprocessor("vision.image_size", "max_pixels", converter=root),
            *sizes(image_size=""),
            *IMAGE,
            projector("paddleocr"),
            preprocessor("vision.image_max_pixels", "max_pixels"),
            preprocessor("vision.image_min_pixels", "min_pixels"),
            GELU,
            Key("vision.attention.layer_norm_epsilon", ("vision_config.layer_norm_eps",), "f32"),
            Key("", ("vision_config.image_size",)),
            Key("", ("vision_config.spatial_merge_size",)),
        ),
        defaults={
            "": {
                "vision_config.hidden_size": 1152,
                "vision_config.intermediate_size": 4304,
                "vision_config.num_hidden_layers": 27,
                "vision_config.num_attention_heads": 16,
                "vision_config.patch_size": 14,
                "vision_config.image_size": 384,
                "vision_config.layer_norm_eps": 1e-6,
                "vision_config.spatial_merge_size": 2,
                "preprocessor_config.image_mean": [0.5, 0.5, 0.5],
                "preprocessor_config.image_std": [0.5, 0.5, 0.5],
            }
        },
    ),
)
