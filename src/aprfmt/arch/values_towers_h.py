"""Converters of the keys of towers whose layers are not all alike."""

from __future__ import annotations

from aprfmt.arch.converter import Converter, Scope
from aprfmt.errors import RefusedError


def _counts_to(value: object, scope: Scope) -> object:
    """Numbers of experts a layer; a config says -1 where there are none."""
    if not isinstance(value, list) or not all(type(count) is int for count in value):
        raise RefusedError(f"{scope.name} is {value!r:.40}, not a list of numbers of experts")
    return [max(0, count) for count in value]


H_CONVERTERS: dict[str, Converter] = {"counts": Converter(_counts_to)}
