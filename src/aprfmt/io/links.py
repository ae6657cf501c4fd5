"""Symbolic links that lead out of a model's folder: their targets would become part of the output."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from aprfmt.errors import ChangedError, RefusedError, storage_errors
from aprfmt.io.source import FileIdentity, Source
from aprfmt.text import first_few
from aprfmt.types import PathLike

FOLLOW = "--follow-links"
"""The option that accepts such links."""


def check_links(folder: PathLike, paths: Iterable[PathLike]) -> None:
    """Raises RefusedError for files of `folder` that are links to outside.

    A snapshot in the hub's cache (models--ORG--NAME/snapshots/COMMIT) consists of links into its sibling `blobs`.
    """
    if found := links_out(folder, paths):
        raise RefusedError(
            f"symlinks pointing outside the folder: {first_few(found)}",
            path=folder,
            hint=f"replace the symlinks with the files, or follow them with {FOLLOW}",
        )


def links_out(folder: PathLike, paths: Iterable[PathLike]) -> list[str]:
    """The files of `folder` among `paths` that link to outside of it, each with its target."""
    return [f"{os.path.relpath(path, folder)!r} ({real})" for path, real in _outside(folder, paths)]


def check_opened(folder: PathLike, paths: Iterable[PathLike], opened: Iterable[Source]) -> None:
    """Raises as `check_links`, for the paths that were `opened`, even if their links changed since.

    Also raises ChangedError if a path now leads to another file.
    """
    own = {os.path.abspath(path) for path in paths}
    sources = {place: source for source in opened if (place := os.path.abspath(source.path)) in own}
    check_links(folder, sources)
    for place, source in sources.items():
        with storage_errors(place):
            now = FileIdentity.of(os.lstat(os.path.realpath(place)))
        if source.identity is not None and now != source.identity:
            raise ChangedError("the file changed while it was read: it was replaced by another file", path=place)


def _outside(folder: PathLike, paths: Iterable[PathLike]) -> Iterator[tuple[PathLike, str]]:
    """Yields each of `paths` that lies outside `folder`, with its real path."""
    roots = tuple(root + os.sep for root in _roots(os.path.realpath(folder)))
    for path in paths:
        real = os.path.realpath(path)
        if not real.startswith(roots):
            yield path, real


def _roots(folder: str) -> Iterator[str]:
    yield folder
    parts = folder.split(os.sep)
    for i, part in enumerate(parts[1:], 1):
        if part == "snapshots" and parts[i - 1].startswith("models--"):
            yield os.sep.join([*parts[:i], "blobs"])
