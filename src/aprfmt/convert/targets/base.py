"""The forms that a model can be written in: what a target is, and the registry of them.

A built-in target is a row of TARGETS, its module is loaded when it is needed. A package adds one under the entry
point group `aprfmt.formats`, as it does a reader: any object with what `Target` names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from aprfmt import formats
from aprfmt.convert.options import COMMON, MIX, PROVENANCE, Options
from aprfmt.errors import UsageError
from aprfmt.formats.out import OutTensor
from aprfmt.io.pipe import FileLayout
from aprfmt.types import PathLike

if TYPE_CHECKING:
    from aprfmt.canonical.model import Canonical
    from aprfmt.canonical.tensor import Losses
    from aprfmt.convert.quantize.quantization import Quantization
    from aprfmt.io.pipe import WriteOptions


@dataclass(frozen=True, slots=True)
class Work:
    """What a target is asked for.

    Attributes:
        name: of the output file or folder.
        options: those of its `takes` and the common ones may be set.
        losses: takes what the output does not hold exactly, and warnings.
        quantization: the mix that was asked for, read and checked; None without one.
    """

    name: str
    options: Options
    losses: Losses
    quantization: Quantization | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """The planned files, with every size and offset; nothing is written yet.

    Attributes:
        layouts: the files. Several of a target that is not a folder stand beside each other.
        tensors: all tensors, for the report.
        lossless: whether the source can be restored byte for byte from them.
        ready: called before a byte is written; raises where the source is damaged, which a plan does not look for.
        write: writes the layouts to a path, where that takes more than their bytes.
    """

    layouts: list[FileLayout]
    tensors: list[OutTensor]
    lossless: bool = False
    ready: Callable[[], None] | None = None
    write: Callable[[str, WriteOptions], None] | None = None


@runtime_checkable
class Target(Protocol):
    """A form that a model can be written in.

    Attributes:
        name: what `--format` takes.
        container: id of the container in reports, that of the reader that opens it again.
        label: the container as users know it.
        suffixes: of outputs that choose this target, in lower case; () for folders.
        folder: whether the output is a folder.
        takes: the options that mean something here, beside those of COMMON.
    """

    name: str
    container: str
    label: str
    suffixes: tuple[str, ...]
    folder: bool
    takes: frozenset[str]

    def layouts(self, c: Canonical, work: Work) -> Output:
        """The output for `c`. Raises AprError, before anything is written, for what the container cannot hold."""


class _BuiltIn:
    def __init__(
        self, name: str, container: str, label: str, module: str, takes: frozenset[str], suffix: str = ""
    ) -> None:
        self.name, self.container, self.label, self.takes = name, container, label, takes
        self.suffixes: tuple[str, ...] = (suffix,) if suffix else ()
        self.folder = not suffix
        self._module = f"aprfmt.convert.targets.{module}"

    def layouts(self, c: Canonical, work: Work) -> Output:
        output: Output = import_module(self._module).layouts(c, work)
        return output


_HF = PROVENANCE | {"dtype", "tokenizer", "shard_size"}

TARGETS: tuple[Target, ...] = (
    _BuiltIn("apr", "apr-v2", "APR v2", "apr", MIX | PROVENANCE | {"dtype", "tokenizer"}, ".apr"),
    _BuiltIn("apr-shards", "apr-v2", "APR v2", "apr_shards", PROVENANCE | {"shard_size"}),
    _BuiltIn("gguf", "gguf", "GGUF", "gguf", _HF | MIX | {"pre", "pad_style", "verify"}, ".gguf"),
    _BuiltIn(
        "safetensors", "safetensors", "SafeTensors", "safetensors", frozenset({"dtype"}), ".safetensors"
    ),
    _BuiltIn("hf", "hf", "HF folder", "hf", _HF),
    _BuiltIn("mlx", "mlx", "MLX folder", "mlx", _HF),
)
"""The forms that we write."""


def targets() -> Iterator[Target]:
    """Every target, ours before those of plugins, which are loaded only when it comes to them."""
    yield from TARGETS
    yield from (plugin for plugin in formats.plugins() if isinstance(plugin, Target))


def find_target(dst: PathLike, name: str | None = None) -> Target:
    """The target `name`, else the one that the suffix of `dst` chooses (a folder is "hf"). Raises UsageError."""
    if name is not None:
        if (target := next((t for t in targets() if t.name == name), None)) is not None:
            return target
        raise UsageError(f"unknown format {name!r}", hint="one of: " + ", ".join(t.name for t in targets()))
    suffix = Path(dst).suffix.lower()
    # "model.ggfu" is a slip, "smollm2-v1.5" a folder.
    is_suffix = suffix[1:].isalpha() and not os.path.isdir(dst)
    target = next((t for t in (targets() if is_suffix else TARGETS) if suffix and suffix in t.suffixes), None)
    if target is None and is_suffix:
        raise UsageError(
            f"{suffix} is not the suffix of a format that can be written",
            hint="name the format with --format: " + ", ".join(t.name for t in targets()),
        )
    return target or next(t for t in TARGETS if t.name == "hf")


def check_options(options: Options, target: Target) -> None:
    """Raises UsageError for an option that was given and has no meaning for `target`."""
    for name in options.non_defaults():
        if name not in COMMON and name not in target.takes:
            fitting = ", ".join(t.name for t in TARGETS if name in t.takes)
            raise UsageError(
                f"--{name.replace('_', '-')} does not apply to the format {target.name}",
                hint=f"it applies to {fitting}",
            )
