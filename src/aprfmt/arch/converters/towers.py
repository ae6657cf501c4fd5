"""Converters that many towers share."""

from __future__ import annotations

from itertools import pairwise

from aprfmt.arch.converter import DEFAULT, Converter, GgufKeys, Scope
from aprfmt.arch.fields import OTHER_FORMAT, as_float, as_int
from aprfmt.errors import RefusedError


def book_sizes(value: object, n_books: int) -> list[int]:
    """The number of entries of each codebook: a number, or a list whose last item repeats."""
    listed = [value] if type(value) is int else value if isinstance(value, list) else []
    if not listed or not all(type(size) is int and size > 0 for size in listed):
        raise RefusedError(f"codebook_size is {value!r:.40}, not a positive integer or a list of them")
    return [*listed, *[listed[-1]] * max(0, n_books - len(listed))][:n_books]


def _inverse_to_gguf(value: object, scope: Scope) -> object:
    ratio = as_float(value, scope.name) or 0.0
    if not 0 < ratio <= 1:
        raise RefusedError(f"{scope.name} is {value!r:.40}, not above 0 and at most 1")
    return int(1.0 / ratio)


def _inverse_from_gguf(value: object, scope: Scope) -> object:
    factor = as_int(value, scope.name)
    return 1 / factor if factor else DEFAULT


def _ratio_from_gguf(value: object, scope: Scope) -> object:
    width, ffn = (as_int(scope.gguf(f"vision.{name}_length"), name) for name in ("embedding", "feed_forward"))
    return ffn / width if width and ffn else DEFAULT


def ffn_by_ratio(width: str) -> Converter:
    """The width of an MLP: `mlp_ratio` times a size of the same config."""

    def derive(scope: Scope) -> object:
        ratio = as_float(scope.config(scope.name.rpartition(".")[0] + ".mlp_ratio"), scope.name)
        size = scope.size(width)
        return round(size * ratio) if size and ratio else None

    return Converter(derive=derive)


def _square_to_gguf(value: object, scope: Scope) -> object:
    if isinstance(value, list):
        raise RefusedError(f"{scope.name} is {value!r:.40}; llama.cpp supports squares only", hint=OTHER_FORMAT)
    return value


def _square_normalize(value: object, scope: Scope) -> object:
    equal = isinstance(value, list) and len(value) == 2 and value[0] == value[1]
    return value[0] if isinstance(value, list) and equal else DEFAULT


square = Converter(_square_to_gguf, normalize=_square_normalize)
"""A side, which a config.json may state as two equal numbers, height and width."""
inverse = Converter(_inverse_to_gguf, _inverse_from_gguf)
ratio_of_ffn = Converter(from_gguf=_ratio_from_gguf)


def beside(scope: Scope, name: str) -> int | None:
    """The size `name` of the config.json object that contains the key."""
    return scope.size(f"{scope.name.rpartition('.')[0]}.{name}")


def _activation_to_gguf(value: object, scope: Scope) -> object:
    word = str(value)
    if word in ("silu", "swish"):
        return GgufKeys({"use_silu": ("bool", True)})
    if word.startswith("gelu"):
        return GgufKeys({"use_gelu": ("bool", True)})
    raise RefusedError(f"{scope.name} is {word!r:.40}; llama.cpp supports gelu and silu here", hint=OTHER_FORMAT)


def _activation_from_gguf(value: object, scope: Scope) -> object:
    if scope.gguf("use_silu"):
        return "silu"
    return "gelu" if scope.gguf("use_gelu") else DEFAULT


def _pattern_to_gguf(value: object, scope: Scope) -> object:
    layers = value if isinstance(value, list) else []
    numbers = [as_int(item, scope.name) or 0 for item in layers]
    if not numbers:
        raise RefusedError(f"{scope.name} is missing, so the full-attention layers are unknown")
    step = numbers[0] + 1
    if any(b - a != step for a, b in pairwise(numbers)):
        raise RefusedError(
            f"{scope.name} is {numbers}; llama.cpp supports evenly spaced full-attention layers only", hint=OTHER_FORMAT
        )
    return step


def _pattern_from_gguf(value: object, scope: Scope) -> object:
    step, depth = as_int(value, scope.name), beside(scope, "depth")
    return list(range(step - 1, depth, step)) if step and depth else DEFAULT


activation = Converter(_activation_to_gguf, _activation_from_gguf)
window_pattern = Converter(_pattern_to_gguf, _pattern_from_gguf)
