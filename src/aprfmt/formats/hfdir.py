"""Hugging Face folders: safetensors weights, in one file or in shards with an index, and config.json."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.arch.configless import VARIANT, config_of_tensors
from aprfmt.errors import CorruptError, NotFoundError, RefusedError, storage_errors
from aprfmt.formats import HF_INDEX_SUFFIX, PICKLE_INDEX_SUFFIX, lora, mistral, pickles
from aprfmt.formats.hf_files import (
    belongs,
    list_names,
    load_tokenizer,
    parse_config,
    read_text_file,
    read_weight_map,
    select_files,
)
from aprfmt.formats.hf_modules import Problem, module_problems, read_modules
from aprfmt.formats.safetensors import WeightsFile, read_shard
from aprfmt.io.names import findings
from aprfmt.io.source import is_file, is_folder
from aprfmt.light_dataclass import light_dataclass
from aprfmt.limits import MAX_CARRIED_FILES, MAX_TEXT_BYTES
from aprfmt.model import Model
from aprfmt.types import JsonObject

if TYPE_CHECKING:
    from aprfmt.arch.hyperparams import Hyperparams

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_MAX_DEPTH = 32
"""Maximum depth of folders: the walk recurses."""

OF_TOOLS = (".git", ".hg", ".svn", ".cache")
"""Folders with the state of programs, not part of a model."""

_SHARD = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.[a-z]+)", re.DOTALL)


@light_dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of weight files in a folder.

    Attributes:
        index_suffix, index: suffix of shard indexes, and their usual name.
        single: name of a single weight file.
        holds: whether a file of that name may contain weights.
        read: opens one.
    """

    index_suffix: str
    index: str
    single: str
    holds: Callable[[str], bool]
    read: Callable[[Path, ExitStack], WeightsFile]


_SAFETENSORS = _Kind(HF_INDEX_SUFFIX, INDEX_NAME, SINGLE_NAME, lambda name: name.endswith(".safetensors"), read_shard)
_PICKLES = _Kind(
    PICKLE_INDEX_SUFFIX, "pytorch_model.bin.index.json", "pytorch_model.bin", pickles.holds_weights, pickles.read_shard
)


def _kind_of(path: Path, names: Sequence[str]) -> _Kind:
    """Safetensors if present, unless a pickle or its index was named."""
    if path.name.endswith(PICKLE_INDEX_SUFFIX) or (path.name in names and pickles.holds_weights(path.name)):
        return _PICKLES
    is_safe = any(name.endswith((".safetensors", HF_INDEX_SUFFIX)) for name in names)
    return _SAFETENSORS if is_safe or path.name.endswith(HF_INDEX_SUFFIX) else _PICKLES


@light_dataclass(slots=True)
class HfNative:
    """What writers of folders need.

    Attributes:
        folder: the folder.
        config: bytes of config.json, or None.
        params: bytes of the params.json that replaces it in Mistral's own layout.
        index: bytes of the index, or None.
        index_name: file name of the index.
        shards: the weights by file name, including those of modules in subfolders.
        other_files: the other files that belong to the model, relative to the folder, sorted, with config.json.
        alone: whether one weight file was named, so other files in its folder may not belong to the model.
    """

    folder: Path
    config: bytes | None
    index: bytes | None
    index_name: str | None
    shards: dict[str, WeightsFile]
    other_files: list[Path]
    params: bytes | None = None
    alone: bool = False

    def text_file(self, name: str) -> bytes | None:
        """One of the other files by name; None if missing."""
        return read_text_file(self.folder / name) if Path(name) in self.other_files else None

    def own_names(self) -> list[str]:
        """The model's files, relative to the folder: weights, index and the others."""
        index = [self.index_name] if self.index_name is not None else []
        return [*self.shards, *index, *(path.as_posix() for path in self.other_files)]

    def further_files(self, *, hidden: bool = False) -> list[str]:
        """All other files in the folder, relative, sorted; without those that tools keep in `.git` and the like.

        Other hidden folders are searched with `hidden`, else listed as a whole. Of more than MAX_CARRIED_FILES some are
        left out.
        Folders that are links, nested too deeply or unreadable are listed as a whole. Raises StorageError.
        """
        if self.alone:
            return []
        known = set(self.own_names())
        found: list[str] = []

        def note(error: OSError) -> None:
            if error.filename == os.fspath(self.folder):
                with storage_errors(self.folder):
                    raise error
            found.append(os.path.relpath(error.filename, self.folder))

        for root, folders, files in os.walk(self.folder, onerror=note):
            place = os.path.relpath(root, self.folder)
            deep = place.count(os.sep) >= _MAX_DEPTH
            folders[:] = sorted(name for name in folders if name not in OF_TOOLS)
            open_ = [name for name in folders if not deep and (hidden or not name.startswith("."))]
            closed = [n for n in folders if n not in open_ or os.path.islink(os.path.join(root, n))]
            folders[:] = open_
            found += [name if place == os.curdir else os.path.join(place, name) for name in (*files, *closed)]
            if len(found) > MAX_CARRIED_FILES:
                break
        return sorted(name for name in found if name not in known)


