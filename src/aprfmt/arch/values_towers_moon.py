"""Converters of the keys of towers of MoonViT's kind, and of those that read documents."""

from __future__ import annotations

from math import isqrt

from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.fields import as_float, as_int
from aprfmt.errors import RefusedError

_CLIP = "vision_config.width.clip-l-14-224"
_TOKENS = 256
"""Tokens of an image of DeepSeek-OCR."""
_LEAST_PATCHES = 8
"""Patches of the smallest image that Kimi K2.5's GGUF asks for."""


def _side_to(value: object, scope: Scope) -> object:
    sides = {as_int(side, scope.name) for side in value} if isinstance(value, list) else set()
    if len(sides) != 1:
        raise RefusedError(
            f"{scope.name} is {value!r:.40}; llama.cpp merges as many patches in both directions",
            hint="an .apr or a folder can hold the model: -o NAME.apr, or -o NAME --format hf",
        )
    return sides.pop()


def _side_from(value: object, scope: Scope) -> object:
    side = as_int(value, scope.name)
    return [side, side] if side else DEFAULT


def _patch_area(scope: Scope) -> int | None:
    side = scope.size("vision_config.patch_size")
    return side * side if side else None


def _position_image(value: object, scope: Scope) -> object:
    rows, side = (scope.size(f"vision_config.{name}") for name in ("init_pos_emb_height", "patch_size"))
    return rows * side if rows and side else None


def _least_pixels(value: object, scope: Scope) -> object:
    area = _patch_area(scope)
    return _LEAST_PATCHES * area if area else None


def _pixels_to(value: object, scope: Scope) -> object:
    patches, area = as_int(value, scope.name), _patch_area(scope)
    return patches * area if patches and area else None


def _pixels_from(value: object, scope: Scope) -> object:
    pixels, side = as_int(value, scope.name), as_int(scope.gguf("vision.patch_size"), scope.name)
    return pixels // side**2 if pixels and side else DEFAULT


def _text_width(value: object, scope: Scope) -> object:
    return scope.h.hidden_size or DEFAULT


def _four_a_head(value: object, scope: Scope) -> object:
    heads = scope.size(f"{_CLIP}.heads")
    return 4 * heads if heads else None


def _patches_a_token(value: object, scope: Scope) -> object:
    """Patches that one token stands for in each direction, where they are not the usual four."""
    image, patch = (
        scope.size(f"{_CLIP}.{name}") or scope.size(f"vision_config.{name}") for name in ("image_size", "patch_size")
    )
    tokens = isqrt(scope.size("preprocessor_config.image_seq_length") or _TOKENS)
    scale = image // patch // tokens if image and patch and tokens else 0
    return scale if scale not in (0, 4) else None


def _sixteen_tokens(value: object, scope: Scope) -> object:
    side, ratio = scope.size("vision_patch_size"), scope.size("vision_downsample_ratio")
    return 16 * side * ratio if side and ratio else None


def _square_to(value: object, scope: Scope) -> object:
    stride = as_int(value, scope.name)
    return stride**2 if stride else None


def _square_from(value: object, scope: Scope) -> object:
    return isqrt(as_int(value, scope.name) or 0) or DEFAULT


def _ffn_of_width(scope: Scope) -> object:
    width, ratio = scope.size("vision_config.width"), as_float(scope.config("vision_config.mlp_ratio"), scope.name)
    return round(width * ratio) if width and ratio else None


MOON_CONVERTERS: dict[str, Converter] = {
    "same_sides": Converter(_side_to, _side_from),
    "position_image": Converter(_position_image, nothing),
    "least_pixels": Converter(_least_pixels, nothing),
    "patches_to_pixels": Converter(_pixels_to, _pixels_from),
    "four_a_head": Converter(_four_a_head, nothing),
    "patches_a_token": Converter(_patches_a_token, nothing),
    "sixteen_tokens": Converter(_sixteen_tokens, nothing),
    "squared": Converter(_square_to, _square_from),
    "ffn_of_width": Converter(fill=_ffn_of_width),
    "text_width": Converter(nothing, _text_width),
}
