"""`apr report`: a page about a training run or about a model file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from aprfmt.cli.options import ForceOption, JsonOption, QuietOption
from aprfmt.cli.output import out, pairs, printable
from aprfmt.cli.progress import Bar
from aprfmt.errors import UsageError
from aprfmt.text import format_bytes, format_count, format_seconds


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
    from aprtrain.report.summary import is_run, numbers, write

    path = Path(file)
    written = {"output": str(output) if output is not None else None}
    if not is_run(path):
        body = _model(file, output, force=force)
        lines = pairs([("tensors", str(body["tensor_count"])), ("wrote", str(output))])
        out.result({**body, **written}, lines)
        return
    body = numbers(path) if output is None else write(path, output, force=force)
    out.result({"file": file, **body, **written}, _text(body, output))


def _model(file: str, output: Path | None, *, force: bool) -> dict[str, object]:
    """Reads the model, writes its page where one is named; what it found."""
    from aprfmt.formats import open as open_model
    from aprfmt.inspection.model_page import html, survey
    from aprfmt.io.segments import FileLayout, Literal
    from aprfmt.io.write import WriteOptions, write_file

    with open_model(file) as model:
        if output is None and out.mode != "json":
            raise UsageError(
                "the report on a model is an HTML page", hint="add -o page.html, or see apr inspect"
            )
        if output is not None and output.suffix.lower() not in (".html", ".htm"):
            raise UsageError("the report on a model is an HTML page: -o page.html", path=output)
        with Bar("reading") as bar:
            n_bytes = sum(t.n_bytes for t in model.tensors.entries)
            found = survey(model, bar.progress(n_bytes) if bar.progress else None)
    if output is not None:
        layout = FileLayout(output.name, [Literal(html(found).encode())])
        write_file(str(output), layout, WriteOptions(force=force))
    return found.to_json() | {"file": file}


def _text(body: Mapping[str, Any], output: Path | None) -> Iterator[str]:
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
