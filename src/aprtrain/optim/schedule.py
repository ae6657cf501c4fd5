"""The learning rate of each step: linear warm-up, then half a cosine down to a share of the peak."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, total: int, warmup: int, final: float) -> float:
    """The rate of update `step` (0 is the first).

    peak * (step + 1) / warmup for step < warmup, then peak * (final + (1 - final) * (1 + cos(pi * t)) / 2) with t
    running from 0 to 1 at the last update; `final` is a share of the peak, which also holds beyond `total`.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total - 1 - warmup)
    return peak * (final + (1 - final) * (1 + math.cos(math.pi * min(1.0, done))) / 2)
