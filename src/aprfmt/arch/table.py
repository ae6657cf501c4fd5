"""The architecture table: every family that this package knows, and how it is found."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from aprfmt.arch.row import HEAD, OPTIONAL, REQUIRED, Architecture, Key, TensorRow
from aprfmt.arch.rows import (
    bert,
    delta,
    encoder,
    gemma,
    gpt,
    hybrid,
    llama,
    mla,
    moe,
    moe_shared,
    nemotron_h,
    qwen,
    ssm,
    vision,
)
from aprfmt.arch.rows import dense as partial

__all__ = [
    "ARCHITECTURES",
    "HEAD",
    "OPTIONAL",
    "REQUIRED",
    "Architecture",
    "Key",
    "TensorRow",
    "find",
    "find_gguf",
    "lookup",
    "nearest",
]

_FILES = (
    llama,
    qwen,
    gemma,
    partial,
    moe,
    moe_shared,
    mla,
    gpt,
    bert,
    encoder,
    ssm,
    delta,
    hybrid,
    nemotron_h,
    vision,
)

ARCHITECTURES: dict[str, Architecture] = {row.id: row for file in _FILES for row in file.ROWS}
"""Row id -> row."""


def find(
    *,
    hf_class: str | None = None,
    model_type: str | None = None,
    gguf: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Architecture | None:
    """The row that a class name, else a model type, else a GGUF architecture names; None if none is known.

    Of rows that share a class `config` (with `layer_types`) decides.
    """
    for key, index in ((hf_class, _index("hf_classes")), (model_type, _index("model_types"))):
        rows = index.get(key, []) if key is not None else []
        if rows:
            return next((row for row in rows if row.hf_when and _told(row.hf_when, config or {})), rows[0])
    return find_gguf({"general.architecture": gguf}) if gguf is not None else None


def lookup(word: str) -> Architecture | None:
    """The row that a user means by a row id, a class, a model type or a GGUF architecture."""
    return ARCHITECTURES.get(word) or find(hf_class=word, model_type=word, gguf=word)


def nearest(word: str) -> str | None:
    """The name that `lookup` knows and that looks most like `word`; None where nothing does."""
    from difflib import get_close_matches

    known = [
        name
        for row in ARCHITECTURES.values()
        for name in (row.id, row.gguf, *row.hf_classes, *row.model_types)
    ]
    return next(iter(get_close_matches(word, known, n=1)), None)


def find_gguf(kv: Mapping[str, Any], tensor_names: Collection[str] | None = None) -> Architecture | None:
    """The row of a GGUF with these key-value pairs; of rows that share a name, the one whose `when` holds."""
    name = kv.get("general.architecture")
    rows = [row for row in ARCHITECTURES.values() if row.gguf == name]
    special = [row for row in rows if row.when and _holds(row.when, kv, tensor_names)]
    plain = [row for row in rows if not row.when]
    return next(iter(special + plain), None)


@cache
def _index(field: str) -> dict[str, list[Architecture]]:
    """Names of a field -> rows, those without `hf_when` first."""
    index: dict[str, list[Architecture]] = {}
    for row in sorted(ARCHITECTURES.values(), key=lambda row: bool(row.hf_when)):
        for name in getattr(row, field):
            index.setdefault(name, []).append(row)
    return index


def _told(hf_when: str, config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types") or config.get("layers_block_type")
    wanted = set(hf_when.removeprefix("!").split("|"))
    found = isinstance(kinds, list) and any(isinstance(kind, str) and kind in wanted for kind in kinds)
    return isinstance(kinds, list) and found != hf_when.startswith("!")


def _holds(when: str, kv: Mapping[str, Any], tensor_names: Collection[str] | None) -> bool:
    if "|" in when:
        return any(_holds(part, kv, tensor_names) for part in when.split("|"))
    if when.startswith("has:"):
        return any(name.endswith(when[4:]) for name in tensor_names or ())
    if when.startswith("!"):
        return tensor_names is not None and bool(tensor_names) and when[1:] not in tensor_names
    key, _, wanted = when.partition("=")
    prefix = "" if key.startswith(("general.", "tokenizer.")) else f"{kv.get('general.architecture')}."
    value = kv.get(prefix + key)
    return str(value) == wanted if wanted else bool(value)
