"""`--junit FILE` and `--sarif FILE`: reports of validate, lint and qa for CI services."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aprfmt.errors import AprError, ExistsError

if TYPE_CHECKING:
    from aprfmt.inspection.ci_reports import CiCase

JunitOption = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Also write the results as JUnit XML.")
]
SarifOption = Annotated[Path | None, typer.Option("--sarif", metavar="FILE", help="Also write the findings as SARIF.")]

_MARKS = (b'<testsuites name="apr ', b'"name": "apr"')
_HEAD_BYTES = 512


@contextmanager
def ci_reports(
    command: str, file: str, junit: Path | None, sarif: Path | None
) -> Iterator[Callable[[Sequence[CiCase]], None]]:
    """Gives the function that writes the requested reports; an error of the block is reported as well.

    A report replaces an earlier report of apr, and no other file.
    """
    targets = [(path, kind) for path, kind in ((junit, "junit"), (sarif, "sarif")) if path is not None]
    for path, _ in targets:
        _check_replaceable(path)

    def write(cases: Sequence[CiCase]) -> None:
        from aprfmt.inspection import ci_reports as reports
        from aprfmt.io.pipe import FileLayout, Literal, WriteOptions, write_file

        made = {"junit": reports.junit, "sarif": reports.sarif}
        for path, kind in targets:
            data = made[kind](command, file, cases)
            write_file(str(path), FileLayout(path.name, [Literal(data)]), WriteOptions(force=True))

    try:
        yield write
    except AprError as error:
        if targets:
            from aprfmt.inspection.ci_reports import CiCase

            write([CiCase(error.code, "error", error.message, error.tensor, error.hint)])
        raise


def _check_replaceable(path: Path) -> None:
    from aprfmt.io.source import Source, exists

    if not exists(path):
        return
    with Source.open(path) as source:
        head = source.read(0, min(source.size, _HEAD_BYTES))
    if not any(mark in head for mark in _MARKS):
        raise ExistsError("the file is not a report of apr", path=path, hint="remove it, or choose another name")
