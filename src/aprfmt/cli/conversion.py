"""What the commands of conversions share: how they call a function and print its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.cli.options import Common
from aprfmt.cli.output import out, progress_bar
from aprfmt.cli.report_text import done_text, plan_text
from aprfmt.errors import RefusedError

if TYPE_CHECKING:
    from aprfmt.convert.report import Report


@dataclass(kw_only=True)
class Conversion(Common):
    """A command that calls a conversion with the options of its schema."""

    def run(self, verb: str, function: Callable[..., Report], *paths: object, **fixed: object) -> None:
        """Calls `function` and prints its report or plan; the last of `paths` is the output."""
        refuse_terminal(paths[-1])
        report_of(verb, partial(function, *paths), self.given() | fixed)


def say_what_is_written(output: Path, format: str | None) -> None:
    """Prints a hint if neither a suffix nor --format determines the format of `output`."""
    if format is None and not output.suffix and not output.is_dir():
        out.hint(f"{output} has no suffix: writing a Hugging Face folder; for a GGUF use -o {output}.gguf")


def report_of(verb: str, function: Callable[..., Report], given: Mapping[str, object]) -> None:
    """Calls the conversion `function` with the options `given`; prints its report or plan."""
    plan = bool(given.get("plan"))
    with progress_bar(verb) as progress:
        report = function(progress=None if plan else progress, **given)
    for warning in report.warnings:
        out.warning(warning)
    out.result(report.to_json(), plan_text(report) if plan else done_text(report))


def refuse_terminal(output: object) -> None:
    """Refuses `-` as output: models are written atomically, to files."""
    if str(output) == "-":
        raise RefusedError("a model cannot be written to standard output", hint="-o FILE")
