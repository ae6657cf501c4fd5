"""`apr distill`: a small model learns what a large one answers."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Annotated

import typer

from aprfmt.cli.training import Training, options, train
from aprfmt.errors import UsageError

_HELP = """Train a student on text and on its teacher's answers; checkpoints are complete models.

The loss is (1 - w) CE + w T^2 KL at every position, with w = --kd-weight and T = --temperature.

\b
apr distill big.gguf --student s.apr --data c.jsonl -o run --steps 5000
apr distill big.apr --student-init layers:12 --data src/ -o run --epochs 1
apr distill big.gguf --config run.toml -o run --resume
apr distill big.gguf --config run.toml -o run --plan
torchrun --nproc-per-node 2 -m aprfmt distill big.gguf --config run.toml
"""

Teacher = Annotated[
    str | None, typer.Argument(metavar="[TEACHER]", help="The model to learn from, instead of --teacher.")
]


def _run(self: Training) -> int:
    given = vars(self)
    if given["model"] is not None:
        if given["teacher"] is not None:
            raise UsageError("the teacher is named twice", hint="leave --teacher out")
        given["teacher"] = given["model"]
    return train("distill", given, self.config, plan=self.plan)


command = make_dataclass(
    "Distill",
    [("model", Teacher, None), *options("distill")],
    bases=(Training,),
    namespace={"__doc__": _HELP, "__call__": _run},
    kw_only=True,
)
