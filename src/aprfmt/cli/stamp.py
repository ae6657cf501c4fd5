"""`apr stamp`: provenance and metadata edits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aprfmt.cli.convert import refuse_terminal
from aprfmt.cli.options import (
    DataLicenseOption,
    DataSourceOption,
    ForceOption,
    JsonOption,
    LicenseOption,
    QuietOption,
    TokenizerOption,
)
from aprfmt.cli.output import as_text, out, pairs, printable
from aprfmt.errors import UsageError
from aprfmt.text import format_bytes
from aprfmt.types import JsonObject

if TYPE_CHECKING:
    from aprfmt.convert.stamp import StampReport


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An .apr file.")],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="Where to write.")
    ] = None,
    license: LicenseOption = None,
    data_source: DataSourceOption = None,
    data_license: DataLicenseOption = None,
    hf_architecture: Annotated[
        str | None,
        typer.Option(
            "--hf-architecture",
            metavar="CLASS",
            help="Class as in config.json: LlamaForCausalLM.",
        ),
    ] = None,
    hf_model_type: Annotated[
        str | None,
        typer.Option("--hf-model-type", metavar="NAME", help="Model type as in config.json: llama."),
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option("--architecture", metavar="NAME", help="Family of the network, such as llama."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=JSON", help="Set any metadata key; repeatable."),
    ] = None,
    tokenizer: TokenizerOption = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Replace FILE itself, atomically.")] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Edit the metadata of an .apr file. The bytes of its tensors stay untouched.

    \b
    apr stamp model.apr -o stamped.apr --license MIT --data-source wikitext
    apr stamp model.apr --in-place --set 'description="a small model"'
    """
    from aprfmt.convert.stamp import stamp

    if (output is None) != in_place:
        raise UsageError("give either -o PATH or --in-place", hint=f"apr stamp {file} -o stamped.apr ...")
    if output is not None:
        refuse_terminal(output)
    report = stamp(
        file,
        file if output is None else output,
        license=license,
        data_source=data_source,
        data_license=data_license,
        hf_architecture=hf_architecture,
        hf_model_type=hf_model_type,
        architecture=architecture,
        set=parse_assignments(set_ or []),
        tokenizer=tokenizer,
        in_place=in_place,
        force=force,
    )
    out.result(report.to_json(), _text(report))


def parse_assignments(items: list[str]) -> JsonObject | None:
    """`KEY=JSON` texts as a dict; None when there are none. Raises UsageError for a value that is not JSON."""
    values: JsonObject = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not key or not equals:
            raise UsageError(f"--set {item!r} is not KEY=JSON", hint="--set 'author=\"me\"'")
        if key in values:
            raise UsageError(f"--set names {key!r} twice")
        try:
            values[key] = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise UsageError(
                f"the value of {key!r} is not JSON: {text!r}",
                hint=f"quote text twice: --set '{key}=\"{text}\"'",
            ) from None
    return values or None


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _text(report: StampReport) -> Iterator[str]:
    yield f"{out.style('stamped', 'green')} {out.style(printable(report.output), 'bold')}"
    rows = [(key, as_text(value)) for key, value in report.stamped.items()]
    yield from pairs([*rows, ("size", format_bytes(report.output_bytes))])
