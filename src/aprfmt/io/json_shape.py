"""The shape of parsed JSON that somebody else wrote: each function returns its value, or raises TypeError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def mapping_of(value: object) -> Mapping[str, object]:
    """The object."""
    if not isinstance(value, dict):
        raise TypeError
    return value


def list_of(value: object) -> Sequence[object]:
    """The array."""
    if not isinstance(value, list):
        raise TypeError
    return value
