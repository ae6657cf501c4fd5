"""`apr bench`: speed and memory of models in llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

import aprfmt
from aprfmt.cli.options import Common, ForceOption, LlamaMachine, PageOption
from aprfmt.cli.output import out, pairs, printable, progress_bar, table, with_page
from aprfmt.text import format_bytes, format_count, format_seconds, plural

if TYPE_CHECKING:
    from aprfmt.running.bench import BenchedModel, BenchReport, Samples


@dataclass(kw_only=True)
class Bench(Common, LlamaMachine):
    """Benchmark models in llama.cpp: prompt processing, text generation, time to first token, memory.

    Several models run alternately and are compared with the first. Exit status 1: a --gate was missed.

    \b
    apr bench model.gguf
    apr bench model.apr model-q8_0.gguf model-q4_k_m.gguf
    apr bench model.gguf model-q8_0.gguf -o page.html
    apr bench model.gguf --gate tok_s=325 --gate memory=2GB --json
    """

    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="The models, in any format.")]
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", metavar="N", min=1, help="Prompt length.")] = 512
    tokens: Annotated[int, typer.Option("--tokens", "-n", metavar="N", min=1, help="Tokens to generate.")] = 128
    runs: Annotated[int, typer.Option(metavar="N", min=1, help="Timed runs, after one warm-up run.")] = 5
    gate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Limit for each model: minimum tok_s, prompt_tok_s; maximum ttft_ms, memory, load_s; repeatable.",
        ),
    ] = None

    output: PageOption = None
    force: ForceOption = False

    def __call__(self) -> int:
        """Runs the command; returns 1 if a gate was missed."""
        with progress_bar("measuring", _tokens) as progress:
            report = aprfmt.bench(
                self.files, prompt_tokens=self.prompt_tokens, tokens=self.tokens, runs=self.runs, threads=self.threads,
                gpu_layers=self.gpu_layers, gates=self.gate or (), output=self.output, force=self.force,
                progress=progress, log=out.progress_line,
            )  # fmt: skip
        out.result(*with_page(report.to_json(), _text(report), self.output))
        return 0 if report.passed else 1


def _tokens(n: float) -> str:
    return f"{format_count(round(n))} tokens"


def _text(report: BenchReport) -> Iterator[str]:
    many = len(report.models) > 1
    for model in report.models:
        yield out.style(printable(model.file), "bold")
        yield from pairs(_rows(model))
    if many:
        yield ""
        header = ["ratio to the first", "prompt", "text", "first token", "memory"]
        cells = [
            [
                model.file,
                *(f"{each.ratio:.2f}x" for each in (model.prompt_tok_s, model.tok_s, model.ttft_ms)),
                f"{model.memory_bytes / (report.models[0].memory_bytes or 1):.2f}x",
            ]
            for model in report.models
        ]
        yield from table(header, cells, right=" ".join(header[1:]), indent=0)
    yield from pairs(
        [
            (
                "measured",
                f"{report.prompt_tokens:,} prompt tokens, {report.tokens:,} generated; "
                f"median of {plural(report.runs, 'run')}, "
                f"lowest to highest; {format_seconds(report.seconds)}",
            )
        ]
    )
    for gate in report.gates:
        word = out.style("met", "green") if gate.passed else out.style("missed", "red")
        yield f"{word}  {gate.gate} {gate.value:,.4g}, limit {gate.limit:,.4g}  {printable(gate.file)}"


def _rows(model: BenchedModel) -> list[tuple[str, str]]:
    def spread(found: Samples, unit: str) -> str:
        return f"{found.median:,.1f} {unit} ({found.min:,.1f} to {found.max:,.1f})"

    context = f", context {format_bytes(model.context_bytes)}" if model.context_bytes is not None else ""
    peak = format_bytes(model.memory_bytes) if model.memory_bytes else "unknown"
    return [
        ("prompt", spread(model.prompt_tok_s, "tokens/s")),
        ("text", spread(model.tok_s, "tokens/s")),
        ("first token", spread(model.ttft_ms, "ms")),
        ("loaded", f"in {format_seconds(model.load_s)}, {plural(model.threads, 'thread')}, {model.engine}"),
        ("memory", f"peak {peak}: weights {format_bytes(model.weight_bytes)}{context}"),
    ]
