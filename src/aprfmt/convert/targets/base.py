"""The forms that a model can be written in: what a target is, the registry of them, and every option that they take.

A built-in target is a row of TARGETS, its module is loaded when it is needed. A package adds one under the entry
point group `aprfmt.formats`, as it does a reader: any object with what `Target` names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from aprfmt import formats
from aprfmt.errors import UsageError
from aprfmt.formats.out import OutTensor
from aprfmt.io import chunks
from aprfmt.io.pipe import MOST_THREADS, FileLayout, StartProgress, WriteOptions
from aprfmt.limits import DEFAULT_CARRY_BYTES
from aprfmt.text import plural
from aprfmt.types import PathLike

if TYPE_CHECKING:
    from aprfmt.canonical.model import Canonical
    from aprfmt.canonical.tensor import Losses
    from aprfmt.convert.quantization import Quantization


DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Options:
    """Every option of a conversion; `apr convert --help` explains them. Sizes are in bytes."""

    arch: str | None = None
    base: PathLike | None = None
    dtype: str = "keep"
    imatrix: PathLike | None = None
    tensor_type: Sequence[str] = ()
    output_type: str | None = None
    embedding_type: str | None = None
    pure: bool = False
    leave_output: bool = False
    allow_requantize: bool = False
    tokenizer: PathLike | None = None
    no_tokenizer: bool = False
    no_mtp: bool = False
    mtp_only: bool = False
    target_model: PathLike | None = None
    mmproj: PathLike | bool | None = None
    license: str | None = None
    data_source: str | None = None
    data_license: str | None = None
    allow_no_config: bool = False
    allow_unmapped: bool = False
    allow_names: bool = False
    follow_links: bool = False
    carry: int = DEFAULT_CARRY_BYTES
    hash: bool = False
    format: str | None = None
    pre: str | None = None
    pad_style: str = "llama.cpp"
    shard_size: int | None = None
    bits: int | None = None
    group_size: int | None = None
    recipe: str | None = None
    verify: bool = False
    modelfile: bool = False
    plan: bool = False
    force: bool = False
    progress: StartProgress | None = None
    threads: int | None = None
    max_memory: int | None = None
    max_disk: int | None = None
    fsync: bool = True

    def non_defaults(self) -> list[str]:
        """The options that differ from their defaults."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]

    def changes_nothing(self) -> bool:
        """Whether the options leave the model unchanged."""
        return not set(self.non_defaults()) - (COMMON - {"arch", "base"}) - {"shard_size", "verify", "allow_requantize"}


COMMON = frozenset(
    (
        *("arch", "base", "allow_no_config", "allow_unmapped", "allow_names", "follow_links", "carry", "format"),
        *("plan", "force", "progress", "threads", "max_memory", "max_disk", "fsync"),
    )
)
"""Options about reading the source and running the conversion, which mean the same for every target."""

MIX = frozenset(("imatrix", "tensor_type", "output_type", "embedding_type", "pure", "leave_output", "allow_requantize"))
"""Options that need a quantization mix."""

PROVENANCE = frozenset(("license", "data_source", "data_license"))
"""Provenance options."""


