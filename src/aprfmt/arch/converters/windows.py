"""Converters of sliding windows, and of heads and rotations that depend on the layer type."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope, nothing
from aprfmt.arch.converters.layers import flags_of, kinds_of, periodic, slides_of
from aprfmt.arch.fields import as_int
from aprfmt.arch.grammar import layer_kinds
from aprfmt.errors import RefusedError

FOURTH = 4
"""In some families llama.cpp gives every fourth layer full attention, and rotates it or not accordingly."""


def full_every_fourth(scope: Scope) -> list[str] | None:
    """Every fourth layer has full attention, starting with the first."""
    return None if scope.h.num_layers is None else kinds_of(periodic(FOURTH, scope.h.num_layers, first=0))


def of_kind(value: object, scope: Scope, *, slides: bool) -> int | None:
    """The number of heads of the first sliding-window layer, or of the first full-attention layer."""
    flags = scope.gguf("attention.sliding_window_pattern")
    heads = value if isinstance(value, list) else [value] * (scope.h.num_layers or 0)
    if not isinstance(flags, list):
        return None
    return next((as_int(n, scope.name) for n, flag in zip(heads, flags, strict=False) if bool(flag) is slides), None)


def _step_heads_from_gguf(value: object, scope: Scope) -> object:
    """The number of the full-attention layers."""
    found = of_kind(value, scope, slides=False)
    return found if found is not None else of_kind(value, scope, slides=True)


_SLIDING_HEADS = ("num_sliding_attention_heads", "swa_num_attention_heads")


def _step_heads_to_gguf(value: object, scope: Scope) -> list[int] | None:
    """Heads per layer, including MTP layers listed by layer type."""
    windowed = next((as_int(scope.h.extra[key], key) for key in _SLIDING_HEADS if key in scope.h.extra), None)
    full = as_int(value, scope.name)
    kinds = layer_kinds(scope.h.extra)
    if full is None or kinds is None:
        return None
    return [full if windowed is None or kind != "sliding_attention" else windowed for kind in kinds]


def _windowed_heads_from_gguf(value: object, scope: Scope) -> object:
    found = of_kind(scope.gguf("attention.head_count"), scope, slides=True)
    return DEFAULT if found is None else found


step_heads = Converter(_step_heads_to_gguf, _step_heads_from_gguf)
windowed_heads = Converter(nothing, _windowed_heads_from_gguf, lambda scope: scope.h.num_heads)


def fourth_full_to_gguf(value: object, scope: Scope) -> None:
    """Writes no key. Raises RefusedError unless exactly every fourth layer has full attention."""
    kinds = value if isinstance(value, list) else []
    if kinds and slides_of(kinds) != periodic(FOURTH, len(kinds)):
        raise RefusedError(
            f"{scope.name}: llama.cpp's {scope.row.gguf} has full attention in exactly every fourth layer"
        )


def _fourth_full(scope: Scope) -> list[str] | None:
    period = as_int(scope.config("global_attn_every_n_layers"), "global_attn_every_n_layers") or FOURTH
    return None if scope.h.num_layers is None else kinds_of(periodic(period, scope.h.num_layers))


every_fourth_full = Converter(fourth_full_to_gguf, lambda value, scope: _fourth_full(scope), _fourth_full)


def _both_kinds(slides: list[bool], scope: Scope) -> object:
    """Which layers have a sliding window, in every spelling of the family's configs."""
    kinds = ["sliding_attention" if one else "full_attention" for one in slides]
    if not any("hybrid_layer_pattern" in key.hf for key in scope.row.keys):
        return kinds
    return ConfigKeys(layer_types=kinds, hybrid_layer_pattern=[int(one) for one in slides])


def _hybrid_normalize(value: object, scope: Scope) -> object:
    """From words, else flags; by default the first and every sixth layer have full attention."""
    flags, n_layers = scope.h.extra.get("hybrid_layer_pattern"), scope.h.num_layers
    if isinstance(value, list):
        return _both_kinds([kind == "sliding_attention" for kind in value], scope)
    if flags is not None:
        return _both_kinds(flags_of(flags, "hybrid_layer_pattern"), scope)
    return DEFAULT if n_layers is None else _both_kinds([i > 0 and (i + 1) % 6 > 0 for i in range(n_layers)], scope)


def _hybrid_to_gguf(value: object, scope: Scope) -> list[bool] | None:
    return (
        None if value is None else [kind == "sliding_attention" for kind in value] if isinstance(value, list) else None
    )


hybrid_layers = Converter(
    _hybrid_to_gguf,
    lambda value, scope: DEFAULT if value is None else _both_kinds(flags_of(value, scope.key.gguf), scope),
    normalize=_hybrid_normalize,
)
