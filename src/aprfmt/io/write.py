"""Writes planned files: one atomic file or one atomic folder, with progress, through the one pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from aprfmt.errors import RefusedError, storage_errors
from aprfmt.io.files import is_file, is_folder, is_same
from aprfmt.io.pipe import DEFAULT_FLOW, Flow, Progress, write_layout
from aprfmt.io.segments import FileLayout
from aprfmt.io.sink import AtomicFile, AtomicFolder

StartProgress = Callable[[int], Progress]
"""Called with the total bytes before writing; gives the function to call with each piece."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How outputs are written: `force` replaces what is there, without `fsync` a power cut may lose them."""

    force: bool = False
    progress: StartProgress | None = None
    flow: Flow = DEFAULT_FLOW
    fsync: bool = True


# Weight files of an older export that must not stay beside new ones.
_STALE = ("model*.safetensors", "model.safetensors.index.json")

# An old tokenizer beside a new one would be read together with it.
_STALE_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)


def write_file(
    target: str, layout: FileLayout, options: WriteOptions, check: Callable[[str], None] | None = None
) -> None:
    """Writes `layout` as the file `target`. Raises ExistsError, StorageError.

    `check` gets the path of the complete temporary file; when it raises, the target never appears.
    """
    advance = options.progress(layout.n_bytes) if options.progress else None
    with AtomicFile(target, force=options.force, n_bytes=layout.n_bytes, fsync=options.fsync) as sink:
        write_layout(layout, sink, advance, options.flow)
        if check is not None:
            sink.flush()
            check(sink.temporary)


def write_parts(
    folder: str,
    layouts: Sequence[FileLayout],
    options: WriteOptions,
    check: Callable[[str], None] | None = None,
) -> None:
    """Writes `layouts` as files of the existing `folder`, all or none of them. Raises like write_file.

    `check` gets the path of the first file while all of them stand, complete, in a temporary folder.
    """
    n_bytes = sum(layout.n_bytes for layout in layouts)
    advance = options.progress(n_bytes) if options.progress else None
    with AtomicFolder(folder, force=options.force, n_bytes=n_bytes, shared=True) as temporary:
        _write_all(temporary, layouts, options, advance)
        if check is not None:
            check(str(temporary / layouts[0].name))


def check_inputs_stay(target: Path, names: Collection[str], sources: Iterable[str]) -> None:
    """Refuses a folder whose new files, or whose clearing of old weights, would hit one of the sources."""
    for source in map(Path, sources):
        if not (is_folder(target) and is_file(source) and is_same(source.parent, target)):
            continue
        if source.name in names or any(fnmatchcase(source.name, pattern) for pattern in _STALE):
            raise RefusedError(
                f"the output folder holds the input {source.name}",
                path=target,
                hint="choose another folder with -o",
            )


def write_folder(target: str, layouts: Sequence[FileLayout], options: WriteOptions) -> None:
    """Writes `layouts` as the files of the folder `target`; names may hold `/`. Raises like write_file."""
    n_bytes = sum(layout.n_bytes for layout in layouts)
    advance = options.progress(n_bytes) if options.progress else None
    brings_tokenizer = any(layout.name in _STALE_TOKENIZER for layout in layouts)
    stale = _STALE + (_STALE_TOKENIZER if brings_tokenizer else ())
    with AtomicFolder(target, force=options.force, n_bytes=n_bytes, stale=stale) as folder:
        _write_all(folder, layouts, options, advance)


def _write_all(
    folder: Path, layouts: Sequence[FileLayout], options: WriteOptions, advance: Progress | None
) -> None:
    for layout in layouts:
        path = folder / layout.name
        if path.parent != folder:
            with storage_errors(path.parent):
                os.makedirs(path.parent, exist_ok=True)
        with AtomicFile(path, force=True, n_bytes=layout.n_bytes, fsync=options.fsync) as sink:
            write_layout(layout, sink, advance, options.flow)
