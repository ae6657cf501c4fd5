"""Exports a model of any format to a GGUF for llama.cpp, once, into a cache."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import aprfmt
from aprfmt import formats
from aprfmt.errors import RefusedError, UsageError, storage_error
from aprfmt.formats.local import on_this_disk
from aprfmt.io.cache import EXPORTS, CacheEntry, CacheFolder
from aprfmt.io.source import is_folder, watch_opened
from aprfmt.text import format_bytes
from aprfmt.types import PathLike

if TYPE_CHECKING:
    from aprfmt.convert.report import Report
    from aprfmt.trust.signature import ModelSignature

SIZE_VARIABLE = "APR_CACHE_SIZE"
"""Environment variable: size limit of cached exports, not counting the latest one."""

_DEFAULT_SIZE = "30GB"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A GGUF to load.

    Attributes:
        path: the file, or the first of its parts.
        n_bytes: of all parts.
        key: changes whenever the model changes.
        report: of the export, if one was made.
        sources: every file that the model was read from, and its folder.
        entry: keeps a cached file; its user waits for `entry.confirm`, as Llama does.
    """

    path: str
    n_bytes: int
    key: str
    report: Report | None = None
    sources: tuple[str, ...] = ()
    entry: CacheEntry | None = field(default=None, repr=False, compare=False)

    def __fspath__(self) -> str:
        return self.path


def prepare(file: PathLike, *, dtype: str = "keep", say: Callable[[str], None] = lambda line: None) -> Prepared:
    """The model `file` as a GGUF: itself if it is one, else an export of it in the cache.

    Exports are keyed by the names, sizes, times and inodes of all files of the model: a rewritten file has another
    ctime, which cannot be set back, so a cached export was made from these bytes.

    Args:
        file: a model in any format.
        dtype: of the weights, as for convert_model.
        say: called with a line before something is exported.

    Raises:
        AprError: as convert_model.
    """
    name = formats.path_text(file, "file")
    found = _look(name)
    if found.signature is not None:
        say(found.signature.sentence())
    if found.gguf is not None and dtype == "keep":
        return found.gguf
    options: dict[str, object] = {"dtype": dtype} if dtype != "keep" else {}
    try:
        return exported(".gguf", found.sources, name, found.size, options, say)
    except RefusedError as error:
        if "--allow-requantize" in (error.hint or ""):  # an option for writing a file
            error.hint = f"run it unchanged, or: apr convert {name} -o OUT --dtype {dtype} --allow-requantize"
        raise


@dataclass(frozen=True, slots=True)
class _Looked:
    """An opened file: its size, all files that it consists of, and its metadata if it is a GGUF; its signature."""

    size: int
    sources: list[str]
    gguf: Prepared | None
    signature: ModelSignature | None


def _look(name: str) -> _Looked:
    with watch_opened() as opened, formats.open(name) as model:
        if model.signature is not None:
            model.signature.check_claim()
        size = model.size_bytes
        gguf = None
        if model.format == "gguf":
            parts = on_this_disk([source.path for source in model.sources])
            gguf = Prepared(parts[0], size, key(parts, {}), sources=tuple(parts))
        return _Looked(size, sorted({str(model.path), *(source.path for source in opened)}), gguf, model.signature)


def source_files(file: PathLike) -> list[str]:
    """Every file and folder that the model `file` is read from."""
    return _look(formats.path_text(file, "file")).sources


def prepare_tower(file: PathLike, *, say: Callable[[str], None] = lambda line: None) -> Prepared:
    """A tower GGUF for mtmd: itself if it is one, else the towers of the model `file`, from the cache.

    Raises RefusedError for a GGUF of another kind, and what convert_model raises.
    """
    name = formats.path_text(file, "file")
    found = _look(name)
    if found.gguf is None:
        return exported(".gguf", found.sources, name, found.size, {"mmproj": True}, say)
    with formats.open(name) as model:
        if model.metadata.get("general.architecture") != "clip":
            raise RefusedError(
                "the file contains a language model without vision or audio towers",
                path=name,
                hint="set the GGUF of the towers with --mmproj FILE",
            )
    return found.gguf


def prepare_adapter(
    file: PathLike, base: PathLike, prepared: Prepared, *, say: Callable[[str], None] = lambda line: None
) -> Prepared:
    """An adapter of any format as a LoRA GGUF for the model `base`, which was `prepared`.

    Raises RefusedError for an adapter of another model, and what convert_model raises.
    """
    from aprfmt.canonical.adapter import read_adapter
    from aprfmt.canonical.base_model import find_base
    from aprfmt.canonical.model_kinds import looks_like_adapter

    name, of = formats.path_text(file, "file"), formats.path_text(base, "base")
    found = _look(name)
    with formats.open(name) as model:
        if not looks_like_adapter(model):
            raise RefusedError("this is not an adapter", path=name, hint="--lora takes a LoRA adapter in any format")
        own = find_base(model, None) if found.gguf is None else None
        stated = read_adapter(model, own).of if found.gguf is None else None
    gguf = found.gguf
    if gguf is None:
        if stated is not None:
            _check_architecture(stated.row.gguf, prepared.path, name, of)
        sources = sorted({*found.sources, *_look(of).sources})
        gguf = exported(".gguf", sources, name, found.size, {"base": prepared.path}, say)
    _check_adapter(gguf.path, prepared.path, name, of)
    return gguf


