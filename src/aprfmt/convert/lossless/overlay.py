"""What a user edited, laid over what a source file said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def overlay(base: Mapping[str, Any], then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with only those keys changed that differ between `then` and `now`.

    `base` is what a source file said, `then` what this package derives from it, `now` what it derives after the
    user's edits: so edits take effect, and whatever we do not model stays as the source had it.
    """
    out = dict(base)
    for key, value in now.items():
        if key not in then or then[key] != value:
            out[key] = value
    for key in then:
        if key not in now:
            out.pop(key, None)
    return out
