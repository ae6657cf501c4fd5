"""Granite 4 Vision's projectors: the tower layer that each reads, and the language model layer that it feeds.

Its config.json has two lists, of layerwise projectors and of spatial ones (corners of patch groups), each numbered from
0. A GGUF has one list, in the order of the language model's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aprfmt.arch.fields import OTHER_FORMAT
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.errors import CorruptError, RefusedError
from aprfmt.light_dataclass import light_dataclass

LAYERWISE, SPATIAL = "layerwise", "spatial"
DEEPSTACK = "deepstack_mapping"
"""GGUF key of the language model, and config.json key if made from such a GGUF only."""

MAP, TARGETS, SPATIAL_LAYER = "deepstack_layer_map", "spatial_target_layers", "spatial_vision_layer"
VISION_LAYERS, TEXT_LAYERS = "vision_config.num_hidden_layers", "text_config.num_hidden_layers"


@light_dataclass(frozen=True, slots=True)
class Projector:
    """A projector.

    Attributes:
        kind: LAYERWISE or SPATIAL.
        item: its index among those of its kind; for a SPATIAL one the corner.
        vision_layer: the tower layer, counted as in config.json: 1 is the output of the first layer, -1 of the last.
        text_layer: the language model layer that it feeds, from 0.
    """

    kind: str
    item: int
    vision_layer: int
    text_layer: int


def projectors(stated: Mapping[str, object], n_text: int | None) -> list[Projector]:
    """All projectors of a config.json's lists, in a GGUF's order; `n_text` is the language model's number of layers.

    Raises CorruptError for invalid lists.
    """
    pairs, targets = stated.get(MAP) or [], stated.get(TARGETS) or []
    last = -1 if stated.get(SPATIAL_LAYER) is None else stated[SPATIAL_LAYER]
    if not isinstance(pairs, list) or not all(_is_numbers(pair) and len(pair) == 2 for pair in pairs):
        raise CorruptError(f"{MAP} is {pairs!r:.60}, not pairs of layers")
    if not _is_numbers(targets) or not isinstance(targets, list):
        raise CorruptError(f"{TARGETS} is {targets!r:.60}, not a list of layers")
    if type(last) is not int:
        raise CorruptError(f"{SPATIAL_LAYER} is {last!r:.40}, not a layer")
    found = [
        *(Projector(LAYERWISE, item, vision, text) for item, (vision, text) in enumerate(pairs)),
        *(Projector(SPATIAL, item, last, text) for item, text in enumerate(targets)),
    ]

    def layer(one: Projector) -> int:
        return one.text_layer + (n_text or 0) if one.text_layer < 0 else one.text_layer

    placed = [Projector(one.kind, one.item, one.vision_layer, layer(one)) for one in found]
    return sorted(placed, key=lambda one: one.text_layer)


def _is_numbers(value: object) -> bool:
    return isinstance(value, list | tuple) and all(type(number) is int for number in value)


def check(found: list[Projector]) -> None:
    """Raises RefusedError for what llama.cpp's network does not support."""
    layers = [one.text_layer for one in found]
    if twice := [layer for layer in layers if layers.count(layer) > 1]:
        what = f"two projectors feed layer {twice[0]} of the language model; llama.cpp supports one"
        raise RefusedError(what, hint=OTHER_FORMAT)
    if layers and layers[0] != 0:
        raise RefusedError(
            f"no projector feeds layer 0 of the language model, the first feeds layer {layers[0]}: llama.cpp uses the "
            "first one's features as embeddings",
            hint=OTHER_FORMAT,
        )


def _numbers_of(kind: str) -> Callable[[Hyperparams], list[int]]:
    def numbers(h: Hyperparams) -> list[int]:
        n_text = h.extra.get(TEXT_LAYERS)
        found = projectors(h.extra, n_text if type(n_text) is int else None)
        by_item = {one.item: i for i, one in enumerate(found) if one.kind == kind}
        return [by_item[item] for item in sorted(by_item)]

    return numbers


NUMBERS: dict[str, Callable[[Hyperparams], list[int]]] = {kind: _numbers_of(kind) for kind in (LAYERWISE, SPATIAL)}
"""Kind -> the GGUF indices of its projectors, in the order of config.json."""


def deepstack_mapping(stated: Mapping[str, object], n_text: int) -> list[int]:
    """For each layer of the language model the index of the projector that feeds it, -1 if none.

    The first projector yields the image embeddings themselves, and is not listed.
    """
    found = projectors(stated, n_text)
    check(found)
    if found and found[-1].text_layer >= n_text:
        raise CorruptError(f"a projector feeds layer {found[-1].text_layer} of a language model with {n_text} layers")
    fed = {one.text_layer: i for i, one in enumerate(found) if i}
    return [fed.get(layer, -1) for layer in range(n_text)]


def fed_layers(h: Hyperparams) -> dict[int, int]:
    """Layers of the language model -> the indices of the projectors that feed them, from any source."""
    stated = h.extra.get(DEEPSTACK)
    if isinstance(stated, list):
        return {layer: number for layer, number in enumerate(stated) if type(number) is int and number >= 0}
    return {one.text_layer: i for i, one in enumerate(projectors(h.extra, h.num_layers)) if i}


def with_layers(config: dict[str, object], mapping: object) -> dict[str, object]:
    """`config`, made from a tower GGUF, with language model layers from the `mapping` of its GGUF.

    Such a GGUF numbers the projectors, and its config has these numbers in place of layers. Raises RefusedError for a
    mapping of other projectors.
    """
    if MAP not in config:
        return config
    mapping = mapping if isinstance(mapping, list) else []
    layers = {0: 0, **{number: layer for layer, number in enumerate(mapping) if type(number) is int and number > 0}}
    found = projectors(config, None)
    if sorted(layers) != list(range(len(found))):
        raise RefusedError(
            f"the towers have {len(found)} projectors, but the language model's deepstack_mapping names "
            f"{sorted(layers)}",
            hint="it belongs to another model: use the mmproj published with this one",
        )
    pairs = [(one.item, [one.vision_layer, layers[i]]) for i, one in enumerate(found) if one.kind == LAYERWISE]
    targets = [(one.item, layers[i]) for i, one in enumerate(found) if one.kind == SPATIAL]
    return {**config, MAP: [pair for _, pair in sorted(pairs)], TARGETS: [layer for _, layer in sorted(targets)]}
