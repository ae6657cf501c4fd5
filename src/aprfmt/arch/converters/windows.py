"""Converters of sliding windows, and of heads and rotations that follow the layer type."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.converters.layers import kinds_of, periodic
from aprfmt.arch.fields import as_int
from aprfmt.arch.grammar import layer_kinds
from aprfmt.arch.row import HALF_ROTARY
from aprfmt.errors import RefusedError

FOURTH = 4
"""Of the layers of some families llama.cpp lets each fourth see everything, and rotates it or not by that."""


def full_every_fourth(scope: Scope) -> list[str] | None:
    """Every fourth layer sees everything, the first among them."""
    return None if scope.h.num_layers is None else kinds_of(periodic(FOURTH, scope.h.num_layers, first=0))


def heads_by_window_from(value: object, scope: Scope) -> object:
    """What the layers without a window have."""
    found = of_kind(value, scope, slides=False)
    return found if found is not None else of_kind(value, scope, slides=True)


def of_kind(value: object, scope: Scope, *, slides: bool) -> int | None:
    """The number of heads of the first layer that has a sliding window, or of the first that has none."""
    flags = scope.gguf("attention.sliding_window_pattern")
    heads = value if isinstance(value, list) else [value] * (scope.h.num_layers or 0)
    if not isinstance(flags, list):
        return None
    return next((as_int(n, scope.name) for n, flag in zip(heads, flags, strict=False) if bool(flag) is slides), None)


_SLIDING_HEADS = ("num_sliding_attention_heads", "swa_num_attention_heads")


def _step_heads_to(value: object, scope: Scope) -> list[int] | None:
    """Heads of each layer, draft layers that the kinds name among them."""
    windowed = next((as_int(scope.h.extra[key], key) for key in _SLIDING_HEADS if key in scope.h.extra), None)
    full = as_int(value, scope.name)
    kinds = layer_kinds(scope.h.extra)
    if full is None or kinds is None:
        return None
    return [full if windowed is None or kind != "sliding_attention" else windowed for kind in kinds]


def _windowed_heads_from(value: object, scope: Scope) -> object:
    found = of_kind(scope.gguf("attention.head_count"), scope, slides=True)
    return DEFAULT if found is None else found


_HALF = "partial_rotary_factor"


def _rotated_parts(scope: Scope) -> list[float]:
    """What is rotated of a head: all where there is a window, half where there is none."""
    return [1.0 if kind == "sliding_attention" else 0.5 for kind in layer_kinds(scope.h.extra) or ()]


def _rotary_parts_normalize(value: object, scope: Scope) -> object:
    return DEFAULT if value is not None else _rotated_parts(scope) or DEFAULT


def _half_rotary_to(value: object, scope: Scope) -> None:
    if value is not None and value != _rotated_parts(scope):
        raise RefusedError(
            f"{scope.name}: llama.cpp's {scope.row.gguf} rotates all of a head where there is a window, half elsewhere"
        )


def _half_rotary_from(value: object, scope: Scope) -> object:
    scope.h.extra[_HALF] = 0.5
    return _rotated_parts(scope) or DEFAULT


step_heads = Converter(_step_heads_to, heads_by_window_from)

windowed_heads = Converter(nothing, _windowed_heads_from, lambda scope: scope.h.num_heads)

half_rotary = Converter(_half_rotary_to, _half_rotary_from, normalize=_rotary_parts_normalize, role=HALF_ROTARY)
