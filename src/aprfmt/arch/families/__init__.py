"""Families: each file has a family's architectures, its converters and its towers.

index.jsonl lists how each architecture is recognized, so that only the file in use is imported; `python
tools/row_index.py` writes it, and a test compares it.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NotRequired, TypedDict

from aprfmt.arch.blocks.encoder import POOLED
from aprfmt.arch.row import Architecture, Key, Listed, Tower

INDEX = Path(__file__).with_name("index.jsonl")
DEFAULTS = Path(__file__).with_name("defaults.jsonl")
"""The meaning of absent config.json keys: a line for each architecture and model type; see tools/defaults.py."""

_FIRST = "llama"
"""If several architectures match a checkpoint, this family comes first."""

_TOWER = '"tower": true'


class _DefaultsLine(TypedDict):
    """A line of defaults.jsonl."""

    row: str
    model_type: str
    values: dict[str, object]
    rotates: NotRequired[str]


@cache
def listed(*, towers: bool = False) -> dict[str, Listed]:
    """Id -> how an architecture or tower is recognized; imports no family."""
    lines = (line for line in INDEX.read_text("utf-8").splitlines() if (_TOWER in line) == towers)
    return {row.id: row for row in (Listed(**line) for line in json.loads(f"[{','.join(lines)}]"))}


def index_of_rows() -> str:
    """The text of index.jsonl: a line for each architecture and tower, without empty fields."""
    files = [path.stem for path in INDEX.parent.glob("*.py") if path.stem != "__init__"]
    files.sort(key=lambda file: (file != _FIRST, file))
    lines = [_line(file, row) for file in files for row in rows_of(file)]
    lines += [_line(file, row) for file in files for row in towers_of(file)]
    return "".join(json.dumps({name: value for name, value in line.items() if value}) + "\n" for line in lines)


def _line(file: str, row: Architecture) -> dict[str, object]:
    own: dict[str, object] = {
        "file": file, "embedding": _hf_name(row, "token_embd.weight"), "head": _hf_name(row, "output.weight"),
        "tower": isinstance(row, Tower),
    }
    return {field.name: own.get(field.name) or getattr(row, field.name, "") for field in fields(Listed)}


def _hf_name(row: Architecture, gguf_name: str) -> str:
    return next((tensor.hf[0] for tensor in row.tensors if gguf_name in tensor.gguf), "")


def _defaults(row: str) -> dict[str, dict[str, object]]:
    """The meaning of absent config.json keys of an architecture, by model type ("" for all of them)."""
    return {line["model_type"]: line["values"] for line in _lines_of(row)}


def _rotates(row: str) -> str:
    """How much of a head the architecture's class rotates; "" if transformers has no class."""
    return next((line["rotates"] for line in _lines_of(row) if "rotates" in line), "")


def _lines_of(row: str) -> list[_DefaultsLine]:
    beginning = f'{{"row": "{row}",'
    return [json.loads(line) for line in _default_lines() if line.startswith(beginning)]


@cache
def _default_lines() -> list[str]:
    return DEFAULTS.read_text("utf-8").splitlines()


@cache
def rows_of(file: str) -> tuple[Architecture, ...]:
    """The architectures in the file of a family."""
    rows: tuple[Architecture, ...] = getattr(import_module(f"aprfmt.arch.families.{file}"), "ROWS", ())
    return tuple(
        replace(row, keys=_with_pooling(row.keys), defaults=_defaults(row.id), rotates=_rotates(row.id)) for row in rows
    )


@cache
def towers_of(file: str) -> tuple[Tower, ...]:
    """The towers in the file of a family."""
    towers: tuple[Tower, ...] = getattr(import_module(f"aprfmt.arch.families.{file}"), "TOWERS", ())
    return tuple(replace(tower, defaults=_defaults(tower.id)) for tower in towers)


def _with_pooling(keys: tuple[Key, ...]) -> tuple[Key, ...]:
    """The keys, plus one for the pooling of a sentence-transformers folder."""
    return keys if any(key.gguf == POOLED.gguf for key in keys) else (*keys, POOLED)
