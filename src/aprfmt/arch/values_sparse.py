"""Converters of networks that attend to chosen positions, or to latent vectors of several kinds. See arch.values."""

from __future__ import annotations

import math

from aprfmt.arch.converter import DEFAULT, Convert, Converter, Scope, default, nothing
from aprfmt.arch.fields import as_int
from aprfmt.arch.grammar import layer_kinds
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


def _hy_indexers(value: object, scope: Scope) -> object:
    """The first layer, and then every fourth from the second on, unless a config says it."""
    n_layers = scope.h.num_layers
    if value is not None or n_layers is None:
        return DEFAULT
    return [_OWN if i == 0 or (i - 1) % 4 == 0 else _SHARED for i in range(n_layers)]


def _own_indexers_from(value: object, scope: Scope) -> object:
    return [_OWN if flag else _SHARED for flag in value] if isinstance(value, list) else DEFAULT


def _latent_or_linear_settle(value: object, scope: Scope) -> object:
    """Every fourth layer attends unless it is said; transformers says in this word that an indexer chooses."""
    if isinstance(value, list):
        return ["full_attention" if kind == "indexed_attention" else kind for kind in value]
    n_layers = scope.h.num_layers
    return DEFAULT if n_layers is None else [_ATTENDS if i % 4 == 3 else _LINEAR for i in range(n_layers)]


def _latent_or_linear_from(value: object, scope: Scope) -> object:
    heads = scope.gguf("attention.head_count_kv")
    return [_ATTENDS if n else _LINEAR for n in heads] if isinstance(heads, list) else DEFAULT


_ATTENDS, _LINEAR = "full_attention", "linear_attention"


def _indexed_settle(value: object, scope: Scope) -> object:
    """transformers says in a word of its own that an indexer chooses."""
    if not isinstance(value, list):
        return DEFAULT
    return ["full_attention" if kind == "indexed_attention" else kind for kind in value]


def _indexed_to(value: object, scope: Scope) -> list[bool] | None:
    return [kind == "sliding_attention" for kind in value] if isinstance(value, list) else None


def _indexed_from(value: object, scope: Scope) -> object:
    if not isinstance(value, list):
        return DEFAULT
    return ["sliding_attention" if flag else "full_attention" for flag in value]


def _without_window_to(value: object, scope: Scope) -> list[bool] | None:
    kinds = layer_kinds(scope.h.extra)
    return None if kinds is None else [kind != "sliding_attention" for kind in kinds]


def _latent_scales(scope: Scope, applied: object) -> object:
    """What the latent vectors are multiplied by behind their norms, which a GGUF has in the weights of these."""
    ranks = {"q_lora_scale": "q_lora_rank", "kv_lora_scale": "kv_lora_rank", "swa_kv_lora_scale": "swa_kv_lora_rank"}
    hidden, extra = scope.h.hidden_size or 0, scope.h.extra
    for name, key in ranks.items():
        rank = as_int(extra.get(key), key)
        extra[name] = math.sqrt(hidden / rank) if applied and hidden and rank else 1.0
    return bool(applied)


def _swa_sum(*names: str) -> Convert:
    def to_gguf(value: object, scope: Scope) -> int | None:
        numbers = [as_int(scope.h.extra.get(name), name) for name in names]
        return None if None in numbers else sum(n or 0 for n in numbers)

    return to_gguf


def _swa_nope_from(value: object, scope: Scope) -> object:
    length, rotated = as_int(value, scope.key.gguf), as_int(scope.gguf("rope.dimension_count"), "rope.dimension_count")
    return DEFAULT if length is None or rotated is None or rotated > length else length - rotated


SPARSE: dict[str, Converter] = {
    "hy_indexers": Converter(_indexers_to, _indexers_from, settle=_hy_indexers),
    "own_indexers": Converter(_indexers_to, _own_indexers_from, settle=_indexers_settle),
    "latent_or_linear": Converter(nothing, _latent_or_linear_from, settle=_latent_or_linear_settle),
    "indexed_layers": Converter(_indexed_to, _indexed_from, settle=_indexed_settle),
    "indexed_without_window": Converter(_without_window_to, default),
    "latent_scales": Converter(
        nothing,
        lambda value, scope: _latent_scales(scope, True),
        settle=lambda value, scope: _latent_scales(scope, value),
    ),
    "swa_key_width": Converter(_swa_sum("swa_kv_lora_rank", "qk_rope_head_dim"), default),
    "swa_value_width": Converter(_swa_sum("swa_kv_lora_rank"), default),
    "swa_key_length": Converter(_swa_sum("swa_qk_nope_head_dim", "qk_rope_head_dim"), _swa_nope_from),
    "turned_keys": Converter(_turned_keys_to),
    "glm_indexers": Converter(_indexers_to, _indexers_from, settle=_indexers_settle),
}
"""What a Key's `via` names, as in arch.values.CONVERTERS."""
