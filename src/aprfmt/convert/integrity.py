"""A model that is read to be written again: whether it is whole is known before the output gets its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aprfmt import formats
from aprfmt.io.source import watch_opened
from aprfmt.model import Model
from aprfmt.types import PathLike


@contextmanager
def open_checked(path: PathLike) -> Iterator[tuple[Model, Callable[[], None]]]:
    """Opens the model at `path`; gives it, and the check to make of the source when all of the output is written.

    The check raises ChecksumError where a checksum of the container does not fit, CorruptError where one of the files
    that the block opened has changed since. What was streamed meanwhile is not read again for it.
    """
    with watch_opened() as opened, formats.open(path) as model:
        if model.convention == "apr":
            model.record_reads()

        def confirm() -> None:
            for source in opened:
                source.check_unchanged()
            model.check_intact()

        yield model, confirm
