"""Converters of the keys of towers: how a config.json and a `clip` GGUF count the same thing."""

from __future__ import annotations

from itertools import pairwise
from math import isqrt

from aprfmt.arch.converter import DEFAULT, Converter, GgufKeys, Scope, default
from aprfmt.arch.fields import as_int
from aprfmt.arch.values_towers_codes import CODES_CONVERTERS
from aprfmt.arch.values_towers_gemma import GEMMA_CONVERTERS
from aprfmt.arch.values_towers_mixed import MIXED_CONVERTERS
from aprfmt.arch.values_towers_moon import MOON_CONVERTERS
from aprfmt.arch.values_towers_vit import VIT_CONVERTERS
from aprfmt.errors import RefusedError

_SCALE = 4
"""How many patches llama.cpp pools in each direction where a GGUF does not say it."""


def _beside(scope: Scope, name: str) -> int | None:
    """The size `name` of the object of the config.json that the key is in."""
    return scope.size(f"{scope.name.rpartition('.')[0]}.{name}")


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


def _activation_to(value: object, scope: Scope) -> object:
    word = str(value)
    if word in ("silu", "swish"):
        return GgufKeys({"use_silu": ("bool", True)})
    if word.startswith("gelu"):
        return GgufKeys({"use_gelu": ("bool", True)})
    raise RefusedError(
        f"{scope.name} is {word!r:.40}, and llama.cpp's network knows gelu and silu here",
        hint="an .apr or a folder can hold the model: -o NAME.apr, or -o NAME --format hf",
    )


def _activation_from(value: object, scope: Scope) -> object:
    if scope.gguf("use_silu"):
        return "silu"
    return "gelu" if scope.gguf("use_gelu") else DEFAULT


def _pattern_to(value: object, scope: Scope) -> object:
    layers = value if isinstance(value, list) else []
    numbers = [as_int(item, scope.name) or 0 for item in layers]
    if not numbers:
        raise RefusedError(f"{scope.name} is missing: which layers attend to the whole image is unknown")
    step = numbers[0] + 1
    if any(b - a != step for a, b in pairwise(numbers)):
        raise RefusedError(
            f"{scope.name} is {numbers}; llama.cpp knows layers that attend to the whole image at equal distances only",
            hint="an .apr or a folder can hold the model: -o NAME.apr, or -o NAME --format hf",
        )
    return step


def _pattern_from(value: object, scope: Scope) -> object:
    step, depth = as_int(value, scope.name), _beside(scope, "depth")
    return list(range(step - 1, depth, step)) if step and depth else DEFAULT


def _square_to(value: object, scope: Scope) -> object:
    """Positions are learned for an image of this many patches in all; the GGUF gives its side in pixels."""
    positions, patch = as_int(value, scope.name), _beside(scope, "patch_size")
    return int(positions**0.5 * patch) if positions and patch else None


def _square_from(value: object, scope: Scope) -> object:
    side, patch = as_int(value, scope.name), scope.gguf("vision.patch_size")
    return (side // patch) ** 2 if side and isinstance(patch, int) and patch else DEFAULT


def _deepstack_to(value: object, scope: Scope) -> object:
    listed, depth = value if isinstance(value, list) else [], _beside(scope, "depth") or 0
    return GgufKeys({scope.key.gguf: ("bool[]", [layer in listed for layer in range(depth)])}) if depth else None


def _deepstack_from(value: object, scope: Scope) -> object:
    return [layer for layer, marked in enumerate(value) if marked] if isinstance(value, list) else []


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


def _root_to(value: object, scope: Scope) -> object:
    number = as_int(value, scope.name)
    return isqrt(number) if number is not None else None


TOWER_CONVERTERS: dict[str, Converter] = {
    **VIT_CONVERTERS,
    **MOON_CONVERTERS,
    **MIXED_CONVERTERS,
    **GEMMA_CONVERTERS,
    **CODES_CONVERTERS,
    "deepstack": Converter(_deepstack_to, _deepstack_from),
    "tokens_as_pixels": Converter(_tokens_to, _tokens_from),
    "root": Converter(_root_to, default),
    "optional": Converter(),
    "square_of_patches": Converter(_square_to, _square_from),
    "pooled_patches": Converter(_pooled_to, _pooled_from),
    "activation": Converter(_activation_to, _activation_from),
    "window_pattern": Converter(_pattern_to, _pattern_from),
}
