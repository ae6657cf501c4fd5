"""`apr pretrain`: a model learns from text alone."""

from __future__ import annotations

from typing import Any

from aprfmt.cli.options import JsonOption, QuietOption, takes
from aprfmt.cli.training import ConfigOption, TrainPlanOption, options, train


@takes(options("pretrain"))
def command(
    *,
    config: ConfigOption = None,
    plan: TrainPlanOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    more: dict[str, Any],
) -> int:
    """Train a model on text: from its weights (--init), or from scratch (--like, --shape).

    \b
    apr pretrain --init m.apr --data c.jsonl -o run --steps 2000
    apr pretrain --like m.apr --shape config.json --data c.jsonl -o run --epochs 1
    """
    return train("pretrain", more, config, plan=plan)
