"""`apr distill`: a small model learns what a large one answers."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from aprfmt.cli.options import JsonOption, QuietOption, takes
from aprfmt.cli.training import ConfigOption, TrainPlanOption, options, train
from aprfmt.errors import UsageError


@takes(options("distill"))
def command(
    model: Annotated[
        str | None, typer.Argument(metavar="[TEACHER]", help="The model to learn from, instead of --teacher.")
    ] = None,
    *,
    config: ConfigOption = None,
    plan: TrainPlanOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    more: dict[str, Any],
) -> int:
    """Train a student on text and on its teacher's answers; checkpoints are models that ship.

    The loss is (1 - w) CE + w T^2 KL at every position, with w = --kd-weight and T = --temperature.

    \b
    apr distill big.gguf --student s.apr --data c.jsonl -o run --steps 5000
    apr distill big.apr --student-init layers:12 --data src/ -o run --epochs 1
    apr distill big.gguf --config run.toml -o run --resume
    apr distill big.gguf --config run.toml -o run --plan
    torchrun --nproc-per-node 2 -m aprfmt distill big.gguf --config run.toml
    """
    if model is not None:
        if more["teacher"] is not None:
            raise UsageError("the teacher is named twice", hint="leave --teacher out")
        more["teacher"] = model
    return train("distill", more, config, plan=plan)
