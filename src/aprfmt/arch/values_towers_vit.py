"""Converters of the keys of plain vision transformers."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Converter, Scope, or_default, words
from aprfmt.arch.fields import as_float, as_int
from aprfmt.errors import RefusedError


def _inverse_to(value: object, scope: Scope) -> object:
    ratio = as_float(value, scope.name) or 0.0
    if not 0 < ratio <= 1:
        raise RefusedError(f"{scope.name} is {value!r:.40}, not a share of 1")
    return int(1.0 / ratio)


def _inverse_from(value: object, scope: Scope) -> object:
    factor = as_int(value, scope.name)
    return 1 / factor if factor else DEFAULT


def _ffn_of_ratio(scope: Scope) -> object:
    width, ratio = (
        scope.size("vision_config.hidden_size"),
        as_float(scope.config("vision_config.mlp_ratio"), scope.name),
    )
    return round(width * ratio) if width and ratio else None


def _ratio_from(value: object, scope: Scope) -> object:
    width, ffn = (as_int(scope.gguf(f"vision.{name}_length"), name) for name in ("embedding", "feed_forward"))
    return ffn / width if width and ffn else DEFAULT


def _ffn_of_mult_to(value: object, scope: Scope) -> object:
    return (scope.size(f"{scope.name.rpartition('.')[0]}.hidden_dim") or 0) * (as_int(value, scope.name) or 0)


def _ffn_of_mult_from(value: object, scope: Scope) -> object:
    width, ffn = as_int(scope.gguf("audio.embedding_length"), scope.name), as_int(value, scope.name)
    return ffn // width if width and ffn else DEFAULT


def _one_layer_from(value: object, scope: Scope) -> object:
    return value[0] if isinstance(value, list) and value else DEFAULT


def _merged_patch(scope: Scope) -> int:
    """Pixels along one side of a square of patches."""
    return (scope.size("vision_config.patch_size") or 0) * (scope.size("vision_config.merge_size") or 0)


def _side_to(value: object, scope: Scope) -> object:
    return (as_int(value, scope.name) or 0) * _merged_patch(scope)


def _side_from(value: object, scope: Scope) -> object:
    patch, merge = (as_int(scope.gguf(f"vision.{name}_size"), scope.name) for name in ("patch", "spatial_merge"))
    side = as_int(value, scope.name)
    return side // (patch * merge) if side and patch and merge else DEFAULT


def _one_width_to(value: object, scope: Scope) -> object:
    """Width of Granite's encoder, which llama.cpp takes that of its heads and of the projector's network for, too."""
    heads, dim = (scope.size(f"encoder_config.{name}") for name in ("num_heads", "dim_head"))
    others = {
        "encoder_config.num_heads * dim_head": heads * dim if heads and dim else None,
        "projector_config.hidden_size": scope.size("projector_config.hidden_size"),
    }
    for name, other in others.items():
        if other not in (None, value):
            raise RefusedError(
                f"{scope.name} is {value!r:.40} and {name} is {other}, and llama.cpp's network has one width",
                hint="an .apr or a folder can hold the model: -o NAME.apr, or -o NAME --format hf",
            )
    return value


VIT_CONVERTERS: dict[str, Converter] = {
    "inverse": Converter(_inverse_to, _inverse_from),
    "ffn_of_ratio": Converter(fill=_ffn_of_ratio),
    "downsampling": words({"4x": 2, "16x": 4}),
    "one_width": Converter(_one_width_to, or_default),
    "one_layer": Converter(lambda value, scope: None if value is None else [value], _one_layer_from),
    "side_of_patches": Converter(_side_to, _side_from),
    "ffn_of_mult": Converter(_ffn_of_mult_to, _ffn_of_mult_from),
    "ratio_of_ffn": Converter(from_gguf=_ratio_from),
}
