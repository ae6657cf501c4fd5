"""Converters of the keys of towers that hear in codes."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope
from aprfmt.arch.fields import as_int
from aprfmt.errors import RefusedError

_WHOLE, _WINDOW = -1, 0
"""How a GGUF marks layers that attend to all of a sound, and those that attend to what is near."""


def _numbers(value: object, scope: Scope) -> list[int]:
    """A list of numbers. Raises RefusedError for anything else."""
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise RefusedError(f"{scope.name} is {value!r:.40}, not a list of whole numbers")
    return list(value)


def _beside(scope: Scope, name: str) -> str:
    return f"{scope.name.rpartition('.')[0]}.{name}"


def book_sizes(value: object, n_books: int) -> list[int]:
    """How many entries each book of a quantizer has, by what a config says: a number, or a list whose last goes on."""
    listed = [value] if type(value) is int else value if isinstance(value, list) else []
    if not listed or not all(type(size) is int and size > 0 for size in listed):
        raise RefusedError(f"codebook_size is {value!r:.40}, not how many entries the books have")
    return [*listed, *[listed[-1]] * max(0, n_books - len(listed))][:n_books]


def _book_sizes_to(value: object, scope: Scope) -> object:
    return book_sizes(value, scope.size(_beside(scope, "num_quantizers")) or 0)


def _whole_to(value: object, scope: Scope) -> object:
    """Every so many layers the last attends to all of the sound."""
    step, depth = as_int(value, scope.name) or 1, scope.size(_beside(scope, "encoder_layers")) or 0
    return [_WHOLE if layer % step == step - 1 else _WINDOW for layer in range(depth)]


def _whole_from(value: object, scope: Scope) -> object:
    marks = _numbers(value, scope)
    step = marks.index(_WHOLE) + 1 if _WHOLE in marks else len(marks) + 1
    if [_WHOLE if layer % step == step - 1 else _WINDOW for layer in range(len(marks))] != marks:
        raise RefusedError(
            f"{scope.row.gguf}.{scope.key.gguf} is {marks!r:.60}: layers that attend to all at unequal distances",
            hint="no config.json of the family can say that; check the program that wrote the GGUF",
        )
    return ConfigKeys({scope.name: step, _beside(scope, "hybrid_attention"): True})


def _behind_to(value: object, scope: Scope) -> object:
    sides = _numbers(value, scope)
    if len(sides) != 2 or sides[0] <= 0 or sides[1] != 0:
        raise RefusedError(
            f"{scope.name} is {value!r:.40}; llama.cpp's network looks back alone, [number, 0]",
            hint="an .apr or a folder can hold the model: -o NAME.apr, or -o NAME --format hf",
        )
    return sides[0]


def _behind_from(value: object, scope: Scope) -> object:
    side = as_int(value, scope.name)
    return [side, 0] if side is not None else DEFAULT


_BOOKS = "audio_tokenizer.num_quantizers"


def _channels(value: object, scope: Scope) -> object:
    channels, books = as_int(value, scope.name), scope.size(_BOOKS)
    if channels is not None and books is not None and channels != books:
        raise RefusedError(
            f"{scope.name} is {channels}, and audio_tokenizer/config.json has {books} codebooks",
            hint="the files belong to different models; fetch the repository again",
        )
    return DEFAULT if channels is None else channels


CODES_CONVERTERS: dict[str, Converter] = {
    "codebook_sizes": Converter(_book_sizes_to),
    "whole_after_windows": Converter(_whole_to, _whole_from),
    "channels_of_books": Converter(settle=_channels, fill=lambda scope: scope.size(_BOOKS)),
    "behind_only": Converter(_behind_to, _behind_from),
}
