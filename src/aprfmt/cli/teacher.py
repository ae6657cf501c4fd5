"""`apr teacher`: save a teacher's top-k log-probabilities to files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import aprfmt
from aprfmt.cli.options import Common, EngineOption, LlamaMachine, PlanOption, StrictOption, TextFieldOption
from aprfmt.cli.output import out, pairs, printable, progress_bar, tokens
from aprfmt.text import format_bytes, format_seconds


@dataclass(kw_only=True)
class TeacherCommand(Common, LlamaMachine):
    """Save a teacher's top-k log-probabilities and the residual mass of all other tokens to files.

    `apr distill --teacher-logprobs` trains from these files without the teacher. torch runs the families that can be
    trained, llama.cpp every decoder it supports; vLLM, SGLang and llama-server are queried over HTTP. Run the same
    command again to resume. --prompts and --from-vllm get the probabilities from vLLM without a connection.

    \b
    apr teacher big.gguf --data c.jsonl -o probs --top-k 64
    apr teacher big.gguf --data c.jsonl -o probs --student s.apr --plan
    apr distill --teacher-logprobs probs --student s.apr --config run.toml -o run
    apr teacher http://localhost:8000 --student s.apr --data c.jsonl -o probs
    apr teacher --student s.apr --data c.jsonl -o probs --prompts p.jsonl
    apr teacher --student s.apr --data c.jsonl -o probs --from-vllm r.jsonl
    """

    file: Annotated[
        str | None, typer.Argument(metavar="[TEACHER]", help="The teacher model, in any format, or a server's URL.")
    ] = None
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            "-d",
            metavar="PATH[:WEIGHT]",
            help="Text, jsonl, csv, parquet, folders or token shards; repeatable.",
        ),
    ]
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Output folder.")]
    top_k: Annotated[int, typer.Option(metavar="K", min=1, help="Tokens to save at each position.")] = 64
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            metavar="T",
            help="Softmax temperatures, besides 1, to save the residual mass at; repeatable. [default: 2, 3, 4]",
        ),
    ] = None
    student: Annotated[
        str | None, typer.Option(metavar="FILE", help="The student, whose tokenizer is used. [default: TEACHER]")
    ] = None
    seq_len: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help="Sequence length. [default: 2048, or the teacher's context if shorter]"),
    ] = None
    held_out: Annotated[float, typer.Option(metavar="X", help="Fraction of the documents held out for evaluation.")] = (
        0.01
    )
    text_field: TextFieldOption = "text"
    strict: StrictOption = False
    engine: EngineOption = None
    device: Annotated[str | None, typer.Option(metavar="NAME", help="Device for torch: cuda, cuda:N or cpu.")] = None
    from_vllm: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read log-probabilities from vLLM responses (JSON lines).")
    ] = None
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Only write the prompts to send to vLLM (JSON lines).")
    ] = None
    plan: PlanOption = False

    def __call__(self) -> None:
        """Runs the command."""
        with progress_bar("computing", tokens) as progress:
            found = aprfmt.teacher(
                self.file, self.data, self.output, top_k=self.top_k, temperature=self.temperature or (),
                student=self.student, seq_len=self.seq_len, held_out=self.held_out, text_field=self.text_field,
                strict=self.strict, engine=self.engine, device=self.device, threads=self.threads,
                gpu_layers=self.gpu_layers, from_vllm=self.from_vllm, prompts=self.prompts, plan=self.plan,
                progress=progress, log=out.progress_line,
            )  # fmt: skip
        out.result(found.to_json(), _text(found, plan=self.plan))


def _text(found: aprfmt.TeacherReport, *, plan: bool) -> Iterator[str]:
    verb = "would write" if plan else out.style("wrote", "green")
    what = f"{found.prompts:,} prompts, and tokens in " if found.prompts is not None else ""
    yield f"{verb} {what}{out.style(printable(found.output), 'bold')}"
    about = "about " if plan else ""
    windows = ", ".join(f"{about}{n:,} {part.replace('_', ' ')}" for part, n in found.windows.items())
    rows = [("sequences", f"{windows}, of {found.seq_len:,} tokens")]
    if found.prompts is None:
        temperatures = ", ".join(f"{t:g}" for t in found.temperatures)
        rows.append(("saved", f"top {found.top_k} tokens per position; residual mass at temperature {temperatures}"))
        rows.append(("size", f"{about}{format_bytes(found.bytes)}"))
    if found.resumed:
        rows.append(("resumed", f"{found.resumed:,} of {found.files:,} files already complete"))
    if found.teacher_ce is not None:
        rows.append(("teacher", f"{found.engine}, cross entropy {found.teacher_ce:.4f} nats"))
        rest = ", ".join(f"{mass:.2%} at {t}" for t, mass in found.rest.items())
        rows.append(("residual mass", rest))
    if not plan:
        rows.append(("time", format_seconds(found.seconds)))
    yield from pairs(rows)
