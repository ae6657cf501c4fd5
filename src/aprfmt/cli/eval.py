"""`apr eval`: how well a model predicts held-out text, and how close it is to another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aprfmt.cli.options import JsonOption, ModelArgument, QuietOption
from aprfmt.cli.output import out, pairs, printable
from aprfmt.text import format_count, format_seconds

if TYPE_CHECKING:
    from aprfmt.api import EvaluatedModel, Evaluation


def command(
    file: ModelArgument,
    *,
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            "-d",
            metavar="PATH",
            help="Text, jsonl or parquet, or a folder of them; for a run's token shards, the held-out part.",
        ),
    ],
    teacher: Annotated[
        str | None, typer.Option("--teacher", metavar="FILE", help="The model to compare with.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="NAME",
            help="cuda, cuda:N or cpu; nothing else is tried when it is missing.",
        ),
    ] = "cuda",
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len",
            metavar="N",
            min=2,
            help="Tokens of a window. [default: 2048, or the model's context if that is less]",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=2,
            help="Score about N tokens, spread evenly; text is still tokenised in full. [default: all]",
        ),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure cross entropy and perplexity on text; with a teacher KL(teacher, model) and agreement.

    If the evaluation fails, the exit status is 8 and no score is printed. With the original model as the teacher of
    a quantized one, the KL shows what quantization cost.

    \b
    apr eval run/model.apr --data held-out.jsonl --teacher big.gguf
    apr eval run/model.apr --data run/tokens --json
    apr eval q4.gguf --teacher model.apr --data text.txt --device cpu
    """
    from aprfmt.api import evaluate

    found = evaluate(file, data, teacher=teacher, device=device, seq_len=seq_len, limit=limit, log=_say)
    out.result(found.to_json(), _text(found))


def _say(text: str) -> None:
    """A line on stderr about how far it is, unless --quiet."""
    if out.mode != "quiet":
        print(text, file=out.error_stream, flush=True)


def _text(found: Evaluation) -> Iterator[str]:
    yield f"{printable(found.file)}: {_kind(found)}"
    rows = [
        ("cross entropy", f"{found.ce:.4f} nats per token, perplexity {found.perplexity:,.3f}"),
        ("first choice", f"correct for {found.accuracy:.2%} of the tokens"),
    ]
    if (teacher := found.teacher) is not None:
        rows += [
            ("teacher", f"{teacher.file}: {_kind(teacher)}, cross entropy {found.teacher_ce:.4f} nats"),
            ("KL", f"{found.kl:.4g} nats per token from the teacher to the model"),
            ("agreement", f"the same first choice at {found.agreement:.2%} of the tokens"),
        ]
    read = f"{found.tokens:,} tokens in {found.windows:,} windows of {found.seq_len:,}"
    left_out = ", ".join(f"{n} {what}" for what, n in found.left_out.items())
    yield from pairs(
        [
            *rows,
            ("read", f"{read}; {found.data_tokens:,} tokens in documents: {found.documents:,}"),
            *([("left out", left_out)] if left_out else []),
            ("time", f"{format_seconds(found.seconds)} on {found.device} in {found.dtype}"),
        ]
    )


def _kind(model: EvaluatedModel) -> str:
    return f"{model.architecture}, {format_count(model.parameters)} parameters, {model.format}"
