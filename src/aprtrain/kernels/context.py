"""The context of a torch.autograd.Function, for type checkers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class GradientContext(Protocol):
    """What the forward pass keeps for the backward one. Functions that keep more than tensors extend it."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keeps tensors: `saved_tensors`."""

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """Marks outputs that have no gradient."""
