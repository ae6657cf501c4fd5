"""`apr data`: summarize training data and loss masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import aprfmt
from aprfmt.cli.options import Common, StrictOption, TextFieldOption
from aprfmt.cli.output import out, pairs, printable
from aprfmt.cli.training import data_rows


@dataclass(kw_only=True)
class Data(Common):
    """Summarize training data and loss masks, or tokenize the data once for any number of runs (-o).

    Shows documents, tokens, the share of tokens trained on, lengths and an example.

    Reads the data as `apr distill` and `apr pretrain` do, with the tokenizer and chat template of the model to train.
    In conversations only the answers are trained on; the example shows them in green, or in [[ ]] without color.

    \b
    apr data chats.jsonl --model model.gguf
    apr data chats.jsonl:0.7 src/:0.3 --model model.gguf --json
    apr data table.csv --model model.gguf --text-field body --strict
    apr data chats.jsonl --model model.gguf -o shards
    apr data hf://datasets/org/name --model model.gguf -o shards
    """

    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH[:WEIGHT]...",
            help="Text, jsonl, csv or parquet files, folders of them, token shards, hf://datasets/org/name.",
        ),
    ]
    model: Annotated[str, typer.Option(metavar="FILE", help="The model to train.")]
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Write token shards for --data of apr distill and pretrain."
        ),
    ] = None
    held_out: Annotated[
        float, typer.Option(metavar="X", help="With -o: fraction of the documents held out for evaluation.")
    ] = 0.01
    text_field: TextFieldOption = "text"
    strict: StrictOption = False

    def __call__(self) -> None:
        """Runs the command."""
        report = aprfmt.data(
            self.paths, model=self.model, output=self.output, held_out=self.held_out, text_field=self.text_field,
            strict=self.strict, log=out.progress_line,
        )  # fmt: skip
        out.result(report.to_json(), _text(report))


def _text(report: aprfmt.DataReport) -> Iterator[str]:
    rows = [*data_rows(report.to_json())]
    if report.lengths:
        names = {"least": "shortest", "tenth": "10 %", "median": "median", "nine_tenths": "90 %", "most": "longest"}
        rows.append(("tokens per document", ", ".join(f"{names[name]} {n:,}" for name, n in report.lengths.items())))
    yield from pairs(rows)
    if report.example:
        yield out.style("start of the first document", "cyan")
        yield "".join(_piece(text, is_learned) for text, is_learned in report.example)


def _piece(text: str, is_learned: bool) -> str:
    shown = "\n".join(printable(line) for line in text.split("\n"))
    if out.style("", "green"):
        return out.style(shown, "green" if is_learned else "dim")
    return f"[[{shown}]]" if is_learned else shown