def parse_options(given: Mapping[str, object]) -> Options:
    """The options in `given`. Raises UsageError for an unknown name or a value of the wrong type."""
    known = {f.name: f for f in fields(Options)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise UsageError(f"unknown option {unknown[0]!r}", hint="known: " + ", ".join(sorted(known)))
    values: dict[str, Any] = {}
    for name, value in given.items():
        parser = _PARSERS.get(name) or _PARSERS_BY_TYPE[str(known[name].type)]
        values[name] = parser(name, value)
    return Options(**values)


def _wrong(name: str, expected: str, value: object) -> UsageError:
    return UsageError(f"{name} must be {expected}, not {short(value)}")


def parse_flag(name: str, value: object) -> bool:
    """`value`, a bool. Raises UsageError for anything else."""
    if not isinstance(value, bool):
        raise _wrong(name, "True or False", value)
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a string", value)
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise _wrong(name, "a list of strings", value)
    return tuple(value)


def _path_or_flag(name: str, value: object) -> object:
    return value if value is None or isinstance(value, bool) else formats.path_text(value, name)


def _progress(name: str, value: object) -> object:
    if not callable(value):
        raise _wrong(name, "a function", value)
    return value


def _whole(name: str, value: object) -> int:
    if type(value) is not int:
        raise _wrong(name, "a whole number", value)
    return value


def _threads(name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MOST_THREADS:
        raise _wrong(name, f"a number from 1 to {MOST_THREADS}", value)
    return value


_UNITS = {"": 1, "b": 1} | {
    letter + end: base**power
    for power, letter in enumerate("kmgt", 1)
    for end, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


_LEAST_TYPED_SHARD = 100
"""Bytes: a smaller number without a unit is taken for a forgotten unit."""


def parse_size(value: object, *, least: int = 1, name: str = "") -> int:
    """`5GB`, `500MiB`, `123456` or a number as bytes, at least `least`; `name` is the option's. Raises UsageError."""
    size = value if type(value) is int else -1
    if isinstance(value, str):
        text = value.strip().lower()
        number = text.rstrip("bkmgti").strip()
        try:
            size = int(float(number) * _UNITS[text[len(number) :].strip()])
        except (ValueError, KeyError, OverflowError):
            size = -1
    if size < least:
        option = f"--{name.replace('_', '-')}: " if name else ""
        raise UsageError(f"{option}{short(value)} is not a size", hint="write it as 5GB, 500MiB or a number of bytes")
    return size


Parser = Callable[[str, object], object]


def _optional(parser: Parser) -> Parser:
    return lambda name, value: None if value is None else parser(name, value)


def _shard_size(name: str, value: object) -> int:
    size = parse_size(value, least=0, name=name)
    if isinstance(value, str) and value.strip().isdecimal() and 0 < size < _LEAST_TYPED_SHARD:
        raise UsageError(f"--shard-size: {plural(size, 'byte')} is too small", hint=f"add a unit: {size}GB")
    return size


# By name where the type is not enough, the others by the annotation of the field.
_PARSERS: dict[str, Parser] = {
    "threads": _optional(_threads),
    "bits": _optional(_whole),
    "group_size": _optional(_whole),
    "carry": lambda name, value: parse_size(value, least=0, name=name),
    "max_memory": _optional(lambda name, value: parse_size(value, name=name)),
    "max_disk": _optional(lambda name, value: parse_size(value, least=chunks.LEAST_STORED_BYTES, name=name)),
    "shard_size": _optional(_shard_size),
}
_PARSERS_BY_TYPE: dict[str, Parser] = {
    "bool": parse_flag,
    "str": _text,
    "str | None": _optional(_text),
    "Sequence[str]": _texts,
    "PathLike | bool | None": _path_or_flag,
    "PathLike | None": _optional(lambda name, value: formats.path_text(value, name)),
    "StartProgress | None": _optional(_progress),
}


# --- targets ---


@dataclass(frozen=True, slots=True)
class Work:
    """The request to a target.

    Attributes:
        name: of the output file or folder.
        options: those of its `takes` and the common ones may be set.
        losses: collects what the output cannot hold exactly, and warnings.
        quantization: the requested mix, parsed and checked; None without one.
    """

    name: str
    options: Options
    losses: Losses
    quantization: Quantization | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """The planned files, with every size and offset; nothing is written yet.

    Attributes:
        layouts: the files; without a folder, several of them are siblings.
        tensors: all tensors, for the report.
        lossless: whether the source can be restored byte for byte from them.
        ready: called before the first byte is written; raises if the source is damaged, which a plan does not check.
        write: writes the layouts to a path, if that takes more than copying their bytes.
        n_params: parameters of the model, if they are not the elements of the written tensors.
    """

    layouts: list[FileLayout]
    tensors: list[OutTensor]
    lossless: bool = False
    ready: Callable[[], None] | None = None
    write: Callable[[str, WriteOptions], None] | None = None
    n_params: int | None = None

    @property
    def is_proven(self) -> bool:
        """Whether every file is checked against the digest of its source file before it is published."""
        return self.lossless and all(layout.digest is not None for layout in self.layouts)


@runtime_checkable
class Target(Protocol):
    """An output format.

    Attributes:
        name: what `--format` takes.
        container: id of the container in reports, the same as that of its reader.
        label: the container as users know it.
        suffixes: of outputs that choose this target, in lower case; () for folders.
        folder: whether the output is a folder.
        takes: the options that apply here, in addition to COMMON.
    """

    name: str
    container: str
    label: str
    suffixes: tuple[str, ...]
    folder: bool
    takes: frozenset[str]

    def layouts(self, c: Canonical, work: Work) -> Output:
        """The planned output for `c`. Raises AprError, before writing, for what the container cannot hold."""


class _BuiltInTarget:
    def __init__(
        self,
        name: str,
        container: str,
        label: str,
        place: str,
        takes: frozenset[str],
        suffix: str = "",
        *,
        adapters: str = "",
    ) -> None:
        self.name, self.container, self.label, self.takes = name, container, label, takes
        self.suffixes: tuple[str, ...] = (suffix,) if suffix else ()
        self.folder = not suffix
        self._place, self._adapters = place, adapters

    def layouts(self, c: Canonical, work: Work) -> Output:
        place = self._adapters if c.adapter is not None and self._adapters else self._place
        place = "mmproj:layouts" if work.options.mmproj is True else place
        module, _, function = place.partition(":")
        output: Output = getattr(import_module(f"aprfmt.convert.targets.{module}"), function)(c, work)
        return output


_HF = PROVENANCE | {"dtype", "tokenizer", "shard_size", "no_mtp", "target_model"}

TARGETS: tuple[Target, ...] = (
    _BuiltInTarget(
        "apr",
        "apr-v2",
        "APR v2",
        "apr:layouts",
        MIX | PROVENANCE | {"dtype", "tokenizer", "hash", "no_mtp", "target_model", "mmproj"},
        ".apr",
    ),
    _BuiltInTarget("apr-shards", "apr-v2", "APR v2", "apr:shard_layouts", PROVENANCE | {"shard_size", "hash"}),
    _BuiltInTarget(
        "gguf",
        "gguf",
        "GGUF",
        "gguf:layouts",
        _HF | MIX | {"no_tokenizer", "mtp_only", "mmproj", "pre", "pad_style", "verify", "modelfile"},
        ".gguf",
        adapters="adapter:gguf_layouts",
    ),
    _BuiltInTarget(
        "safetensors",
        "safetensors",
        "SafeTensors",
        "hf:safetensors_layouts",
        frozenset({"dtype", "no_mtp"}),
        ".safetensors",
        adapters="adapter:safetensors_layouts",
    ),
    _BuiltInTarget("hf", "hf", "HF folder", "hf:layouts", _HF, adapters="adapter:peft_layouts"),
    _BuiltInTarget(
        "mlx",
        "mlx",
        "MLX folder",
        "mlx:layouts",
        _HF | {"bits", "group_size", "recipe"},
        adapters="adapter:mlx_layouts",
    ),
)
"""The built-in output formats."""


def targets() -> Iterator[Target]:
    """Every target: the built-in ones, then those of plugins, which are loaded lazily."""
    yield from TARGETS
    yield from (plugin for plugin in formats.plugins() if isinstance(plugin, Target))


def find_target(dst: PathLike, name: str | None = None) -> Target:
    """The target called `name`, else the one for the suffix of `dst` (a folder is "hf"). Raises UsageError."""
    if name is not None:
        if (target := next((t for t in targets() if t.name == name.lower()), None)) is not None:
            return target
        raise UsageError(f"unknown format {name!r}", hint="one of: " + ", ".join(t.name for t in targets()))
    suffix = Path(dst).suffix.lower()
    # "model.ggfu" is a slip, "smollm2-v1.5" a folder.
    is_suffix = suffix[1:].isalpha() and not os.path.isdir(dst)
    target = next((t for t in (targets() if is_suffix else TARGETS) if suffix and suffix in t.suffixes), None)
    if target is None and is_suffix:
        raise UsageError(
            f"cannot tell the output format from the suffix {suffix}",
            hint="choose one with --format: " + ", ".join(t.name for t in targets()),
        )
    return target or next(t for t in TARGETS if t.name == "hf")


def check_options(options: Options, target: Target) -> None:
    """Raises UsageError for an option that does not apply to `target`, or conflicts with another."""
    for name in options.non_defaults():
        if name not in COMMON and name not in target.takes:
            fitting = ", ".join(t.name for t in TARGETS if name in t.takes)
            raise UsageError(
                f"--{name.replace('_', '-')} does not apply to the format {target.name}",
                hint=f"it applies to {fitting}",
            )
    if options.no_tokenizer and options.tokenizer is not None:
        raise UsageError("--no-tokenizer and --tokenizer cannot be given together", hint="give one of them")
    if options.mmproj and isinstance(options.mmproj, bool) == (target.name == "apr"):
        raise UsageError(
            "--mmproj takes a GGUF of towers when writing an .apr, and no value when writing such a GGUF",
            hint="apr import text.gguf --mmproj mmproj.gguf -o model.apr; apr export model.apr -o mmproj.gguf --mmproj",
        )
    if options.mmproj is True and (options.mtp_only or options.verify or options.shard_size):
        raise UsageError(
            "--mmproj cannot be combined with --mtp-only, --verify or --shard-size", hint="leave those out"
        )
    if options.modelfile and (options.shard_size or options.mtp_only or options.mmproj is True):
        raise UsageError(
            "--modelfile needs a whole model in one file", hint="leave out --shard-size, --mtp-only and --mmproj"
        )
    if options.no_mtp and options.mtp_only:
        raise UsageError("--no-mtp and --mtp-only cannot be given together", hint="give one of them")