def open_model(path: Path) -> Model:
    """Opens a folder, or the folder around an index or one PyTorch file; config.json may be missing.

    Raises RefusedError (a shard or one of its tensors is missing), CorruptError and its kinds, UnknownFormatError,
    NotFoundError, StorageError.
    """
    folder = path if is_folder(path) else path.parent
    with ExitStack() as stack:
        names = list_names(folder, belongs)
        kind, alone = _kind_of(path, names), folder != path and not path.name.endswith(".json")
        index_name, warnings = _find_index(folder, names, kind) if folder == path else (path.name, [])
        if alone:
            index_name, names = None, [path.name, *(name for name in names if not kind.holds(name))]
        index, shards, more = _read_weights(folder, names, index_name, kind, stack)
        more += pickles.warnings({name: shard.left for name, shard in shards.items()})
        is_mistral = mistral.PARAMS_NAME in names and any(map(mistral.is_weights, shards))
        for shard in shards.values() if is_mistral else ():
            for tensor in shard.tensors:
                tensor.name = mistral.to_name(tensor.name)
        config_path = folder / "config.json"
        native = HfNative(
            folder=folder,
            config=read_text_file(config_path) if is_file(config_path) and not is_mistral else None,
            params=read_text_file(folder / mistral.PARAMS_NAME) if is_mistral else None,
            index=index,
            index_name=index_name,
            shards=shards,
            other_files=_texts(folder, names, [*shards, *([index_name] if index_name is not None else [])]),
            alone=alone,
        )
        model = Model(
            path=path, format="hf", label=_label(native), sources=[shard.source for shard in shards.values()],
            tensors=[tensor for shard in shards.values() for tensor in shard.tensors],
            load_metadata=lambda: config_of(native) or {},
            load_tokenizer=lambda _: load_tokenizer(folder, config_of(native)),
            load_hparams=lambda _: _load_hparams(native), warnings=warnings + more, native=native,
        )  # fmt: skip
        stack.pop_all()
    return model


def _label(native: HfNative) -> str:
    """The user-facing name of the folder's format."""
    kinds = dict.fromkeys((lora.PEFT_WEIGHTS, lora.PEFT_PICKLE), "PEFT adapter")
    kinds[lora.MLX_WEIGHTS] = "MLX adapter"
    weights = lora.weights_of([*native.shards, *(path.as_posix() for path in native.other_files)])
    if weights is not None:
        return kinds[weights]
    return "PyTorch pickles" if any(map(pickles.holds_weights, native.shards)) else "HF folder"


def _texts(folder: Path, names: Sequence[str], weights: Sequence[str]) -> list[Path]:
    """The files among `names` that are kept as text files of the model; names that io.names refuses are left out."""
    found = [path for path in select_files(names) if path.as_posix() not in weights]
    # README.md and readme.md, config.json and CONFIG.JSON: keep the name that other tools look for.
    ordered = sorted((path.as_posix() for path in found), key=lambda name: (name != "README.md", name.swapcase()))
    refused = {finding.name for finding in findings(ordered, weights)}
    return [path for path in found if path.as_posix() not in refused and _is_text(folder / path)]


def _is_text(path: Path) -> bool:
    """Whether a file is small enough for a text of the model, or contains its tokenizer."""
    from aprfmt.tokenizer.hf import is_tokenizer_file

    with storage_errors(path):
        return is_tokenizer_file(path.name) or path.stat().st_size <= MAX_TEXT_BYTES


def _load_hparams(native: HfNative) -> Hyperparams:
    from aprfmt.arch.hparams import from_hf_config

    h = from_hf_config(config_of(native) or {})
    h.extra |= read_modules(native.text_file)
    return h


def modules_problems(model: Model) -> list[Problem]:
    """What is missing in the modules of a folder, or contradictory; [] for other models."""
    native = model.native_as(HfNative)
    if native is None:
        return []
    shapes = {tensor.name: tensor.shape for tensor in model.tensors.entries}
    there = partial(_has_file, native.folder)
    return list(module_problems(native.text_file, shapes, there, model.hparams.hidden_size))


def _has_file(folder: Path, name: str) -> bool:
    return is_file(folder / name)


def config_of(native: HfNative) -> JsonObject | None:
    """The config from config.json, from params.json translated, or inferred from the tensors; else None.

    Raises CorruptError, UnsupportedError.
    """
    if native.params is not None:
        return mistral.to_config(parse_config(native.params, native.folder / mistral.PARAMS_NAME))
    if native.config is not None:
        return parse_config(native.config, native.folder / "config.json")
    shapes = {tensor.name: tensor.shape for shard in native.shards.values() for tensor in shard.tensors}
    stated = config_of_tensors(shapes)
    return None if stated is None else {**stated, VARIANT: native.folder.absolute().name}


