"""Converters of decoders whose configs count in ways of their own; `arch.values` has the others, and the one table."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.fields import as_int
from aprfmt.errors import RefusedError

# --- latent attention ---


def _given_to(value: object, scope: Scope) -> object:
    if value is None:
        raise RefusedError(
            f"{scope.name} is null: llama.cpp's {scope.row.gguf} knows only networks that have it",
            hint="an .apr or a folder can hold the model: -o NAME.apr, or -o NAME --format hf",
        )
    return value


def _nope_and_rope_to(value: object, scope: Scope) -> int | None:
    parts = as_int(value, scope.name), scope.h.head_dim
    return None if parts[0] is None or parts[1] is None else parts[0] + parts[1]


def _nope_from(value: object, scope: Scope) -> object:
    length, rotated = as_int(value, scope.key.gguf), scope.h.head_dim
    return length - rotated if length and rotated and length >= rotated else DEFAULT


def _odd_length_to(value: object, scope: Scope) -> object:
    """The length of a value where it is not what llama.cpp takes it for when nothing is said."""
    return None if value == scope.h.plain_head_dim else value


def _plain_head(scope: Scope) -> int | None:
    return scope.h.plain_head_dim


REMOTE: dict[str, Converter] = {
    "given": Converter(_given_to),
    "nope_and_rope": Converter(_nope_and_rope_to, _nope_from),
    "odd_value_length": Converter(_odd_length_to, fill=_plain_head),
}
