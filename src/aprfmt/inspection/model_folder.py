"""The models in a folder: path, format and size of each. Opening one finds files that are cut or not models."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from aprfmt import formats
from aprfmt.errors import AprError, NotFoundError, storage_errors
from aprfmt.formats import imatrix
from aprfmt.formats.hfdir import HfNative
from aprfmt.model import Model
from aprfmt.types import PathLike

_DEPTH = 2
_SUFFIXES = (".gguf", ".apr", ".safetensors")
_CONFIGS = ("config.json", "adapter_config.json")
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.\w+$)")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """One model.

    Attributes:
        path: of the file, of the first of its shards, or of the folder.
        format: name of the reader, such as "gguf" or "hf"; "adapter" of a LoRA adapter, "mlx" of an MLX folder.
        files, size_bytes: number of files, and their bytes together.
    """

    path: str
    format: str
    files: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The result of `models_in`.

    Attributes:
        folder: as given.
        models: sorted by path.
        skipped: files and folders that are named like a model and cannot be read, each with the reason.
    """

    folder: str
    models: Sequence[FoundModel]
    skipped: Mapping[str, str]

    def to_json(self) -> dict[str, object]:
        """The object of `apr inspect FOLDER --json`."""
        models = [asdict(model) for model in self.models]
        return {"folder": self.folder, "models": models, "skipped": dict(self.skipped)}


def models_in(folder: PathLike = ".") -> ModelFolder:
    """Lists the models in `folder` and its subfolders; the shards of a model are one row.

    Raises NotFoundError if `folder` is not a folder.
    """
    top = formats.path_text(folder, "folder")
    if not os.path.isdir(top):
        raise NotFoundError("no such folder", path=top)
    found, skipped = list[FoundModel](), dict[str, str]()
    with storage_errors(top):
        for path, files in sorted(_candidates(top, _DEPTH)):
            size = sum(os.path.getsize(file) for file in files)
            try:
                with formats.open(path) as model:
                    if (kind := _kind(model)) is not None:
                        found.append(FoundModel(path, kind, len(files), size))
            except AprError as error:
                skipped[path] = error.message
    return ModelFolder(top, found, skipped)


def _kind(model: Model) -> str | None:
    """The format of a row; None for an importance matrix, which is a GGUF without a model."""
    if imatrix.KEYS[1] in model.metadata:
        return None
    if os.path.isfile(os.path.join(model.path, _CONFIGS[1])):
        return "adapter"
    native = model.native
    is_mlx = isinstance(native, HfNative) and any(
        shard.metadata.get("format") == "mlx" for shard in native.shards.values()
    )
    return "mlx" if is_mlx else model.format


def _candidates(folder: str, depth: int) -> Iterator[tuple[str, list[str]]]:
    """(path, its files) of everything that is named like a model."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    shards: dict[str, list[str]] = {}
    for name in names:
        path = os.path.normpath(os.path.join(folder, name))
        if os.path.isdir(path) and not os.path.islink(path):
            if any(os.path.isfile(os.path.join(path, config)) for config in _CONFIGS):
                yield path, [entry.path for entry in os.scandir(path) if entry.is_file()]
            elif depth > 1:
                yield from _candidates(path, depth - 1)
        elif name.endswith(_SUFFIXES) and os.path.isfile(path):
            shards.setdefault(_PART.sub(r"-of-\2", path), []).append(path)
    yield from ((files[0], files) for files in shards.values())
