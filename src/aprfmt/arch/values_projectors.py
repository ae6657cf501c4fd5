"""Converters of Granite 4 Vision's keys: a config.json lists projectors by their kinds, a GGUF in one order."""

from __future__ import annotations

import re

from aprfmt.arch import projectors
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, GgufKeys, Scope
from aprfmt.arch.fields import as_int
from aprfmt.arch.projectors import MAP, SPATIAL, SPATIAL_LAYER, TARGETS, TEXT_LAYERS, VISION_LAYERS
from aprfmt.errors import RefusedError

_OFFSETS = "vision.projector.spatial_offsets"


def _numbers(value: object, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise RefusedError(f"{name} is {value!r:.40}, not a list of whole numbers")
    return list(value)


def _mapping_to(value: object, scope: Scope) -> object:
    """What a GGUF told, else what the lists of the whole model's config.json say; nothing for Granite alone."""
    n_layers = scope.h.num_layers or 0
    if value is not None:
        return _numbers(value, scope.name)[:n_layers]
    told = {name: scope.config(name) for name in (MAP, TARGETS)}
    return projectors.deepstack_mapping(told, n_layers) if any(told.values()) else None


def _output(number: int, depth: int, scope: Scope) -> int:
    """The layer whose output config.json calls `number`: 1 is that of the first, -1 that of the last."""
    layer = number + depth if number < 0 else number - 1
    if not 0 <= layer < depth:
        raise RefusedError(
            f"{scope.name} takes states {number} of a tower with {depth} layers, which none of them gives",
            hint="check deepstack_layer_map and spatial_vision_layer of config.json",
        )
    return layer


def _layers_to(value: object, scope: Scope) -> object:
    depth = scope.size(VISION_LAYERS) or 0
    told = {name: scope.config(name) for name in (MAP, TARGETS, SPATIAL_LAYER)}
    found = projectors.projectors(told, scope.size(TEXT_LAYERS))
    projectors.check(found)
    layers = [_output(one.vision_layer, depth, scope) for one in found]
    offsets = [one.item if one.kind == SPATIAL else -1 for one in found]
    return GgufKeys({scope.key.gguf: ("i32[]", layers), _OFFSETS: ("i32[]", offsets)})


def _layers_from(value: object, scope: Scope) -> object:
    """The lists of a config.json, with the number of each projector where that has a layer of the language model."""
    layers, offsets = _numbers(value, scope.key.gguf), _numbers(scope.gguf(_OFFSETS), _OFFSETS)
    depth = as_int(scope.gguf("vision.block_count"), "vision.block_count") or 0
    by_corner = sorted((offset, i) for i, offset in enumerate(offsets) if offset >= 0)
    corners = {layers[i] for _, i in by_corner if i < len(layers)}
    if (
        len(layers) != len(offsets)
        or len(corners) > 1
        or [offset for offset, _ in by_corner] != list(range(len(by_corner)))
    ):
        raise RefusedError(
            f"feature_layer {layers!r:.60} and spatial_offsets {offsets!r:.60} name no projectors of the family",
            hint="check the program that wrote the GGUF",
        )
    pairs = sorted([layer - depth, i] for i, layer in enumerate(layers) if offsets[i] < 0)
    last = next((layer - depth for layer in corners), -1)
    return ConfigKeys({MAP: pairs, TARGETS: [i for _, i in by_corner], SPATIAL_LAYER: last})


def _side(part: int) -> Converter:
    """A side of "3/8", the squares of which the projectors make one of the other."""
    other = f"vision.projector.{('query', 'window')[1 - part]}_side"

    def to_gguf(value: object, scope: Scope) -> object:
        if not isinstance(value, str) or re.fullmatch(r"[1-9]\d*/[1-9]\d*", value) is None:
            raise RefusedError(f"{scope.name} is {value!r:.40}, not two sides as in 4/8")
        return int(value.split("/")[part])

    def from_gguf(value: object, scope: Scope) -> object:
        sides = [as_int(value, scope.key.gguf), as_int(scope.gguf(other), other)]
        return DEFAULT if None in sides else "/".join(map(str, sides if part == 0 else sides[::-1]))

    return Converter(to_gguf, from_gguf)


def _pinpoints_to(value: object, scope: Scope) -> object:
    """Sizes of images, width before height."""
    pairs = value if isinstance(value, list) else []
    return [side for pair in pairs for side in _numbers(pair, scope.name)[::-1]] or None


def _pinpoints_from(value: object, scope: Scope) -> object:
    sides = _numbers(value, scope.key.gguf) if value is not None else []
    return [[sides[i + 1], sides[i]] for i in range(0, len(sides) - 1, 2)] or DEFAULT


PROJECTORS: dict[str, Converter] = {
    "deepstack_mapping": Converter(_mapping_to, lambda value, scope: value),
    "projector_layers": Converter(_layers_to, _layers_from),
    "query_side": _side(0),
    "window_side": _side(1),
    "pinpoints": Converter(_pinpoints_to, _pinpoints_from),
}
