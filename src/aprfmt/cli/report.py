"""`apr report`: a page about a training run or about a model file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from aprfmt.cli.options import ForceOption, JsonOption, QuietOption
from aprfmt.cli.output import out, pairs, printable
from aprfmt.cli.progress import Bar
from aprfmt.errors import UsageError
from aprfmt.text import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from aprtrain.report.page import RunReport


def command(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="The folder of a training run, even an unfinished one, or a model."
        ),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="page.html; for a run also curves.png. [default: a summary]",
        ),
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a self-contained HTML page.

    About a training run: result, curves, configuration, provenance; a .png has only the curves and needs matplotlib.
    About a model: dimensions, dtypes, the values of every layer, tokenizer, provenance.

    \b
    apr report run
    apr report run -o page.html
    apr report run -o curves.png --force
    apr report model.gguf -o page.html
    apr report run --json
    """
    from aprfmt.api import report
    from aprfmt.formats import detect
    from aprtrain.report.page import is_run

    if is_run(Path(file)):
        body = report(file, output, force=force)
        out.result(body, _text(cast("RunReport", body), output))
        return
    if output is None and out.mode != "json":
        detect(file)  # a path that holds no model is the greater mistake
        raise UsageError("the report on a model is an HTML page", hint="add -o page.html, or see apr inspect")
    with Bar("reading") as bar:
        body = report(file, output, force=force, progress=bar.progress)
    out.result(body, pairs([("tensors", str(body["tensor_count"])), ("wrote", str(output))]))


def _text(body: RunReport, output: Path | None) -> Iterator[str]:
    from aprtrain.report.page import STATUS, name, sentence

    words, _ = STATUS[body["status"]]
    yield out.style(printable(f"{name(body)}: {words}"), "bold")
    of = f" of {body['total_steps']:,.0f}" if body["total_steps"] else ""
    rows = [
        ("result", sentence(body)),
        ("steps", f"{body['steps']:,}{of}, {format_count(int(body['tokens']))} tokens"),
    ]
    if body["seconds"] is not None:
        rows.append(("time", format_seconds(body["seconds"])))
    speed = [f"{body['tokens_per_s']:,.0f} tokens/s"] if body["tokens_per_s"] is not None else []
    speed += [f"MFU {body['mfu']:.1%}"] if body["mfu"] is not None else []
    speed += [f"peak {format_bytes(body['memory_bytes'])}"] if body["memory_bytes"] is not None else []
    if speed:
        rows.append(("speed", ", ".join(speed)))
    if body["error"]:
        rows.append(("error", body["error"]))
    if body["failed_save_count"]:
        rows.append(("failed saves", str(body["failed_save_count"])))
    if body["skipped_lines"]:
        rows.append(("damaged lines", f"{body['skipped_lines']}, skipped"))
    if output is not None:
        rows.append(("wrote", str(output)))
    yield from pairs(rows)
