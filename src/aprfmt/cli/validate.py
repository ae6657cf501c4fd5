"""`apr validate`: integrity and content rules, one line each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from aprfmt.cli.options import JsonOption, ModelArgument, QuietOption
from aprfmt.cli.output import out, printable, width
from aprfmt.cli.progress import Bar

if TYPE_CHECKING:
    from aprfmt.inspection.validate import Validation

_MARKS = {
    "pass": ("ok  ", "green"),
    "warn": ("warn", "yellow"),
    "fail": ("FAIL", "red"),
    "skip": ("-   ", "dim"),
}
_MAX_LINES = 20


def command(
    file: ModelArgument,
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Count warnings as failures.")] = False,
    min_score: Annotated[
        int, typer.Option("--min-score", metavar="N", min=0, max=100, help="Fail below this score.")
    ] = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Check checksums, extents, values, names, shapes and tokenizer. Exit status: 0 passed, 5 failed.

    \b
    apr validate model.apr
    apr validate model.gguf --strict --min-score 95 --json
    """
    from aprfmt.inspection.validate import validate

    with Bar("validating") as bar:
        found = validate(file, strict=strict, min_score=min_score, progress=bar.progress)
    out.result(found.to_json(), _text(found, min_score))
    return 0 if found.passed else 5


def _text(found: Validation, min_score: int) -> Iterator[str]:
    yield f"{out.style(printable(found.file), 'bold')}  {found.format}"
    shown: dict[str, int] = {}
    for check in found.checks:
        n = shown[check.id] = shown.get(check.id, 0) + 1
        if n <= _MAX_LINES:
            tensor = f" ({check.tensor})" if check.tensor is not None else ""
            yield _line(check.status, check.id, check.message + tensor)
    for name, n in shown.items():
        if n > _MAX_LINES:
            yield f"        {n - _MAX_LINES} more of {name}; --json lists all"
    for skip in found.skipped:
        yield _line("skip", skip.id, "not applicable: " + skip.message)
    word, style = ("passed", "green") if found.passed else ("FAILED", "red")
    goal = f", below the minimum of {min_score}" if found.score < min_score else ""
    yield f"{out.style(word, style)}, score {found.score} of 100{goal}"


def _line(status: str, name: str, message: str) -> str:
    mark, style = _MARKS[status]
    text = printable(message)
    if out.data_stream.isatty():  # whole lines where another program reads them
        import textwrap

        text = "\n".join(textwrap.wrap(text, max(20, width() - 28), subsequent_indent=" " * 28))
    return f"  {out.style(mark, style)}  {name:<18}  {text}"
