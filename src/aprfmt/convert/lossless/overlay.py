"""What a user edited, laid over what a source file said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def overlay(base: Mapping[str, S], then: Mapping[str, T], now: Mapping[str, T]) -> dict[str, S | T]:
    """`base` with only those keys changed that differ between `then` and `now`.

    `base` is what a source file said, `then` what this package derives from it, `now` what it derives after the
    user's edits: so edits take effect, and whatever we do not model stays as the source had it.
    """
    out: dict[str, S | T] = dict(base)
    for key, value in now.items():
        if key not in then or then[key] != value:
            out[key] = value
    for key in then:
        if key not in now:
            out.pop(key, None)
    return out
