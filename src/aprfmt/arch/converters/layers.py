"""Converters of layer types."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.fields import as_int
from aprfmt.arch.grammar import sizes_of
from aprfmt.errors import CorruptError, RefusedError

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def kinds_of(slides: list[bool]) -> list[str]:
    """Layer types: sliding-window or full attention."""
    return [SLIDING if one else FULL for one in slides]


def slides_of(kinds: object) -> list[bool]:
    """Which layers have a sliding window. Raises CorruptError for anything but a list."""
    if not isinstance(kinds, list):
        raise CorruptError("layer_types is not a list")
    return [kind in (SLIDING, "chunked_attention") for kind in kinds]


def flags_of(value: object, name: str) -> list[bool]:
    """A list of flags or numbers, one per layer, as flags. Raises CorruptError."""
    if not isinstance(value, list):
        raise CorruptError(f"{name} is not a list")
    return [bool(item) for item in value]


def periodic(period: int, n_layers: int, first: int = 1) -> list[bool]:
    """Which layers have a sliding window: all but every `period`-th, counting from `first`."""
    return [bool((i + first) % period) for i in range(n_layers)]


def layer_types_derive(scope: Scope) -> list[str] | None:
    """From `sliding_window_pattern`, of a config or of the row's defaults: a period, or letters (L sliding)."""
    pattern = scope.h.extra.get("sliding_window_pattern", scope.defaults.get("sliding_window_pattern"))
    n_layers = scope.h.num_layers
    if n_layers is None or pattern is None:
        return None
    if isinstance(pattern, str) and pattern:
        return kinds_of([pattern[i % len(pattern)] == "L" for i in range(n_layers)])
    period = as_int(pattern, "sliding_window_pattern")
    return kinds_of(periodic(period, n_layers)) if period else None


def layer_types_to_gguf(value: object, scope: Scope) -> list[bool] | None:
    """Which layers have a sliding window. If a GGUF has no key for it, llama.cpp has one pattern, and others are
    refused.
    """
    if value is None:
        return None
    slides = slides_of(value)
    expected = layer_types_derive(scope)
    if not scope.key.gguf and expected is not None and slides_of(expected) != slides:
        raise RefusedError(f"layer_types differs from the fixed pattern of a GGUF of {scope.row.id}")
    return slides


def layer_types_from_gguf(value: object, scope: Scope) -> object:
    """From a list of flags, or a period; else the row's pattern."""
    if isinstance(value, int):
        return kinds_of(periodic(max(1, int(value)), scope.h.num_layers or 0))
    if isinstance(value, list):
        return kinds_of([bool(item) for item in value])
    filled = layer_types_derive(scope)
    return DEFAULT if filled is None else filled


layer_types = Converter(layer_types_to_gguf, layer_types_from_gguf, layer_types_derive)
number_or_0 = Converter(lambda value, scope: value or 0, lambda value, scope: value or 0)
positive = Converter(lambda value, scope: value or None, lambda value, scope: value or 0)


def plain_kinds(value: object, scope: Scope) -> object:
    """Layer types as in published configs: transformers has a separate type for layers with an indexer."""
    kinds = value if isinstance(value, list) else None
    return DEFAULT if kinds is None else [FULL if kind == "indexed_attention" else kind for kind in kinds]


def own_layers_to_gguf(value: object, scope: Scope) -> list[bool] | None:
    """Layer types, if they differ from llama.cpp's default."""
    sliding = layer_types_to_gguf(value, scope)
    period = as_int(scope.defaults.get("sliding_window_pattern"), "sliding_window_pattern")
    if sliding is None or not period:
        return sliding
    return None if sliding == periodic(period, len(sliding)) else sliding


def _some_layers_to_gguf(value: object, scope: Scope) -> list[bool] | None:
    """llama.cpp asserts that some layer has a sliding window, and a file of this architecture cannot say that none
    does.
    """
    sliding = layer_types_to_gguf(value, scope)
    if sliding and not any(sliding):
        raise RefusedError(f"{scope.name}: llama.cpp's {scope.row.gguf} needs at least one sliding-window layer")
    return own_layers_to_gguf(value, scope)


some_layer_types = replace(layer_types, to_gguf=_some_layers_to_gguf)
own_layer_types = replace(layer_types, to_gguf=own_layers_to_gguf)


def of_layers(scope: Scope, word: str) -> list[int]:
    """A size per layer."""
    return [sizes_of(scope.h, layer).get(word, 0) for layer in range(scope.h.num_layers or 0)]
