"""Converters of sparse attention: which layers have an indexer."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.fields import as_int
from aprfmt.errors import CorruptError, RefusedError

OWN, SHARED = "full", "shared"
_LONG = 1 << 20
"""Context length from which llama.cpp takes a GLM for 5.2, where few layers have an indexer, unless a key says
otherwise.
"""
_TURN = 64
"""Rows of the smallest matrix with which llama.cpp rotates an indexer's queries and keys."""


def _turned_keys_to_gguf(value: object, scope: Scope) -> object:
    if isinstance(value, int) and value % _TURN:
        raise RefusedError(f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} supports multiples of {_TURN} only")
    return value


def _glm_5_2(n_layers: int) -> list[str]:
    return [OWN if i < 2 or (i - 2) % 4 == 0 else SHARED for i in range(n_layers)]


def indexers_to_gguf(value: object, scope: Scope) -> list[bool] | None:
    """Whether each layer has an indexer of its own, from the words of the config. Raises CorruptError."""
    if value is None:
        return None
    if not isinstance(value, list) or not set(map(str, value)) <= {OWN, SHARED}:
        raise CorruptError(f"{scope.name} may contain only {OWN!r} and {SHARED!r}")
    return [kind == OWN for kind in value]


def indexers_from_gguf(value: object, scope: Scope) -> object:
    """A word per layer; without the list GLM 5.2's pattern if the context is long, else an indexer in each."""
    if isinstance(value, list):
        return [OWN if flag else SHARED for flag in value]
    n_layers = scope.h.num_layers or 0
    return _glm_5_2(n_layers) if (scope.h.max_position_embeddings or 0) >= _LONG else [OWN] * n_layers


def indexers_normalize(value: object, scope: Scope) -> object:
    """From a pattern of letters (F full, S shared), else from a step and an offset."""
    extra, n_layers = scope.h.extra, scope.h.num_layers
    pattern = extra.pop("index_topk_pattern", None)
    names = ("index_topk_freq", "index_skip_topk_offset")
    step, start = (as_int(extra.pop(name, None), name) for name in names)
    if value is not None or n_layers is None:
        return DEFAULT
    if isinstance(pattern, str):
        return [OWN if letter == "F" else SHARED for letter in pattern]
    if pattern is not None:
        return pattern
    start = 2 if start is None else start
    return [SHARED if max(i - start + 1, 0) % max(step or 1, 1) else OWN for i in range(n_layers)]


turned_keys = Converter(_turned_keys_to_gguf)
