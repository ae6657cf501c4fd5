"""Converters of the keys of Gemma's towers."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Convert, Converter, Scope, or_default, same
from aprfmt.arch.fields import as_int

_POOLED = 3
"""How many patches llama.cpp pools in each direction where a GGUF does not say it."""


def _unless_three(value: object, scope: Scope) -> object:
    return None if value == _POOLED else value


def _four_times(value: object, scope: Scope) -> object:
    width = as_int(value, scope.name)
    return 4 * width if width is not None else None


def _quarter(value: object, scope: Scope) -> object:
    ffn = as_int(value, scope.name)
    return ffn // 4 if ffn else DEFAULT


def _as_many_heads(value: object, scope: Scope) -> object:
    return or_default(scope.gguf("vision.attention.head_count"), scope)


def _has(name: str) -> Convert:
    return lambda value, scope: name in scope.names if scope.names else DEFAULT


G_CONVERTERS: dict[str, Converter] = {
    "unless_three": Converter(_unless_three, or_default),
    "four_times": Converter(_four_times, _quarter),
    "as_many_heads": Converter(same, _as_many_heads),
    **{
        f"has_tensor:{name}": Converter(same, _has(name))
        for name in ("v.std_bias", "v.blk.0.attn_q.input_min", "a.blk.0.attn_q.input_min")
    },
}
