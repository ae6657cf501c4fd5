"""Writes pages to files."""

from __future__ import annotations

import os

from aprfmt.errors import UsageError
from aprfmt.io.pipe import FileLayout, Literal, WriteOptions, write_file
from aprfmt.types import PathLike


def check_page(path: PathLike, *, also: tuple[str, ...] = (), option: str = "-o") -> None:
    """Raises UsageError unless `path`, the value of `option`, has the suffix of a page, or one in `also`."""
    if not os.fspath(path).lower().endswith((".html", ".htm", *also)):
        others = "".join(f", or {option} page{s}" for s in also)
        raise UsageError(f"the page is HTML: {option} page.html{others}", path=path)


def write_page(path: PathLike, content: str | bytes, *, force: bool = False) -> None:
    """Writes a page atomically; replaces an existing file only with `force`."""
    data = content.encode() if isinstance(content, str) else content
    write_file(os.fspath(path), FileLayout(os.path.basename(path), [Literal(data)]), WriteOptions(force=force))
