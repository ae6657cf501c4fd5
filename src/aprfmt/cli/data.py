"""`apr data`: what a training run would read, and what of it would be learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer

import aprfmt
from aprfmt.cli.options import Common, StrictOption, TextFieldOption
from aprfmt.cli.output import out, pairs, printable
from aprfmt.cli.training import data_rows


@dataclass(kw_only=True)
class Data(Common):
    """Show what training data hold: documents, tokens, what of them is learned, lengths, an example.

    They are read as `apr distill` and `apr pretrain` read them, with the tokenizer and the chat template of the model
    that is to be trained. Of conversations the answers are learned; in the example they are green, and stand in [[ ]]
    where there is no colour.

    \b
    apr data chats.jsonl --model model.gguf
    apr data chats.jsonl:0.7 src/:0.3 --model model.gguf --json
    apr data table.csv --model model.gguf --text-field body --strict
    """

    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH[:WEIGHT]...", help="Text, jsonl, csv or parquet, folders of them, token shards."),
    ]
    model: Annotated[str, typer.Option(metavar="FILE", help="The model that is to read them.")]
    text_field: TextFieldOption = "text"
    strict: StrictOption = False

    def __call__(self) -> None:
        """Runs the command."""
        report = aprfmt.data(
            self.paths, model=self.model, text_field=self.text_field, strict=self.strict, log=out.progress_line
        )
        out.result(report.to_json(), _text(report))


def _text(report: aprfmt.DataReport) -> Iterator[str]:
    rows = [*data_rows(report.to_json())]
    if report.lengths:
        names = {"least": "shortest", "tenth": "10 %", "median": "median", "nine_tenths": "90 %", "most": "longest"}
        rows.append(("tokens each", ", ".join(f"{names[name]} {n:,}" for name, n in report.lengths.items())))
    yield from pairs(rows)
    if report.example:
        yield out.style("the first document begins", "cyan")
        yield "".join(_piece(text, is_learned) for text, is_learned in report.example)


def _piece(text: str, is_learned: bool) -> str:
    shown = "\n".join(printable(line) for line in text.split("\n"))
    if out.style("", "green"):
        return out.style(shown, "green" if is_learned else "dim")
    return f"[[{shown}]]" if is_learned else shown
