"""A model that is read to be written again: whether it is whole is known before the output gets its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aprfmt import formats
from aprfmt.canonical.model import Canonical
from aprfmt.convert.source_manifest import read_manifest
from aprfmt.errors import AprError, ChecksumError, RefusedError, StorageError, UnsupportedError
from aprfmt.formats import apr2
from aprfmt.formats.apr_metadata import SOURCE_KEY
from aprfmt.io.pipe import layout_digest
from aprfmt.io.source import watch_opened
from aprfmt.model import Model
from aprfmt.types import PathLike


@contextmanager
def open_checked(path: PathLike, *, reopens: bool = True) -> Iterator[tuple[Model, Callable[[str], None]]]:
    """Opens the model at `path`; gives it, and the check to make when all of the output is written, at a path.

    `reopens`: whether the output is opened again; a package may know its own form by a name that it has not got yet.

    The check raises ChecksumError where a checksum of the container does not fit, ChangedError where one of the files
    that the block opened has changed since, RefusedError where the output cannot be read again. What was streamed
    meanwhile is not read again for it.
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
        except ChecksumError as error:  # of a file that would be restored: what is damaged is the source
            error.path = error.path or str(model.path)
            raise


def read_back(output: str) -> None:
    """Opens what was written as any command would: header, index, dimensions.

    The vocabulary and the record of the source files were read, or made, when the output was planned. Raises
    RefusedError.
    """
    try:
        with formats.open(output) as model:
            if model.convention != "apr":  # whose dimensions stand beside the vocabulary, see targets.apr
                _ = model.hparams
    except StorageError:
        raise
    except AprError as error:
        raise RefusedError(
            f"the output could not be read back, so it was not written: {error.message}",
            path=output,
            tensor=error.tensor,
            hint="the source may be damaged: check it with apr validate SOURCE",
        ) from error


def altered_files(c: Canonical) -> list[tuple[str, str]]:
    """The source files that the `.apr` `c` would not give back as they were imported, each with the kind of its digest.

    All of them are made for it.

    Raises UnsupportedError where there is nothing to compare them with.
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
