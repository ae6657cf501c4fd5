"""The architecture table: every family, and how it is recognized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Generic, TypeVar

from aprfmt.arch.families import listed, rows_of, towers_of
from aprfmt.arch.grammar import is_config_of, is_gguf_of
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Architecture, Listed, Tower, Wrapper
from aprfmt.arch.wrappers import WRAPPERS

LISTED: Mapping[str, Listed] = listed()
"""Row id -> how the row is recognized, in the order of the table."""

_A = TypeVar("_A", bound=Architecture)


class _Rows(Mapping[str, _A], Generic[_A]):
    """The rows themselves; a row's file is imported on demand."""

    def __init__(self, load: Callable[[str], tuple[_A, ...]], *, towers: bool = False) -> None:
        self._load, self._towers = load, towers

    def __getitem__(self, name: str) -> _A:
        return next(row for row in self._load(listed(towers=self._towers)[name].file) if row.id == name)

    def __iter__(self) -> Iterator[str]:
        return iter(listed(towers=self._towers))

    def __len__(self) -> int:
        return len(listed(towers=self._towers))

    def __contains__(self, name: object) -> bool:
        return name in listed(towers=self._towers)


ARCHITECTURES: Mapping[str, Architecture] = _Rows(rows_of)
TOWERS: Mapping[str, Tower] = _Rows(towers_of, towers=True)
"""Row id -> row."""


def find(
    *,
    hf_class: str | None = None,
    model_type: str | None = None,
    gguf: str | None = None,
    config: Mapping[str, object] | None = None,
    part_class: str | None = None,
    part_type: str | None = None,
) -> Architecture | None:
    """The row of a class name, else a model type, else a GGUF architecture; None if all are unknown.

    `config` (a config.json) decides between rows that share a class. `part_class` and `part_type` are the class and the
    model type of the nested language model config of a wrapper: they take precedence over the wrapper's, and if they
    are unknown, the result is None.
    """
    wrapper = wrapper_of(hf_class, model_type)
    for key, field in (
        (hf_class, "hf_classes"),
        (part_class, "hf_classes"),
        (part_type, "model_types"),
        (model_type, "model_types"),
    ):
        rows = _index(field).get(key, []) if key is not None else []
        if rows:
            row = next((row for row in rows if row.hf_when and is_config_of(row, config or {})), rows[0])
            return ARCHITECTURES[wrapper.instead.get(row.id, row.id) if wrapper is not None else row.id]
    if wrapper is not None and part_class is None and part_type in (None, model_type):
        return ARCHITECTURES[wrapper.row]
    return find_gguf({"general.architecture": gguf}) if gguf is not None else None


def wrapper_of(hf_class: str | None, model_type: str | None = None) -> Wrapper | None:
    """The wrapper of that class, or of that model type if the class has none."""
    return _wrappers("hf_class").get(hf_class or "") or _wrappers("model_type").get(model_type or "")


def classes_of(row: Architecture) -> tuple[str, ...]:
    """Every class that may contain a network of the row: its own, then those of wrappers around it."""
    return (*row.hf_classes, *(w.hf_class for w in WRAPPERS if row.id in (w.row, *w.instead.values())))


def row_of(h: Hyperparams, *, kv: Mapping[str, object] | None, tensor_names: Collection[str]) -> Architecture | None:
    """The row of an opened model with these hyper-parameters; `kv` are the keys of a GGUF, None of anything else."""
    if kv is not None:
        return find_gguf(kv, tensor_names)
    return ARCHITECTURES.get(h.architecture or "") or find(
        hf_class=h.hf_architecture, model_type=h.hf_model_type, gguf=h.architecture
    )


def lookup(word: str) -> Architecture | None:
    """The row that `word` names: a row id, a class, a model type or a GGUF architecture."""
    return ARCHITECTURES.get(word) or find(hf_class=word, model_type=word, gguf=word)


def nearest(word: str) -> str | None:
    """The most similar known name; None if none is similar."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, list(_names()), n=1)), None)


def _names() -> Iterator[str]:
    for row in LISTED.values():
        yield from (row.id, row.gguf, *row.hf_classes, *row.model_types)
    for wrapper in WRAPPERS:
        yield from filter(None, (wrapper.hf_class, wrapper.model_type))


def find_gguf(kv: Mapping[str, object], tensor_names: Collection[str] | None = None) -> Architecture | None:
    """The row of a GGUF with these key-value pairs; of rows that share a name, the one whose `when` holds, and of
    several the one with most conditions.
    """
    name = kv.get("general.architecture")
    rows = [row for row in LISTED.values() if row.gguf == name]
    special = [row for row in rows if row.when and is_gguf_of(row, kv, tensor_names)]
    plain = (row for row in rows if not row.when)
    found = max(special, key=lambda row: row.when.count("&")) if special else next(plain, None)
    return ARCHITECTURES[found.id] if found is not None else None


@cache
def _index(field: str) -> dict[str, list[Listed]]:
    """Names in a field -> rows, those without `hf_when` first."""
    index: dict[str, list[Listed]] = {}
    for row in sorted(LISTED.values(), key=lambda row: bool(row.hf_when)):
        for name in getattr(row, field):
            index.setdefault(name, []).append(row)
    return index


@cache
def _wrappers(field: str) -> dict[str, Wrapper]:
    return {name: wrapper for wrapper in WRAPPERS if (name := getattr(wrapper, field))}
