"""Converters of classifier heads and pooling."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, Scope, default, nothing, words
from aprfmt.arch.fields import as_int
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.errors import CorruptError, LimitError
from aprfmt.limits import MAX_LABELS

pooling = words({"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4})


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


def _n_labels_derive(scope: Scope) -> int:
    """As many as have names; without any, what transformers takes, or the runtime of a GGUF."""
    return len(_labels(scope.h) or ()) or (1 if scope.kv else 2)


def _label_ids_derive(scope: Scope) -> dict[str, int] | None:
    labels = _labels(scope.h)
    return None if labels is None else {name: i for i, name in enumerate(labels.values())}


def _pooling_of_modules_to(value: object, scope: Scope) -> object:
    """The number of a pooling that a folder's modules name; other keys of this name are none of its modules."""
    return pooling.to_gguf(value, scope) if isinstance(value, str) else None


labels = Converter(_labels_to, _labels_from)

n_labels = Converter(nothing, default, _n_labels_derive)

pooling_of_modules = replace(pooling, to_gguf=_pooling_of_modules_to)

label_ids = Converter(nothing, default, _label_ids_derive)
