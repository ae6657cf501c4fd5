"""`apr qa`: sanity-check a model in llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

import aprfmt
from aprfmt.cli.ci import JunitOption, SarifOption, ci_reports
from aprfmt.cli.options import ForceOption, ModelArgument, PageOption
from aprfmt.cli.output import out, printable, progress_bar, with_page, wrapped
from aprfmt.text import format_count, format_figure, format_seconds

if TYPE_CHECKING:
    from aprfmt.running.qa import GateResult, QaReport

_STYLES = {"pass": "green", "fail": "red", "skip": "yellow"}


def qa(
    file: ModelArgument,
    *,
    against: Annotated[
        str | None, typer.Option(metavar="FILE", help="The original model: compare keys, tensors and outputs with it.")
    ] = None,
    allow_skip: Annotated[
        list[str] | None,
        typer.Option("--allow-skip", metavar="GATE", help="Allow this gate to be skipped; repeatable."),
    ] = None,
    threads: Annotated[int, typer.Option(metavar="N", min=0, help="Threads for llama.cpp; 0: half the CPUs.")] = 0,
    output: PageOption = None,
    force: ForceOption = False,
    junit: JunitOption = None,
    sarif: SarifOption = None,
) -> int:
    """Sanity-check a model in llama.cpp: loading, finite outputs, generated text, tokenizer, chat template.

    Encoders and rerankers are checked by their embeddings and scores. A failed gate prints the command that fixes the
    model. A skipped gate does not count as passed, unless it does not apply to the model. Exit status 1: a gate failed
    or was skipped. docs/qa.md describes what each gate detects and what it cannot.

    \b
    apr qa model.gguf
    apr qa model-q4_k_m.gguf --against model.gguf
    apr qa model.gguf -o page.html
    apr qa model.apr --json
    apr qa model.gguf --junit qa.xml --sarif qa.sarif
    """
    with progress_bar("checking"), ci_reports("qa", file, junit, sarif) as write:
        report = aprfmt.qa(
            file,
            against=against,
            allow_skip=allow_skip or (),
            threads=threads,
            output=output,
            force=force,
            log=out.progress_line,
            on_gate=_tell,
        )
        if junit or sarif:
            write(report.cases())
    out.result(*with_page(report.to_json(), _verdict(report), output))
    return 0 if report.passed else 1


def _tell(gate: GateResult) -> None:
    """Prints a gate's result as soon as it is known: some gates take seconds."""
    value = "" if gate.value is None else format_figure(gate.value)
    limit = "" if gate.threshold is None else format_figure(gate.threshold)
    # No-break spaces, which lines are not wrapped at.
    figures = f"[{value}, limit {limit}]".replace(" ", "\xa0") if value and limit else ""
    rest = f"  {gate.id:<14}  "
    indent = len(gate.status) + len(rest)
    *lines, last = wrapped(f"{printable(gate.message)}  {figures}".rstrip(), indent=indent)
    if figures:
        last = last.removesuffix(figures) + out.style(figures.replace("\xa0", " "), "dim")
    first, *more = (*lines, last)
    for line in (out.style(gate.status, _STYLES[gate.status]) + rest + first[indent:], *more):
        out.line(line)
    if gate.hint is not None:
        out.line(f"{' ' * indent}{out.style('fix:', 'bold')} {printable(gate.hint)}")


def _verdict(report: QaReport) -> Iterator[str]:
    failed = [gate.id for gate in report.gates if gate.status == "fail"]
    skipped = [gate.id for gate in report.gates if gate.status == "skip" and gate.required]
    model = f"{format_count(report.parameters)} parameters, {report.bits_per_weight:.2f} bits per weight"
    time = f"{format_seconds(report.seconds)}"
    if report.passed:
        n = sum(gate.status == "pass" for gate in report.gates)
        yield f"{out.style('passed', 'green')}: {n} gates; {model}; {time}"
        return
    parts = [f"failed {', '.join(failed)}"] if failed else []
    parts += [f"skipped {', '.join(skipped)}"] if skipped else []
    yield f"{out.style('not passed', 'red')}: {'; '.join(parts)}; {model}; {time}"
