"""The result of a gate of `apr qa`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GateFinding:
    """The outcome of one gate.

    Attributes:
        passed: whether the model passes.
        message: a sentence with the evidence.
        value, threshold: the deciding figure, and its limit.
        disease: id in diseases.DISEASES of a known fault.
        words: values for its command: `key`, `value`.
    """

    passed: bool
    message: str
    value: float | None = None
    threshold: float | None = None
    disease: str | None = None
    words: Mapping[str, object] = field(default_factory=dict)


class SkippedError(Exception):
    """A gate does not apply; the message says why.

    Attributes:
        required: whether it should apply: False if the model lacks the feature.
    """

    def __init__(self, reason: str, *, required: bool = True) -> None:
        super().__init__(reason)
        self.required = required
