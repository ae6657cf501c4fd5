"""`apr distill` and `apr pretrain`: options generated from `aprtrain.config`, training or a plan, the summary."""

# No `from __future__ import annotations` here, see options.py.
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from aprfmt.cli.failures import report
from aprfmt.cli.options import Common, with_options
from aprfmt.cli.output import out, pairs, printable, table, wrapped
from aprfmt.cli.sections import SectionedCommand
from aprfmt.errors import AprError, MissingDependencyError, UsageError
from aprfmt.schema import OptionRow
from aprfmt.text import format_bytes, format_count, format_seconds, format_setting, plural

if TYPE_CHECKING:
    from aprfmt.texts.summary import DataJson
    from aprtrain.budget import Plan
    from aprtrain.config import Config
    from aprtrain.finish import Summary


_PAUSE_S = 2.0
_SECTIONS = {
    "teacher": "Models and data", "kd_weight": "Loss", "lr": "Optimizer", "steps": "Steps, batches and evaluation data",
    "vocab_policy": "Teacher, memory and devices", "save_every": "Checkpoints, evaluation and logging",
    "resume": "Resuming and safety checks",
}  # fmt: skip
"""Sections of --help by the first option of each, in the order of the schema."""


class TrainingCommand(SectionedCommand):
    """Help begins with the sections of the schema."""

    plain_first = False


@dataclass(kw_only=True)
class Training(Common):
    """Options of distill and pretrain that are not in the trainer's schema; subclasses are named like the command."""

    command_class: ClassVar[type[SectionedCommand]] = TrainingCommand
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read options from a .toml, .yaml or .json file.")
    ] = None
    plan: Annotated[
        bool, typer.Option("--plan", help="Show memory, FLOPs, vocabulary and hashes without training.")
    ] = False

    def __call__(self) -> int:
        """Runs the command; returns the exit code."""
        given = self.given()
        if (model := getattr(self, "model", None)) is not None:
            if "teacher" in given:
                raise UsageError("the teacher is given twice", hint="leave out --teacher")
            given["teacher"] = model
        return train(type(self).__name__.lower(), given, self.config, plan=self.plan)


def _options(command: str) -> dict[str, OptionRow]:
    """The options of `command`, with the sections of --help."""
    from aprtrain.config import command_fields, schema

    section, of = "", dict[str, str]()
    for name in schema():
        of[name] = section = _SECTIONS.get(name, section)
    return {row.name: replace(row, section=of[row.name]) for row in command_fields(command)}


@with_options(_options("distill"))
@dataclass(kw_only=True)
class Distill(Training):
    """Train a student on text and on the predictions of its teacher; checkpoints are complete models.

    The loss is (1 - w) CE + w T^2 KL per token, with w = --kd-weight and T = --temperature.

    \b
    apr distill big.gguf --student s.apr --data c.jsonl -o run --steps 5000
    apr distill big.apr --student-init layers:12 --data src/ -o run --epochs 1
    apr distill big.gguf --config run.toml -o run --resume
    apr distill big.gguf --config run.toml -o run --plan
    apr distill --teacher-logprobs probs --student s.apr --config run.toml -o run
    torchrun --nproc-per-node 2 -m aprfmt distill big.gguf --config run.toml
    """

    model: Annotated[str | None, typer.Argument(metavar="[TEACHER]", help="The teacher model; same as --teacher.")] = (
        None
    )


@with_options(_options("pretrain"))
@dataclass(kw_only=True)
class Pretrain(Training):
    """Train a model on text, from existing weights (--init) or from scratch (--like, --shape).

    \b
    apr pretrain --init m.apr --data c.jsonl -o run --steps 2000
    apr pretrain --like m.apr --shape config.json --data c.jsonl -o run --epochs 1
    """


def train(command: str, given: Mapping[str, object], config: Path | None, *, plan: bool) -> int:
    """Trains or plans, prints the summary, returns the exit code: 0, 1 if --qa failed, or 128 + signal."""
    if find_spec("torch") is None:
        raise MissingDependencyError("training needs torch", hint="pip install torch")
    from aprtrain import budget
    from aprtrain.config import command_fields
    from aprtrain.config_sources import build

    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    for row in command_fields(command):
        if row.optional and row.name in values:
            values[row.name] = {"true": True, "false": False}.get(str(values[row.name]), values[row.name])
    settings, lines = build(command, values, config, os.environ)
    if plan:
        body = budget.plan(command, settings)
        out.result(body, _plan_text(body))
        return 0
    return run_trainer(command, settings, lines)


