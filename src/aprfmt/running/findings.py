"""What a gate of `apr qa` finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GateFinding:
    """The outcome of one gate.

    Attributes:
        passed: whether the model passes.
        message: a sentence with the evidence.
        value, threshold: the figure that decided, and its limit.
        disease: id in diseases.DISEASES of a known fault.
        words: what the command that mends it names: `key`, `value`.
    """

    passed: bool
    message: str
    value: float | None = None
    threshold: float | None = None
    disease: str | None = None
    words: Mapping[str, object] = field(default_factory=dict)


class SkippedError(Exception):
    """A gate has nothing to look at; the message says why.

    Attributes:
        required: whether it should have: False where the model has no such thing.
    """

    def __init__(self, reason: str, *, required: bool = True) -> None:
        super().__init__(reason)
        self.required = required
