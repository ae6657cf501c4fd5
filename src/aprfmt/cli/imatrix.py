"""`apr imatrix`: compute or merge importance matrices."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import aprfmt
from aprfmt.cli.conversion import refuse_terminal
from aprfmt.cli.options import Common, ForceOption, LlamaMachine, PlanOption, TextFieldOption
from aprfmt.cli.output import out, pairs, printable, progress_bar, tokens
from aprfmt.errors import UsageError
from aprfmt.text import first_few, format_seconds, plural

if TYPE_CHECKING:
    from aprfmt.running.importance import ImatrixReport

_OF_MERGE = ("files", "output", "merge", "plan", "force")
"""Options that apply to --merge."""


@dataclass(kw_only=True)
class ImatrixCommand(Common, LlamaMachine):
    """Compute an importance matrix of a model on text, or merge several.

    Activation statistics of every weight matrix are collected while llama.cpp processes the text. `apr quantize
    --imatrix` and llama-quantize read the result. An output named .dat is written in the legacy format.

    \b
    apr imatrix model.gguf --data text.txt -o model.imatrix.gguf
    apr imatrix model.apr -d wiki.txt -d code.jsonl --chunks 200 -o m.imatrix.gguf
    apr imatrix model.gguf --data text.txt -o m.imatrix.gguf --resume
    apr imatrix a.imatrix.gguf b.imatrix.gguf --merge -o both.imatrix.gguf
    """

    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="A model in any format; with --merge, importance matrices.")
    ]
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="Output file.")]
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", "-d", metavar="PATH", help="Text, jsonl or parquet, or a folder of these; repeatable."),
    ] = None
    chunks: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after N chunks.")] = None
    chunk_size: Annotated[int, typer.Option(metavar="N", min=32, help="Tokens per chunk.")] = 512
    process_output: Annotated[
        bool, typer.Option("--process-output", help="Also collect statistics for the output head (rarely needed).")
    ] = False
    parse_special: Annotated[bool, typer.Option("--parse-special", help="Parse special tokens in the text.")] = False
    text_field: TextFieldOption = "text"
    merge: Annotated[bool, typer.Option("--merge", help="Merge importance matrices of one model.")] = False
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted run with the same output.")] = False
    second_moments: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write the second moments of the inputs, for apr convert --second-moments."
        ),
    ] = None
    plan: PlanOption = False
    force: ForceOption = False

    def __call__(self) -> None:
        """Runs the command."""
        refuse_terminal(self.output)
        if self.merge:
            for field in fields(self):
                if field.name not in _OF_MERGE and getattr(self, field.name) not in (field.default, []):
                    raise UsageError(f"--{field.name.replace('_', '-')} does not apply to --merge")
            report = aprfmt.merge_imatrix(self.files, self.output, plan=self.plan, force=self.force)
        else:
            data = self._texts()
            with progress_bar("computing", tokens) as progress:
                report = aprfmt.imatrix(
                    self.files[0],
                    data,
                    self.output,
                    chunks=self.chunks,
                    chunk_size=self.chunk_size,
                    process_output=self.process_output,
                    parse_special=self.parse_special,
                    text_field=self.text_field,
                    resume=self.resume,
                    second_moments=self.second_moments,
                    threads=self.threads,
                    gpu_layers=self.gpu_layers,
                    plan=self.plan,
                    force=self.force,
                    progress=progress,
                    log=out.progress_line,
                )
        for warning in report.warnings:
            out.warning(warning)
        out.result(report.to_json(), _text(report, self.plan))

    def _texts(self) -> list[Path]:
        """The texts: --data, or else the files behind the model."""
        model, *more = self.files
        if more and (self.data or any(name.endswith((".gguf", ".dat")) for name in more)):
            are_matrices = all(name.endswith(".dat") or "imatrix" in name for name in self.files)
            texts = [*map(str, self.data or [])] or ["TEXT"]
            merge, one = ["--merge", *self.files], [model, "--data", *texts]
            merging, computing = (
                shlex.join(["apr", "imatrix", *words, "-o", str(self.output)]) for words in (merge, one)
            )
            both = f"{computing}\nto merge importance matrices:\n{merging}"
            raise UsageError(
                f"apr imatrix takes one model, not {len(self.files)}", hint=merging if are_matrices else both
            )
        if more and self.force and "--force" not in out.arguments:  # llama-imatrix's -f TEXT: nothing is overwritten
            self.force = False
            out.note(shlex.join(["apr", "imatrix", model, "--data", *more, "-o", str(self.output)]))
        found = self.data or [Path(name) for name in more]
        if not found:
            raise UsageError("--data is missing", hint=f"apr imatrix {model} --data text.txt -o {self.output}")
        return found


def _text(report: ImatrixReport, plan: bool) -> Iterator[str]:
    verb = "would write" if plan else out.style("wrote", "green")
    yield f"{verb} {out.style(printable(report.output), 'bold')}"
    tokens = f", {report.chunks * report.chunk_size:,} tokens" if report.tokens else ""
    rows = (
        [("text", f"{plural(report.chunks, 'chunk')} of {report.chunk_size:,} tokens{tokens}")] if report.chunks else []
    )
    if report.resumed:
        rows.append(("resumed", f"{plural(report.resumed, 'chunk')} from the earlier run"))
    if report.entries:
        rows.append(("entries", f"{report.entries:,} weights"))
    if report.second_moments:
        rows.append(("second moments", printable(report.second_moments)))
    if report.unused:
        names = first_few(f"{name} {first_few(experts)}" for name, experts in report.unused.items())
        rows.append(("never used", f"experts of {names}"))
    if report.datasets:
        rows.append(("of", first_few(report.datasets)))
    if not plan:
        rows.append(("time", format_seconds(report.seconds)))
    yield from pairs(rows)
