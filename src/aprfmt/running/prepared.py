"""A model of any form as a GGUF that llama.cpp loads, exported once into a cache."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aprfmt
from aprfmt import formats
from aprfmt.convert.api import Report, convert_model
from aprfmt.convert.targets.base import parse_size
from aprfmt.errors import storage_error
from aprfmt.io.cache import CacheFolder
from aprfmt.io.source import is_folder, watch_opened
from aprfmt.text import format_bytes
from aprfmt.types import PathLike

SIZE_VARIABLE = "APR_CACHE_SIZE"
"""Environment variable: how much room exports may take, the latest one apart."""

_DEFAULT_SIZE = "30GB"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A GGUF to load.

    Attributes:
        path: the file, or the first of its parts.
        n_bytes: of all parts.
        key: another one when the model has changed.
        report: of the export, where one was made.
    """

    path: str
    n_bytes: int
    key: str
    report: Report | None = None


def prepare(file: PathLike, *, say: Callable[[str], None] = lambda line: None) -> Prepared:
    """The model `file` as a GGUF: itself where it is one, else an export of it in the cache.

    An export is found again by the names, sizes, times and inodes of all files that the model is made of: a file that
    was written again has another time of change, which nobody can set back, so what is found was made of these bytes.

    Args:
        file: a model in any form.
        say: called with a line before something is exported.

    Raises:
        AprError: as convert_model.
    """
    name = formats.path_text(file, "file")
    with watch_opened() as opened, formats.open(name) as model:
        size, format = model.size_bytes, model.format
        if format == "gguf":
            parts = [source.path for source in model.sources]
            return Prepared(parts[0], size, key(parts, {}))
        sources = sorted({str(model.path), *(source.path for source in opened)})
    return exported(".gguf", sources, name, size, {}, say)


def exported(
    suffix: str, sources: list[str], name: str, size: int, options: dict[str, object], say: Callable[[str], None]
) -> Prepared:
    """What convert_model makes of `name` with `options`, from the cache if it is there.

    Args:
        suffix: of the file to make.
        sources: every file and folder that it depends on.
        name: the model.
        size: its bytes, to be said.
        options: of convert_model.
        say: called with a line before something is exported.
    """
    folder = CacheFolder("exports")
    stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in Path(name).name)[:40]
    own = key(sources, options)
    with folder.make(f"{stem}-{own}{suffix}") as (target, found):
        report = None
        if not found:
            say(f"exporting {name} ({format_bytes(size)}) to the cache, once")
            report = convert_model(name, target, force=True, fsync=False, **options)  # type: ignore[arg-type]
        limit = parse_size(os.environ.get(SIZE_VARIABLE) or _DEFAULT_SIZE, least=0, name=SIZE_VARIABLE)
        folder.trim(limit, target)
        return Prepared(str(target), target.stat().st_size, own, report)


def key(sources: list[str], options: dict[str, object]) -> str:
    """A name for what the files and folders `sources` are now, for `options`, and for this version of the package."""
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
"""Files of a repository that say what the weights beside them are."""


def _files(path: str) -> Iterator[str]:
    """A file and those beside it that say what it is; of a folder all files."""
    if is_folder(path):
        for where, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield from (os.path.join(where, name) for name in names)
        return
    yield path
    if not path.endswith(".apr"):
        folder = os.path.dirname(path) or "."
        yield from (entry.path for entry in os.scandir(folder) if entry.name.endswith(_BESIDE) and entry.is_file())
