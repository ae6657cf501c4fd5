"""`apr pretrain`: a model learns from text alone."""

from __future__ import annotations

from dataclasses import make_dataclass

from aprfmt.cli.training import Training, options, train

_HELP = """Train a model on text: from its weights (--init), or from scratch (--like, --shape).

\b
apr pretrain --init m.apr --data c.jsonl -o run --steps 2000
apr pretrain --like m.apr --shape config.json --data c.jsonl -o run --epochs 1
"""


def _run(self: Training) -> int:
    return train("pretrain", vars(self), self.config, plan=self.plan)


command = make_dataclass(
    "Pretrain",
    options("pretrain"),
    bases=(Training,),
    namespace={"__doc__": _HELP, "__call__": _run},
    kw_only=True,
)
