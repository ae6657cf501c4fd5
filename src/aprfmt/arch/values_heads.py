"""Converters of what a network has on top: the outputs of a classifier, pooling, layers behind it."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, Scope, default, nothing, words
from aprfmt.arch.fields import as_int
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.errors import CorruptError, LimitError
from aprfmt.limits import MAX_LABELS

POOLING = words({"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4})


def _labels(h: Hyperparams) -> dict[str, str] | None:
    """Names of a classifier's outputs by number, in order; None where the config has none."""
    value = h.extra.get("id2label")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise CorruptError("id2label is not an object")
    return {str(key): str(value[key]) for key in sorted(value, key=lambda key: str(key).zfill(9))}


def _labels_to(value: object, scope: Scope) -> list[str]:
    """A name an output: by their number the runtime knows how many there are. transformers makes up those of two."""
    labels = _labels(scope.h)
    n = as_int(scope.h.extra.get("num_labels"), "num_labels") or 0
    if n > MAX_LABELS:
        raise LimitError(f"num_labels is {n}; the limit is {MAX_LABELS}")
    return list(labels.values()) if labels else [f"LABEL_{i}" for i in range(n)]


def _labels_from(value: object, scope: Scope) -> object:
    return {str(i): x for i, x in enumerate(value)} if isinstance(value, list) else DEFAULT


def _n_labels_fill(scope: Scope) -> int:
    """As many as have names; without any, what transformers takes, or the runtime of a GGUF."""
    return len(_labels(scope.h) or ()) or (1 if scope.kv else 2)


def _label_ids_fill(scope: Scope) -> dict[str, int] | None:
    labels = _labels(scope.h)
    return None if labels is None else {name: i for i, name in enumerate(labels.values())}


_BOTH = ("dense_2_in", "dense_2_out", "dense_3_in", "dense_3_out")


def _both_dense_to(value: object, scope: Scope) -> object:
    """The width of one of two layers behind the pooling, where both are as the runtime computes them."""
    extra = scope.h.extra
    whole = all(extra.get(name) for name in _BOTH) and not (extra.get("dense_2_bias") or extra.get("dense_3_bias"))
    return value if whole else None


def _pooling_of_modules_to(value: object, scope: Scope) -> object:
    """The number of a pooling that a folder's modules name; other keys of this name are none of its modules."""
    return POOLING.to_gguf(value, scope) if isinstance(value, str) else None


def _as_wide_from(value: object, scope: Scope) -> int | None:
    return scope.h.hidden_size if scope.gguf("embedding_length_out") else None


HEADS: dict[str, Converter] = {
    "labels": Converter(_labels_to, _labels_from),
    "n_labels": Converter(nothing, default, _n_labels_fill),
    "pooling": POOLING,
    "pooling_avg": replace(POOLING, settle=lambda value, scope: "mean" if value == "avg" else DEFAULT),
    "pooling_of_modules": replace(POOLING, to_gguf=_pooling_of_modules_to),
    "both_dense": Converter(_both_dense_to),
    "as_wide": Converter(nothing, _as_wide_from),
    "label_ids": Converter(nothing, default, _label_ids_fill),
}
"""By name, for aprfmt.arch.values."""
