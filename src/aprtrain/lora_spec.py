"""The value of --lora."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aprfmt.errors import UsageError

TARGETS: dict[str, tuple[str, ...]] = {
    "attention": ("qkv", "conv_in", "out"),
    "mlp": ("gate_up", "down"),
    "all": ("qkv", "conv_in", "out", "gate_up", "down"),
}
"""Value of `targets` -> parameters of a layer."""

HINT = "write --lora r=16, or --lora r=16,alpha=32,targets=all; targets are attention, mlp or all"


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The value of --lora.

    Attributes:
        rank: r.
        alpha: numerator of the scale, alpha / rank.
        targets: a key of TARGETS.
    """

    rank: int
    alpha: float
    targets: str = "all"

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return self.alpha / self.rank


def parse_lora(text: str) -> LoraSpec:
    """Parses `r=16,alpha=32,targets=all`; alpha is 2 r by default. Raises UsageError."""
    given = dict(word.partition("=")[::2] for word in text.split(","))
    try:
        rank = int(given.pop("r"))
        alpha, targets = float(given.pop("alpha", 2 * rank)), given.pop("targets", "all")
        if given or rank < 1 or not (0 < alpha < math.inf) or targets not in TARGETS:
            raise ValueError
    except (KeyError, ValueError):
        raise UsageError(f"--lora {text!r:.60} is not valid", hint=HINT) from None
    return LoraSpec(rank, alpha, targets)
