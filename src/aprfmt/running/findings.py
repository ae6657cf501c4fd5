"""What a gate of `apr qa` finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GateFinding:
    """The outcome of one gate: a sentence with the evidence, the figure that decided, and its limit."""

    passed: bool
    message: str
    value: float | None = None
    threshold: float | None = None


class SkippedError(Exception):
    """A gate has nothing to look at; the message says why.

    Attributes:
        required: whether it should have: False where the model has no such thing.
    """

    def __init__(self, reason: str, *, required: bool = True) -> None:
        super().__init__(reason)
        self.required = required
