"""Output formats: the interface of a target, the registry, and the options of each.

A built-in target is a row of TARGETS; its module is imported when needed. Packages add targets under the entry point
group `aprfmt.formats`, as for readers: any object with the attributes of `Target`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from aprfmt import formats
from aprfmt.convert.options import COMMON, PRESET_OPTIONS, PROVENANCE_OPTIONS, Options
from aprfmt.errors import UsageError
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import FileLayout, WriteOptions
from aprfmt.types import PathLike

if TYPE_CHECKING:
    from aprfmt.canonical.model import Canonical
    from aprfmt.canonical.tensor import Losses
    from aprfmt.convert.quantization import Observer, Quantization


DEFAULT_SHARD_BYTES = 5_000_000_000


# --- targets ---


@dataclass(frozen=True, slots=True)
class Work:
    """The request to a target.

    Attributes:
        name: of the output file or folder.
        options: only those of its `takes` and the common ones may be set.
        losses: collects what the output cannot store exactly, and warnings.
        quantization: the requested preset, parsed and checked; None without one.
        observe: called with the weights that are quantized for MLX, and the importance of their columns.
    """

    name: str
    options: Options
    losses: Losses
    quantization: Quantization | None = None
    observe: Observer | None = None


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
        name: value of `--format`.
        container: id of the container in reports, the same as that of its reader.
        label: the container's user-facing name.
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
        """The planned output for `c`. Raises AprError, before writing, for what the container cannot store."""


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


_HF = PROVENANCE_OPTIONS | {"dtype", "tokenizer", "shard_size", "no_mtp", "target_model"}
_SERVED = _HF | {"verify", "search", "imatrix", "second_moments"}

TARGETS: tuple[Target, ...] = (
    _BuiltInTarget(
        "apr",
        "apr-v2",
        "APR v2",
        "apr:layouts",
        PRESET_OPTIONS
        | PROVENANCE_OPTIONS
        | {"dtype", "tokenizer", "hash", "no_mtp", "target_model", "mmproj", "verify"},
        ".apr",
    ),
    _BuiltInTarget("apr-shards", "apr-v2", "APR v2", "apr:shard_layouts", PROVENANCE_OPTIONS | {"shard_size", "hash"}),
    _BuiltInTarget(
        "gguf",
        "gguf",
        "GGUF",
        "gguf:layouts",
        _HF
        | PRESET_OPTIONS
        | {"no_tokenizer", "mtp_only", "mmproj", "pre", "pad_style", "verify", "modelfile", "allow_different"},
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
    _BuiltInTarget("hf", "hf", "HF folder", "hf:layouts", _SERVED, adapters="adapter:peft_layouts"),
    *(
        _BuiltInTarget(name, "hf", f"{label} folder", "hf:layouts", _SERVED)
        for name, label in (("gptq", "GPTQ"), ("awq", "AWQ"), ("modelopt", "ModelOpt"))
    ),
    _BuiltInTarget(
        "mlx",
        "mlx",
        "MLX folder",
        "mlx:layouts",
        _HF | {"bits", "group_size", "recipe", "tensor_type", "imatrix"},
        adapters="adapter:mlx_layouts",
    ),
)
"""The built-in output formats."""


def targets() -> Iterator[Target]:
    """Every target: the built-in ones, then those of plugins, which are loaded lazily."""
    yield from TARGETS
    yield from (plugin for plugin in formats.plugins() if isinstance(plugin, Target))


_ALIASES = {"huggingface": "hf", "hugging-face": "hf", "transformers": "hf"}


def find_target(dst: PathLike, name: str | None = None) -> Target:
    """The target called `name`, else the one for the suffix of `dst` (a folder is "hf"). Raises UsageError."""
    if name is not None:
        asked = _ALIASES.get(name.lower(), name.lower())
        if (target := next((t for t in targets() if t.name == asked), None)) is not None:
            return target
        hint = "one of: " + ", ".join(t.name for t in targets())
        hint = "Ollama reads a GGUF: --format gguf --modelfile" if asked == "ollama" else hint
        raise UsageError(f"unknown format {name!r}", hint=hint)
    suffix = Path(dst).suffix.lower()
    # "model.ggfu" is a typo, "smollm2-v1.5" a folder.
    is_suffix = suffix[1:].isalpha() and not os.path.isdir(dst)
    target = next((t for t in (targets() if is_suffix else TARGETS) if suffix and suffix in t.suffixes), None)
    if target is None and is_suffix:
        raise UsageError(
            f"unknown output suffix {suffix}",
            hint="set the format with --format: " + ", ".join(t.name for t in targets()),
        )
    return target or next(t for t in TARGETS if t.name == "hf")


def check_options(options: Options, target: Target) -> None:
    """Raises UsageError for an option that does not apply to `target`, or conflicts with another."""
    for name in options.non_defaults():
        if name not in COMMON and name not in target.takes:
            fitting = ", ".join(t.name for t in TARGETS if name in t.takes)
            raise UsageError(
                f"--{name.replace('_', '-')} does not apply to the format {target.name}",
                hint=f"it applies to: {fitting}",
            )
    if options.verify is True and target.name != "gguf":
        raise UsageError(
            f"--verify does not apply to the format {target.name}",
            hint="it applies to gguf; --verify=logits compares logits with the source's",
        )
    if options.verify == "logits" and options.mtp_only:
        raise UsageError("--verify=logits needs a whole model", hint="leave out --mtp-only")
    if options.no_tokenizer and options.tokenizer is not None:
        raise UsageError("--no-tokenizer and --tokenizer are mutually exclusive", hint="use one of them")
    if options.mmproj and isinstance(options.mmproj, bool) == (target.name == "apr"):
        raise UsageError(
            "--mmproj takes a file when writing an .apr, and none when writing an mmproj GGUF",
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
        raise UsageError("--no-mtp and --mtp-only are mutually exclusive", hint="use one of them")
