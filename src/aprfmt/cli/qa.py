"""`apr qa`: sanity-check a model in llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

import aprfmt
from aprfmt.cli.ci import JunitOption, SarifOption, ci_reports
from aprfmt.cli.options import ForceOption, ModelArgument, PageOption, ThreadsOption
from aprfmt.cli.output import out, printable, progress_bar, with_page, wrapped
from aprfmt.errors import COMMAND
from aprfmt.text import format_count, format_figure, format_seconds, plural

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
    threads: ThreadsOption = 0,
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
            file, against=against, allow_skip=allow_skip or (), threads=threads, output=output, force=force,
            log=out.progress_line, on_gate=_tell,
        )  # fmt: skip
        if junit or sarif:
            write(report.cases())
    out.result(*with_page(report.to_json(), _verdict(report), output))
    return 0 if report.passed else 1


_LABEL = 22
"""Columns of a gate's status and name."""


def _tell(gate: GateResult) -> None:
    """Prints a gate's result as soon as it is known: some gates take seconds. Skipped ones come last, by reason."""
    if gate.status == "skip":
        return
    value = "" if gate.value is None else format_figure(gate.value)
    limit = "" if gate.threshold is None else format_figure(gate.threshold)
    # No-break spaces, which lines are not wrapped at.
    is_new = value and limit and (gate.status != "pass" or value != limit)
    figures = f"[{value}, limit {limit}]".replace(" ", "\xa0") if is_new else ""
    *lines, last = wrapped(f"{printable(gate.message)}  {figures}".rstrip(), indent=_LABEL)
    if figures:
        last = last.removesuffix(figures) + out.style(figures.replace("\xa0", " "), "dim")
    _put(gate.status, gate.id, [*lines, last])


def _put(status: str, name: str, lines: list[str]) -> None:
    first, *more = lines
    out.line(f"{out.style(status, _STYLES[status])}  {name:<{_LABEL - 8}}  {first[_LABEL:]}")
    for line in more:
        out.line(line)


def _skips(report: QaReport) -> Iterator[str]:
    """The skipped gates, one entry for each reason."""
    reasons: dict[str, list[str]] = {}
    for gate in report.gates:
        if gate.status == "skip":
            reasons.setdefault(gate.message, []).append(gate.id)
    for reason, names in reasons.items():
        first, *more = wrapped(f"{', '.join(names)}: {printable(reason)}", indent=6)
        yield out.style("skip", _STYLES["skip"]) + f"  {first[6:]}"
        yield from more


def _fixes(report: QaReport) -> Iterator[str]:
    """What to type against the failures, once for all that it fixes; a command stays whole, to be copied."""
    fixes: dict[str, list[str]] = {}
    for gate in report.gates:
        if gate.hint is not None:
            fixes.setdefault(gate.hint, []).append(gate.id)
    for fix, names in fixes.items():
        lines = [fix] if COMMAND.match(fix) else [line.strip() for line in wrapped(fix, indent=5)]
        lines += [f"for {', '.join(names)}"] if len(fixes) > 1 else []
        first, *more = map(printable, lines)
        yield f"{out.style('fix:', 'bold')} {first}"
        yield from (f"     {line}" for line in more)


def _verdict(report: QaReport) -> Iterator[str]:
    yield from _skips(report)
    failed = [gate.id for gate in report.gates if gate.status == "fail"]
    n_skipped = sum(gate.status == "skip" and gate.required for gate in report.gates)
    model = f"{format_count(report.parameters)} parameters, {report.bits_per_weight:.2f} bits per weight"
    time = f"{format_seconds(report.seconds)}"
    if report.passed:
        n = sum(gate.status == "pass" for gate in report.gates)
        word, text = "passed", f"{plural(n, 'gate')}; {model}; {time}"
    else:
        parts = [f"failed {', '.join(failed)}"] if failed else []
        parts += [f"{plural(n_skipped, 'gate')} skipped"] if n_skipped else []
        word, text = "not passed", f"{'; '.join(parts)}; {model}; {time}"
    first, *more = wrapped(f"{word}: {text}")
    yield out.style(word, "green" if report.passed else "red") + first.removeprefix(word)
    yield from more
    yield from _fixes(report)
