"""`apr resume` and `apr runs`: continue a training run from its folder; list the runs of a folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import aprfmt
from aprfmt.cli.output import out, printable, table
from aprfmt.errors import MissingDependencyError
from aprfmt.text import format_age, format_count, format_number

if TYPE_CHECKING:
    from aprfmt.inspection.runs import Runs


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Output folder of apr distill or apr pretrain.")],
    *,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Train up to this step instead of the recorded one; may lie beyond it."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Where the data is now. [default: its recorded path, or RUN/tokens if it moved or changed]",
        ),
    ] = None,
) -> int:
    """Continue a training run from its latest checkpoint with the options that its folder records.

    Relative paths refer to the folder in which the run was started. --steps beyond the end of the learning rate
    schedule extends the schedule.

    \b
    apr resume run
    apr resume run --steps 40000
    torchrun --nproc-per-node 2 -m aprfmt resume run
    """
    if find_spec("torch") is None:
        raise MissingDependencyError("training needs torch", hint="pip install torch")
    from aprfmt.cli.training import run_trainer
    from aprtrain.recorded import resume as resume_recorded

    return resume_recorded(run, steps, data, run_trainer)


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Folder to search for runs.")] = Path(),
) -> None:
    """List the training runs in a folder and its subfolders: steps, loss, KL, speed, time since the last update.

    \b
    apr runs experiments
    apr runs --json
    """
    found = aprfmt.runs(folder)
    out.result(found.to_json(), _text(found))


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _text(found: Runs) -> Iterator[str]:
    if not found.runs:
        yield f"no training run in {printable(found.folder)}"
    now = time.time()
    rows = [
        [
            printable(run.name),
            run.state,
            f"{run.steps:,}" + (f"/{run.total_steps:,}" if run.total_steps else ""),
            format_count(run.tokens),
            _nats(run.loss),
            run.objective,
            *map(_nats, (run.held_out_ce, run.kl)),
            "-" if run.tokens_per_s is None else format_number(run.tokens_per_s),
            "-" if run.heard_at is None else format_age(now - run.heard_at),
        ]
        for run in found.runs
    ]
    header = ["run", "state", "steps", "tokens", "loss", "loss of", "CE", "KL", "tok/s", "age"]
    yield from (
        table(header, rows, right="steps tokens loss CE KL tok/s age", spare="tokens CE", indent=0) if rows else ()
    )
    for path, reason in found.skipped.items():
        yield f"skipped {printable(path)}: {printable(reason)}"
