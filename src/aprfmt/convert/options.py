"""What a conversion may be asked for, and which format its output gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from aprfmt.errors import UsageError
from aprfmt.io.write import StartProgress
from aprfmt.types import PathLike


@dataclass(frozen=True, slots=True)
class Options:
    """Every option of a conversion; `apr convert --help` explains them."""

    arch: str | None = None
    dtype: str = "keep"
    imatrix: PathLike | None = None
    tensor_type: Sequence[str] = ()
    output_type: str | None = None
    embedding_type: str | None = None
    pure: bool = False
    leave_output: bool = False
    allow_requantize: bool = False
    tokenizer: PathLike | None = None
    license: str | None = None
    data_source: str | None = None
    data_license: str | None = None
    allow_no_config: bool = False
    allow_unmapped: bool = False
    format: str | None = None
    pre: str | None = None
    pad_style: str = "llama.cpp"
    shard_size: int | None = None
    verify: bool = False
    plan: bool = False
    force: bool = False
    progress: StartProgress | None = None
    threads: int | None = None
    max_memory: int | None = None
    fsync: bool = True

    def changes_nothing(self) -> bool:
        """Whether the options leave the model itself alone."""
        quiet = {
            "format",
            "shard_size",
            "verify",
            "plan",
            "force",
            "progress",
            "threads",
            "max_memory",
            "fsync",
            "allow_no_config",
            "allow_unmapped",
            "allow_requantize",
        }
        return all(getattr(self, f.name) == f.default for f in fields(self) if f.name not in quiet)


def options_of(given: dict[str, Any]) -> Options:
    """The options named in `given`. Raises UsageError for one that is not known."""
    known = {f.name for f in fields(Options)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise UsageError(f"unknown option {unknown[0]!r}", hint="known: " + ", ".join(sorted(known)))
    types = given.get("tensor_type", ())
    return Options(**{**given, "tensor_type": (types,) if isinstance(types, str) else tuple(types)})


# What --format takes -> id of the container in the report.
TARGETS = {
    "apr": "apr-v2",
    "apr-shards": "apr-v2",
    "gguf": "gguf",
    "safetensors": "safetensors",
    "hf": "hf",
    "mlx": "mlx",
}
FOLDERS = ("hf", "mlx", "apr-shards")
_SUFFIXES = {".apr": "apr", ".gguf": "gguf", ".safetensors": "safetensors"}


def target_format(dst: PathLike, name: str | None = None) -> str:
    """The target's key in TARGETS: `name`, else by the suffix of `dst` (a folder is "hf"). Raises UsageError."""
    if name is not None:
        if name not in TARGETS:
            raise UsageError(f"unknown format {name!r}", hint="one of: " + ", ".join(TARGETS))
        return name
    suffix = Path(dst).suffix.lower()
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    if suffix[1:].isalpha() and not os.path.isdir(dst):  # "model.ggfu" is a slip, "smollm2-v1.5" a folder
        raise UsageError(
            f"{suffix} is no suffix of a writable format",
            hint="name the format with --format: " + ", ".join(TARGETS),
        )
    return "hf"
