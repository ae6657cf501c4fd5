"""Converters of the keys of towers whose layers are not all alike."""

from __future__ import annotations

from math import isqrt

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.fields import as_int
from aprfmt.errors import RefusedError


def _counts_to(value: object, scope: Scope) -> object:
    """Numbers of experts a layer; a config says -1 where there are none."""
    if not isinstance(value, list) or not all(type(count) is int for count in value):
        raise RefusedError(f"{scope.name} is {value!r:.40}, not a list of numbers of experts")
    return [max(0, count) for count in value]


def _all_but_last_to(value: object, scope: Scope) -> object:
    depth = as_int(value, scope.name)
    return depth - 1 if depth else None


def _all_but_last_from(value: object, scope: Scope) -> object:
    depth = as_int(value, scope.name)
    return depth + 1 if depth is not None else DEFAULT


def _patch(scope: Scope) -> int:
    """Pixels along one side of a patch, which only the preprocessor says."""
    return scope.size("preprocessor_config.patch_size") or as_int(scope.gguf("vision.patch_size"), scope.name) or 0


def _grid_to(value: object, scope: Scope) -> object:
    """The side of the image whose patches have a learned position each."""
    positions, patch = as_int(value, scope.name) or 0, _patch(scope)
    if isqrt(positions) ** 2 != positions:
        raise RefusedError(f"{scope.name} is {positions}; llama.cpp's positions are those of a square image")
    return isqrt(positions) * patch or None


def _grid_from(value: object, scope: Scope) -> object:
    side, patch = as_int(value, scope.name) or 0, _patch(scope)
    return (side // patch) ** 2 if side and patch else DEFAULT


def _patches_to(value: object, scope: Scope) -> object:
    return (as_int(value, scope.name) or 0) * _patch(scope) ** 2 or None


def _patches_from(value: object, scope: Scope) -> object:
    pixels, patch = as_int(value, scope.name) or 0, _patch(scope)
    return pixels // patch**2 if pixels and patch else DEFAULT


MIXED_CONVERTERS: dict[str, Converter] = {
    "counts": Converter(_counts_to),
    "all_but_last": Converter(_all_but_last_to, _all_but_last_from),
    "grid_of_patches": Converter(_grid_to, _grid_from),
    "pixels_of_patches": Converter(_patches_to, _patches_from),
}