def run_trainer(command: str, settings: "Config", lines: Sequence[str]) -> int:
    """Trains, prints the summary, returns the exit code."""
    from aprtrain import run as trainer
    from aprtrain.guards import abort
    from aprtrain.world import world_size

    if os.environ.get("RANK", "0") != "0":  # under torchrun only rank 0 prints the result
        out.mode = "quiet"
    try:
        summary = trainer.run(
            command,
            settings,
            stream=None if out.mode == "quiet" else out.error_stream,
            lines=lines,
            on_stall=partial(abort, tell=report),
        )
    except AprError as error:
        error.hint = _whole_line(error.hint)
        if world_size() > 1:
            _end(error)
        raise
    out.result(summary, _summary_text(summary))
    number: int = summary.get("interrupted", 0)
    is_well = summary.get("qa", {"passed": True})["passed"]
    return 128 + number if number else 0 if is_well else 1


_CONSENT = re.compile(r"(?:, or )?(?:to resume anyway, )?add ((?:--allow-[a-z-]+(?: \w+)??(?: (?=-)|(?= if )|$))+)")


def _whole_line(hint: str | None) -> str | None:
    """A hint that asks for consent, with the whole command line to give it."""
    found = _CONSENT.search(hint or "")
    if hint is None or found is None:
        return hint
    line = shlex.join(["apr", *out.arguments, *found[1].split()])
    return "\n".join(filter(None, (line, hint.replace(found[0], "").strip(" ;,"))))


def _end(error: AprError) -> None:
    """Reports the error and exits at once: a regular exit could deadlock with the other processes."""
    from aprtrain.world import ReportedByFirst

    if isinstance(error.__cause__, ReportedByFirst):
        sleep(_PAUSE_S)  # give rank 0 time to report: torchrun kills the others once one exits
    else:
        report(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code)


def _summary_text(summary: "Summary") -> Iterator[str]:
    stopped = "interrupted" in summary
    word = out.style("stopped by a signal" if stopped else "done", "yellow" if stopped else "green")
    yield f"{word} after {summary['steps']:,} steps, {format_count(summary['tokens'])} tokens"
    rate = f", {speed:,.0f} tokens/s" if (speed := _speed(summary)) is not None else ""
    part = " since resuming" if summary["config"]["resume"] is not False else ""
    rows = [("time", format_seconds(summary["seconds"]) + part + rate)]
    if stopped and (train := summary["train"]):
        found = ", ".join(f"{name} {value:.4f}" for name, value in train.items() if value is not None)
        rows.append(
            ("stopped at", f"step {summary['steps']:,} of {summary['config']['steps']:,}; training text: {found}")
        )
    first, last = summary["first"], summary["last"] if summary["last"] != summary["first"] else None
    for label, scores in (("before", first), ("last evaluation" if stopped else "after", last)):
        if scores:
            names = ("ce", "kl", "agreement", "teacher_ce")
            found = ", ".join(f"{name} {scores[name]:.4f}" for name in names if scores.get(name) is not None)
            rows.append((label, f"step {scores['step']}: {found}"))
    if "early" in summary:
        rows.append(("ended early", summary["early"]))
    if summary["failed_saves"]:
        rows.append(("failed saves", str(summary["failed_saves"])))
    for damage in summary.get("damaged", []):
        rows.append(("damaged", printable(f"checkpoint {damage['step']}: {damage['reason']}")))
    if "projected_seconds" in summary:
        time = format_seconds(summary["projected_seconds"])
        rows.append(("projection", f"{summary['projected_steps']:,} steps: {time}"))
    if summary["model"]:
        rows.append(("model", printable(summary["model"])))
        if (dtype := summary["config"]["save_dtype"]) != "f32" and summary["config"]["qat"] is None:
            rows.append(
                ("stored as", f"{str(dtype).upper()}, rounded from float32 weights; --save-dtype f32 keeps them")
            )
        rows += _exports(Path(summary["model"]))
    if (examined := summary.get("qa")) is not None:
        gates = examined["gates"]
        ids = [gate["id"] for gate in gates if gate["status"] == "fail"]
        ids = ids or [f"{gate['id']} skipped" for gate in gates if gate["required"] and gate["status"] == "skip"]
        words = "passed" if examined["passed"] else f"not passed: {examined.get('error') or ', '.join(ids)}"
        rows.append(("apr qa", printable(words)))
    elif stopped and summary["output"]:
        name = f"ckpt-step-{summary['steps']:06d}.apr"
        rows.append(("checkpoint", printable(str(Path(summary["output"]) / name))))
        rows.append(("to continue", printable(f"apr resume {summary['output']}")))
    yield from pairs(rows)


def _speed(summary: "Summary") -> float | None:
    """Tokens per second of the whole run, as `apr runs` and `apr report` show it; of this process without a folder."""
    if summary["output"] is None or not Path(summary["output"], "metrics.jsonl").is_file():
        return summary["tokens_per_s"]
    from aprfmt.inspection.run_report import summarise

    return summarise(Path(summary["output"]))["tokens_per_s"]


def _exports(model: Path) -> list[tuple[str, str]]:
    """What to type for the model of a run in other formats."""
    lines = [
        ("as HF folder", ["-o", f"{model.parent / 'hf'}", "--format", "hf"]),
        ("as GGUF", ["-o", f"{model.parent / 'model.gguf'}"]),
    ]
    return [(label, printable(shlex.join(["apr", "export", str(model), *words]))) for label, words in lines]


