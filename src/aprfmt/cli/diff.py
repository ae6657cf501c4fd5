"""`apr diff`: what two models differ in, with an exit code that scripts can use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from aprfmt.cli.options import JsonOption, QuietOption
from aprfmt.cli.output import as_text, out, printable
from aprfmt.cli.progress import Bar
from aprfmt.text import plural

if TYPE_CHECKING:
    from aprfmt.inspection.diff import Comparison, Difference

_MAX_LINES = 40


def command(
    a: Annotated[str, typer.Argument(metavar="A", help="A model, in any readable form.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one; the container may differ.")],
    *,
    values: Annotated[
        bool, typer.Option("--values", help="Compare only the tensors, by decoded value.")
    ] = False,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            metavar="X",
            min=0.0,
            help="With --values: largest difference to accept.",
        ),
    ] = 0.0,
    metadata_only: Annotated[
        bool, typer.Option("--metadata-only", help="Compare only the metadata.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Compare two models. Exit status: 0 same, 1 different, 2 trouble.

    \b
    apr diff old.apr new.apr
    apr diff model.gguf model.apr --values
    """
    from aprfmt.inspection.diff import diff

    with Bar("comparing") as bar:
        found = diff(
            a, b, values=values, tolerance=tolerance, metadata_only=metadata_only, progress=bar.progress
        )
    out.result(found.to_json(), _text(found))
    return 0 if found.identical else 1


def _text(found: Comparison) -> Iterator[str]:
    for row in found.differences[:_MAX_LINES]:
        yield f"{out.style(row.kind, 'cyan')} {out.style(printable(row.name), 'bold')}{_detail(row)}"
        yield f"  {out.style('-', 'red')} {_value(row.a)}"
        yield f"  {out.style('+', 'green')} {_value(row.b)}"
    if len(found.differences) > _MAX_LINES:
        yield f"… {len(found.differences) - _MAX_LINES} more; --json lists all"
    yield from found.notes
    n = found.tensors_compared
    counts = f", {plural(n, 'tensor')} compared" if n else ""
    n = len(found.differences)
    yield f"same{counts}" if found.identical else f"different: {plural(n, 'difference')}{counts}"


def _detail(row: Difference) -> str:
    if (far := row.distance) is not None:
        text = f"{far.n_different:,} of {far.n_values:,} values, at most {far.max_diff:.3g} apart"
        return f": {row.what} ({text})"
    if row.first_difference is not None:
        return f": first at item {row.first_difference}"
    return f": {row.what}" if row.what is not None else ""


def _value(value: object) -> str:
    return "(absent)" if value is None else printable(as_text(value))
