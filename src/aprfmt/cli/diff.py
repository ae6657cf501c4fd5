"""`apr diff`: what two models differ in, with an exit code that scripts can use."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aprfmt.cli.options import JsonOption, QuietOption
from aprfmt.cli.output import out, plain, printable
from aprfmt.cli.progress import Bar

if TYPE_CHECKING:
    from aprfmt.inspection.diff import Comparison, How

_MAX_LINES = 40


def command(
    a: Annotated[str, typer.Argument(metavar="A", help="A model, in any readable form.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one; the container may differ.")],
    *,
    values: Annotated[
        bool, typer.Option("--values", help="Compare tensors alone, by decoded value.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option("--tolerance", metavar="X", min=0.0, help="With --values: what counts as equal.")
    ] = 0.0,
    metadata_only: Annotated[bool, typer.Option("--metadata-only", help="Leave the tensors alone.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Compare two models. Exit 0 the same, 1 different, 2 trouble.

    \b
    apr diff old.apr new.apr
    apr diff model.gguf model.apr --values
    """
    from aprfmt.errors import UsageError
    from aprfmt.inspection.diff import How

    if math.isnan(tolerance):
        raise UsageError("--tolerance is not a number")
    if tolerance and not values:
        raise UsageError("--tolerance needs --values", hint="apr diff A B --values --tolerance 1e-3")
    if values and metadata_only:
        raise UsageError("--values and --metadata-only exclude each other")
    found = _compare(a, b, How(values, tolerance, metadata_only))
    body = {
        "a": a,
        "b": b,
        "identical": found.identical,
        "differences": found.differences,
        "tensors_compared": found.tensors_compared,
        "notes": found.notes,
    }
    out.result(body, _text(found))
    return 0 if found.identical else 1


def _compare(a: str, b: str, how: How) -> Comparison:
    from aprfmt.formats import open as open_model
    from aprfmt.inspection.diff import Comparison, diff, same_files

    with open_model(a) as left, open_model(b) as right, Bar("comparing") as bar:
        if same_files(left, right):
            return Comparison(notes=["the files are byte for byte the same"])
        total = sum(t.n_bytes for t in left.tensors.entries)
        advance = bar.progress(total) if bar.progress and not how.metadata_only else None
        return diff(left, right, how, advance)


def _text(found: Comparison) -> Iterator[str]:
    for row in found.differences[:_MAX_LINES]:
        yield f"{out.style(row['kind'], 'cyan')} {out.style(printable(row['name']), 'bold')}{_detail(row)}"
        yield f"  {out.style('-', 'red')} {_value(row['a'])}"
        yield f"  {out.style('+', 'green')} {_value(row['b'])}"
    if len(found.differences) > _MAX_LINES:
        yield f"… {len(found.differences) - _MAX_LINES} more; --json lists all"
    yield from found.notes
    n = found.tensors_compared
    counts = f", {n:,} tensor{'s' * (n != 1)} compared" if n else ""
    n = len(found.differences)
    yield f"same{counts}" if found.identical else f"different: {n:,} difference{'s' * (n != 1)}{counts}"


def _detail(row: Mapping[str, Any]) -> str:
    if "n_different" in row:
        text = f"{row['n_different']:,} of {row['n_values']:,} values, at most {row['max_diff']:.3g} apart"
        return f": {row['what']} ({text})"
    if "first_difference" in row:
        return f": first at item {row['first_difference']}"
    return f": {row['what']}" if "what" in row else ""


def _value(value: Any) -> str:
    if value is None:
        return "(absent)"
    return printable(value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False))
