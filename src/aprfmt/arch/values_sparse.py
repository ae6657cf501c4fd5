"""Converters of networks that attend to chosen positions, or have many experts beside windows. See arch.values."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.fields import as_int
from aprfmt.errors import CorruptError, RefusedError

_OWN, _SHARED = "full", "shared"
_LONG = 1 << 20
"""From so many positions on llama.cpp takes a GLM for 5.2, where few layers have an indexer, unless a key says more."""


_TURN = 64
"""Rows of the smallest matrix by which the runtime turns an indexer's queries and keys."""


def _turned_keys_to(value: object, scope: Scope) -> object:
    if isinstance(value, int) and value % _TURN:
        raise RefusedError(f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} computes multiples of {_TURN} only")
    return value


def _glm_5_2(n_layers: int) -> list[str]:
    return [_OWN if i < 2 or (i - 2) % 4 == 0 else _SHARED for i in range(n_layers)]


def _indexers_to(value: object, scope: Scope) -> list[bool] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not set(map(str, value)) <= {_OWN, _SHARED}:
        raise CorruptError(f"{scope.name} may only have the words {_OWN!r} and {_SHARED!r}")
    return [kind == _OWN for kind in value]


def _indexers_from(value: object, scope: Scope) -> object:
    if isinstance(value, list):
        return [_OWN if flag else _SHARED for flag in value]
    n_layers = scope.h.num_layers or 0
    return _glm_5_2(n_layers) if (scope.h.max_position_embeddings or 0) >= _LONG else [_OWN] * n_layers


def _indexers_settle(value: object, scope: Scope) -> object:
    """By a pattern of letters (F full, S shared), else by a step and the layer from which on it counts."""
    extra, n_layers = scope.h.extra, scope.h.num_layers
    pattern = extra.pop("index_topk_pattern", None)
    names = ("index_topk_freq", "index_skip_topk_offset")
    step, start = (as_int(extra.pop(name, None), name) for name in names)
    if value is not None or n_layers is None:
        return DEFAULT
    if isinstance(pattern, str):
        return [_OWN if letter == "F" else _SHARED for letter in pattern]
    if pattern is not None:
        return pattern
    start = 2 if start is None else start
    return [_SHARED if max(i - start + 1, 0) % max(step or 1, 1) else _OWN for i in range(n_layers)]


SPARSE: dict[str, Converter] = {
    "turned_keys": Converter(_turned_keys_to),
    "glm_indexers": Converter(_indexers_to, _indexers_from, settle=_indexers_settle),
}
"""What a Key's `via` names, as in arch.values.CONVERTERS."""
