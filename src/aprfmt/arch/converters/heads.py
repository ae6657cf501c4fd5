"""Converters of classifier heads and pooling."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import Scope, words

pooling = words({"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4})


def _pooling_of_modules_to_gguf(value: object, scope: Scope) -> object:
    """The enum value of the pooling type in a folder's modules; other keys of this name are ignored."""
    return pooling.to_gguf(value, scope) if isinstance(value, str) else None


pooling_of_modules = replace(pooling, to_gguf=_pooling_of_modules_to_gguf)
