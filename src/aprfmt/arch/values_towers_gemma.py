"""Converters of the keys of Gemma's towers."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Convert, Converter, Scope, or_default, same
from aprfmt.arch.fields import as_int
from aprfmt.errors import RefusedError

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


_HEIGHT = "preprocessor_config.size.height"


def _by_tokens_to(value: object, scope: Scope) -> object:
    """llama.cpp counts the tokens of an image as its height by this."""
    tokens, height = as_int(value, scope.name), scope.size(_HEIGHT)
    if not tokens or not height or height % tokens:
        raise RefusedError(
            f"{scope.name} is {value!r:.20}, which does not divide the height {height!r:.20} of an image",
            hint="check preprocessor_config.json; published ones say 256 of 768",
        )
    return height // tokens


def _by_tokens_from(value: object, scope: Scope) -> object:
    patch, height = as_int(value, scope.name), scope.gguf("vision.image_size")
    return height // patch if patch and isinstance(height, int) else DEFAULT


GEMMA_CONVERTERS: dict[str, Converter] = {
    "unless_three": Converter(_unless_three, or_default),
    "four_times": Converter(_four_times, _quarter),
    "height_by_tokens": Converter(_by_tokens_to, _by_tokens_from),
    "as_many_heads": Converter(same, _as_many_heads),
    **{
        f"has_tensor:{name}": Converter(same, _has(name))
        for name in ("v.std_bias", "v.blk.0.attn_q.input_min", "a.blk.0.attn_q.input_min")
    },
}