# --- weights ---


def _find_index(folder: Path, names: Sequence[str], kind: _Kind) -> tuple[str | None, list[str]]:
    """The index, unless its shards were removed and the folder has the whole model in one file; warnings."""
    found, index = [name for name in names if name.endswith(kind.index_suffix)], kind.index
    if index in found:
        if kind.single not in names:
            return index, []
        shards = set(read_weight_map(read_text_file(folder / index), folder / index).values())
        if kind.single in shards or shards <= set(names):
            return index, []
        return None, [f"{index} lists missing files; using {kind.single}"]
    if len(found) > 1:
        raise RefusedError("the folder contains several models", path=folder, hint=f"choose one: {folder / found[0]}")
    return (found[0] if found and kind.single not in names else None), []


def _read_weights(
    folder: Path, names: Sequence[str], index_name: str | None, kind: _Kind, stack: ExitStack
) -> tuple[bytes | None, dict[str, WeightsFile], list[str]]:
    """Bytes of the index, shards by file name in order, warnings."""
    if index_name is None:
        shards = {name: kind.read(folder / name, stack) for name in _loose_shards(folder, names, kind)}
        shards |= _modules(folder, names, shards, stack)
        _owners(shards, folder)
        return None, shards, []
    path = folder / index_name
    raw = read_text_file(path)
    weight_map = read_weight_map(raw, path)
    shards = {name: _read_named_shard(folder / name, path, kind, stack) for name in sorted(set(weight_map.values()))}
    warnings = _check_index(weight_map, shards, path)
    return raw, shards | _modules(folder, names, shards, stack), warnings


def _modules(folder: Path, names: Sequence[str], known: Collection[str], stack: ExitStack) -> dict[str, WeightsFile]:
    """The weights of modules in subfolders (sentence-transformers); tensor names are prefixed with the subfolder."""
    shards = {}
    for name in names:
        if "/" in name and name.endswith(".safetensors") and name not in known:
            shards[name] = shard = read_shard(folder / name, stack)
            for tensor in shard.tensors:
                tensor.name = f"{name.partition('/')[0]}.{tensor.name}"
    return shards


def _read_named_shard(path: Path, index: Path, kind: _Kind, stack: ExitStack) -> WeightsFile:
    try:
        return kind.read(path, stack)
    except NotFoundError as error:
        raise RefusedError(
            f"shard {path.name} is listed in the index, but missing", path=index, hint="download it again"
        ) from error


def _loose_shards(folder: Path, names: Sequence[str], kind: _Kind) -> list[str]:
    """Weights of a folder without an index: one file, or a complete series of numbered ones."""
    if (adapter := lora.weights_of(names)) is not None and SINGLE_NAME not in names and adapter != lora.PEFT_PICKLE:
        return [adapter]  # mlx_lm leaves those of earlier steps in the folder
    weights = [name for name in names if kind.holds(name)]
    weights = [name for name in weights if "/" not in name] or weights
    if kind.single in weights or len(weights) == 1:
        name = kind.single if kind.single in weights else weights[0]
        if (match := _SHARD.fullmatch(name)) is None or int(match["count"]) <= 1:
            return [name]
    matches = [_SHARD.fullmatch(name) for name in weights]
    series = {(m["stem"], m["count"], m["suffix"]) for m in matches if m is not None}
    if None in matches or len(series) != 1:
        hint = f"choose one: {folder / weights[0]}" if weights else None
        raise RefusedError("cannot tell which files are the model's weights", path=folder, hint=hint)
    ((stem, count, suffix),) = series
    expected = [f"{stem}-{no:05d}-of-{count}{suffix}" for no in range(1, int(count) + 1)]
    missing = next((name for name in expected if name not in weights), None)
    if missing is not None or len(expected) != len(weights):
        raise RefusedError(f"shard {missing} is missing", path=folder, hint="download it again")
    return expected


def _owners(shards: Mapping[str, WeightsFile], folder: Path) -> dict[str, str]:
    """Tensor name -> file that contains it. Raises CorruptError for a tensor in two files."""
    owners: dict[str, str] = {}
    for name, shard in shards.items():
        for tensor in shard.tensors:
            other = owners.setdefault(tensor.name, name)
            if other != name:
                raise CorruptError(f"the tensor is in both {other} and {name}", path=folder, tensor=tensor.name)
    return owners


def _check_index(weight_map: Mapping[str, str], shards: Mapping[str, WeightsFile], path: Path) -> list[str]:
    owners = _owners(shards, path.parent)
    for tensor, name in weight_map.items():
        if owners.get(tensor) != name:
            raise RefusedError(
                f"the index maps the tensor to {name}, which does not contain it",
                path=path,
                tensor=tensor,
                hint="download the index and its shards again, all from one revision",
            )
    extra = [name for name in owners if name not in weight_map]
    return [f"also reading tensors that the index does not list: {', '.join(extra[:5])}"] if extra else []
