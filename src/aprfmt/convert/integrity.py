"""Verifies that the source of a conversion is intact before the output gets its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aprfmt import formats
from aprfmt.canonical.model import Canonical
from aprfmt.convert.source_manifest import read_manifest
from aprfmt.errors import AprError, ChecksumError, OutOfMemoryError, RefusedError, StorageError, UnsupportedError
from aprfmt.formats import apr2
from aprfmt.formats.apr_metadata import SOURCE_KEY
from aprfmt.io.pipe import layout_digest
from aprfmt.io.source import watch_opened
from aprfmt.model import Model
from aprfmt.types import PathLike


@contextmanager
def open_checked(path: PathLike, *, reopens: bool = True) -> Iterator[tuple[Model, Callable[[str], None]]]:
    """Opens the model at `path`; returns it, and the check to run when the whole output is written, given its path.

    `reopens`: whether the output is opened again; a package may be recognized by a name that it does not have yet.

    The check raises ChecksumError if a checksum of the container does not match, ChangedError if one of the files that
    the block opened has changed since, RefusedError if the output cannot be read back. Data streamed meanwhile is not
    read again.
    """
    with watch_opened() as opened, formats.open(path) as model:
        if model.convention == "apr":
            model.record_reads()

        def confirm(output: str) -> None:
            for source in opened:
                source.check_unchanged(digest=True)
            model.check_intact()
            if reopens:
                read_back(output)

        try:
            yield model, confirm
        except ChecksumError as error:  # for a file that would be restored: the source is damaged
            error.path = error.path or str(model.path)
            raise


def read_back(output: str) -> None:
    """Opens the output as any command would: header, index, dimensions.

    The vocabulary and the source manifest were read, or built, when the output was planned. Raises RefusedError.
    """
    try:
        with formats.open_own(output) as model:
            if model.convention != "apr":  # whose dimensions are stored with the vocabulary, see targets.apr
                _ = model.hparams
    except (StorageError, OutOfMemoryError):
        raise
    except AprError as error:
        raise RefusedError(
            f"the output could not be read back, so it was not written: {error.message}",
            path=output,
            tensor=error.tensor,
            hint="the source may be damaged: check it with apr validate SOURCE",
        ) from error


def altered_files(c: Canonical) -> list[tuple[str, str]]:
    """The source files that the `.apr` `c` would not restore as imported, each with the kind of its digest.

    Produces all of them. Raises UnsupportedError if no digests are recorded.
    """
    model = c.model
    value = model.metadata.get(SOURCE_KEY) if apr2.native_of(model) is not None else None
    if value is None:
        raise UnsupportedError("the file has no source manifest")
    manifest = read_manifest(value, c.stored, c.tokenizer, str(model.path))
    if manifest is None:
        raise UnsupportedError("the model was edited after its import, so its source files cannot be restored")
    known = [(layout, layout.digest) for layout in manifest.layouts() if layout.digest is not None]
    if not known:
        raise UnsupportedError("the source manifest has no digests")
    return [(layout.name, digest.kind) for layout, digest in known if layout_digest(layout) != digest]