def _check_architecture(theirs: object, base: str, name: str, base_name: str) -> None:
    with formats.open(base) as of:
        ours = of.metadata.get("general.architecture")
    if theirs != ours:
        raise _other_model(f"its architecture is {theirs!r}, the model's {ours!r}", name, base_name)


def _other_model(why: str, name: str, base_name: str) -> RefusedError:
    return RefusedError(
        f"the adapter does not fit {base_name}: {why}", path=name, hint="apr inspect shows the base model of an adapter"
    )


def _check_adapter(adapter: str, base: str, name: str, base_name: str) -> None:
    """Raises RefusedError if an adapter's GGUF does not match a model's."""
    with formats.open(adapter) as model, formats.open(base) as of:
        _check_architecture(model.metadata.get("general.architecture"), base, name, base_name)
        stated = model.metadata.get("general.base_model.0.name")
        whose = f" (from its metadata: {stated})" if isinstance(stated, str) else ""
        for tensor in model.tensors.entries:
            weight, _, factor = tensor.name.rpartition(".")
            if factor not in ("lora_a", "lora_b"):
                continue
            if weight not in of.tensors:
                raise _other_model(f"missing tensor {weight}{whose}", name, base_name)
            rows, columns = of.tensors[weight].shape[-2:]
            turned = weight == "token_embd.weight"
            expected = {"lora_a": rows if turned else columns, "lora_b": columns if turned else rows}[factor]
            at = 0 if turned or factor == "lora_b" else -1
            size = tensor.shape[-2] if at == 0 else tensor.shape[-1]
            if size != expected:
                shapes = f"{weight} is {list(of.tensors[weight].shape)}, its {factor} {list(tensor.shape)}"
                raise _other_model(shapes + whose, name, base_name)


def exported(
    suffix: str, sources: list[str], name: str, size: int, options: dict[str, object], say: Callable[[str], None]
) -> Prepared:
    """The result of convert_model for `name` with `options`, from the cache if present.

    Args:
        suffix: of the file.
        sources: every file and folder that it depends on.
        name: the model.
        size: its bytes, for messages.
        options: of convert_model.
        say: called with a line before something is exported.
    """
    folder, limit = CacheFolder(EXPORTS), _limit()
    stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in Path(name).name)[:40]
    own = key(sources, options)
    report: Report | None = None

    def make(target: Path) -> None:
        nonlocal report
        from aprfmt.convert.api import convert_model

        what = "the towers of " if options.get("mmproj") else ""
        say(f"exporting {what}{name} ({format_bytes(size)}) to the cache, once")
        # What stays on this machine may contain the targets of links.
        options_made = {"force": True, "follow_links": True, "fsync": False, **options}
        if suffix == ".gguf" and not options.get("mmproj"):
            options_made["allow_different"] = True  # llama.cpp's logits are requested explicitly
        report = convert_model(name, target, **options_made)  # type: ignore[arg-type]

    entry = folder.entry(f"{stem}-{own}{suffix}", make)
    folder.trim(limit)
    path = entry.path
    return Prepared(str(path), path.stat().st_size, own, report, tuple(sources), entry)


def _limit() -> int:
    """Size limit of exports. Raises UsageError."""
    from aprfmt.convert.parsing import parse_size

    text = os.environ.get(SIZE_VARIABLE) or _DEFAULT_SIZE
    try:
        return parse_size(text, least=0)
    except UsageError as error:
        raise UsageError(f"{SIZE_VARIABLE}: {error.message}", hint=error.hint) from None


def key(sources: list[str], options: Mapping[str, object]) -> str:
    """A cache key: the current state of the files and folders `sources`, `options` and this version of the package."""
    digest = hashlib.sha256(f"{aprfmt.__version__} {sorted(options.items())!r}".encode())
    for path in sorted({each for source in sources for each in _files(source)}):
        try:
            status = os.stat(path)
        except OSError as error:
            raise storage_error(error, path) from error
        stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        digest.update(f"\n{os.path.abspath(path)} {stamp}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:24]


_BESIDE = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".safetensors", ".yaml")
"""Files of a repository that describe the weights in the same folder."""

_MADE = (".gguf", ".dat", ".state")
"""Files that no export reads: derived from the model, such as an importance matrix."""


def _files(path: str) -> Iterator[str]:
    """A file and those in its folder that describe it; for a folder all files."""
    if is_folder(path):
        for where, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield from (os.path.join(where, name) for name in names if not name.endswith(_MADE))
        return
    yield path
    if not path.endswith(".apr"):
        folder = os.path.dirname(path) or "."
        yield from (entry.path for entry in os.scandir(folder) if entry.name.endswith(_BESIDE) and entry.is_file())
