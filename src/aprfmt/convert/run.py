"""Writes planned files: one atomic file or one atomic folder, with progress, through the one pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from aprfmt.io.pipe import Progress, write_layout
from aprfmt.io.segments import FileLayout
from aprfmt.io.sink import AtomicFile, AtomicFolder

StartProgress = Callable[[int], Progress]
"""Called with the total bytes before writing; gives the function to call with each piece."""

# Weight files of an older export that must not stay beside new ones.
_STALE = ("model*.safetensors", "model.safetensors.index.json")


def write_file(
    target: str,
    layout: FileLayout,
    *,
    force: bool,
    progress: StartProgress | None,
    check: Callable[[str], None] | None = None,
) -> None:
    """Writes `layout` as the file `target`. Raises ExistsError, StorageError.

    `check` gets the path of the complete temporary file; when it raises, the target never appears.
    """
    advance = progress(layout.n_bytes) if progress else None
    with AtomicFile(target, force=force, n_bytes=layout.n_bytes) as sink:
        write_layout(layout, sink, advance)
        if check is not None:
            check(sink.temporary)


def write_folder(
    target: str, layouts: Sequence[FileLayout], *, force: bool, progress: StartProgress | None
) -> None:
    """Writes `layouts` as the files of the folder `target`; names may hold `/`. Raises like write_file."""
    n_bytes = sum(layout.n_bytes for layout in layouts)
    advance = progress(n_bytes) if progress else None
    with AtomicFolder(target, force=force, n_bytes=n_bytes, stale=_STALE) as folder:
        for layout in layouts:
            path = folder / layout.name
            os.makedirs(path.parent, exist_ok=True)
            with AtomicFile(path, n_bytes=layout.n_bytes) as sink:
                write_layout(layout, sink, advance)