def data_rows(data: "DataJson") -> Iterator[tuple[str, str]]:
    """Tokens and documents of the data, one row per source, with the number of passes if known."""
    about = "about " if data["estimated"] else ""
    times = f", {passes:.2f} epochs" if (passes := data.get("passes")) is not None else ""
    learned = f", {data['learned'] / data['tokens']:.0%} trained on" if data["learned"] < data["tokens"] else ""
    n_files, n_bytes = (
        sum(source["files"] for source in data["sources"]),
        sum(source["bytes"] for source in data["sources"]),
    )
    size = f"; {plural(n_files, 'file')}, {format_bytes(n_bytes)}" if n_files else ""
    yield (
        "data",
        f"{about}{plural(data['tokens'], 'token')} in {plural(data['documents'], 'document')}{learned}{times}{size}",
    )
    if data.get("lasts") is False:
        yield "", "not enough data for this run: add data, lower --steps, or use --epochs N or --repeat"
    for source in data["sources"] if len(data["sources"]) > 1 else ():
        share = f"{source['weight']:.1%} of the training tokens: " if source["weight"] is not None else ""
        times = f", {passes:.2f} epochs" if (passes := source.get("passes")) is not None else ""
        yield "", f"{source['name']}: {share}{about}{source['tokens']:,} tokens{times}"
    for what, n in data["left_out"].items():
        yield "skipped", f"{n:,} {what}"


def _plan_text(body: "Plan") -> Iterator[str]:
    yield f"{out.style('plan', 'cyan')} of {body['command']} (dry run, nothing is written)"
    parts = [(part["name"], format_bytes(part["bytes"])) for part in body["memory"] if part["bytes"]]
    yield from table(["memory", "size"], [*parts, ("total", format_bytes(body["memory_bytes"]))], right="size")
    work = body["flops_per_token"]
    rows = [("FLOPs per token", f"teacher {work['teacher']:.3g}, student {work['student']:.3g}")]
    if body["tokens"] is not None and body["seconds"] is not None:
        rate, is_cpu = body["flops_per_s"], body["config"]["device"] == "cpu"
        speed = f"{rate / 1e9:,.0f} GFLOP/s, measured on this CPU" if is_cpu else f"{rate / 1e12:,.0f} TFLOP/s"
        rows.append(("tokens", f"{format_count(body['tokens'])}, about {format_seconds(body['seconds'])} at {speed}"))
    if (qat := body["qat"]) is not None:
        types = (f"{plural(n['tensors'], 'tensor')} as {dtype}" for dtype, n in qat["types"].items())
        rows.append((f"--qat {qat['preset']}", ", ".join(types)))
    rows.append(("kernels", ", ".join(f"{part} {what}" for part, what in body["kernels"]["used"].items())))
    rows += [
        ("not used", printable(f"{m['feature']}: {m['reason']}; {m['mend']}")) for m in body["kernels"]["not_used"]
    ]
    rows += data_rows(body["data"])
    if (nodes := body["nodes"]) is not None:
        device, between, memory, disk = (
            format_bytes(nodes[name])
            for name in ("device_bytes_each", "bytes_between_per_step", "first_memory_bytes", "first_disk_bytes")
        )
        rows.append(
            ("nodes", f"{nodes['nodes']} of {nodes['processes_each']} processes, {device} of device memory each")
        )
        rows.append(("traffic", f"{between} per step to and from each process"))
        rows.append(("first node", f"{memory} of memory, {disk} of disk for checkpoints; other nodes: token shards"))
    for who, model in (("teacher", body["teacher"]), ("student", body["student"])):
        if model is not None:
            rows.append((who, f"{model['architecture']}, {format_count(model['parameters'])} parameters"))
    if (f := body["teacher_files"]) is not None:
        rows.append(
            ("teacher's files", printable(f"{f['teacher']}, top {f['k']} tokens per position, from {f['engine']}"))
        )
    if (v := body["vocabulary"]) is not None:
        n_shared = v["n_real"] if body["outcomes"] is None else body["outcomes"]
        words = f"{n_shared:,} shared ids; rows {v['teacher_rows']:,} and {v['student_rows']:,}"
        rows.append(("vocabulary", words))
    yield from pairs(rows)
    yield from wrapped(f"training options {body['digest']} (a resumed run must match these, the models and the data)")
    usual, config = body["defaults"], body["config"]
    changed = [name for name, value in config.items() if value != usual[name]]
    cells = [
        (name, printable(format_setting(config[name])), printable(format_setting(usual[name]))) for name in changed
    ]
    yield from table(["option", "value", "default"], cells, spare="default") if cells else ()
    yield f"{plural(len(config) - len(changed), 'other option')} at the default: see --json"
