"""AdamW over all parameters laid end to end, so that every pass over them is one kernel.

Flat float32 buffers of P elements each: master weights, mean, square, gradient; and, where the network computes in
another dtype, a compute copy, whose slices are the parameters themselves. Matrices stand first, since only they
decay. Each slice begins at a multiple of 64 elements.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    w = w - lr (decay w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))      (Loshchilov and Hutter, 2019)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aprfmt.errors import RefusedError

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Slice:
    """Where a parameter lies in the flat buffers."""

    name: str
    start: int
    shape: tuple[int, ...]

    def of(self, flat_P: Tensor) -> Tensor:
        """Its view of a buffer."""
        n = 1
        for dim in self.shape:
            n *= dim
        return flat_P[self.start : self.start + n].view(self.shape)


class Optimizer:
    """Owns master weights, moments and gradients of a network's parameters; the parameters become views of it.

    Gradients that autograd forms are added to the float32 buffer as soon as each is complete and are not kept
    beside it. What forms its gradient itself adds to `grad_of(name)`.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        clip: float = 1.0,
    ) -> None:
        """The network computes in the dtype of its parameters from now on.

        `parameters` are those of named_parameters(); `clip` is the largest norm of the gradient, 0 for none.
        """
        self._parameters = dict(parameters)
        matrices = {name: p for name, p in self._parameters.items() if p.dim() > 1}
        vectors = {name: p for name, p in self._parameters.items() if p.dim() <= 1}
        first = next(iter(self._parameters.values()))
        self.slices, end = _laid_out({**matrices, **vectors})
        n_matrices = next((s.start for s in self.slices.values() if s.name in vectors), end)
        self.master = torch.zeros(end, dtype=torch.float32, device=first.device)
        self.grad = torch.zeros_like(self.master)
        self._compute = (
            self.master if first.dtype == torch.float32 else torch.zeros_like(self.master, dtype=first.dtype)
        )
        self._clip = clip
        for name, slice in self.slices.items():
            slice.of(self.master).copy_(self._parameters[name].detach())
        self._compute.copy_(self.master)
        self._point_at(self._compute)
        own: dict[str, Any] = self._parameters
        self._hooks = [p.register_post_accumulate_grad_hook(self._adder(name)) for name, p in own.items()]
        self._groups = [(0, n_matrices, weight_decay), (n_matrices, end, 0.0)]
        flats = [
            {"params": [self._flat(start, stop)], "weight_decay": decay}
            for start, stop, decay in self._groups
            if stop > start
        ]
        self._adamw = torch.optim.AdamW(flats, lr=0.0, betas=betas, eps=eps, fused=True)
        for group in self._adamw.param_groups:
            for p in group["params"]:
                self._adamw.state[p] = {
                    "step": torch.zeros((), device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }

    def _flat(self, start: int, stop: int) -> Tensor:
        flat = self.master[start:stop].detach().requires_grad_()
        flat.grad = self.grad[start:stop]
        return flat

    def _adder(self, name: str) -> Any:
        total = self.grad_of(name)

        def add(parameter: Tensor) -> None:
            if parameter.grad is not None:
                total.add_(parameter.grad)
                parameter.grad = None

        return add

    def _point_at(self, flat_P: Tensor) -> None:
        for name, slice in self.slices.items():
            self._parameters[name].data = slice.of(flat_P)

    def grad_of(self, name: str) -> Tensor:
        """The float32 gradient of a parameter, in its shape."""
        return self.slices[name].of(self.grad)

    def step(self, lr: float, loss: Tensor | None = None) -> Tensor:
        """One update; gives the norm of the gradient before clipping, on the device.

        Where that norm or the loss is not finite, nothing changes. The gradient is not cleared.
        """
        norm: Tensor = torch.linalg.vector_norm(self.grad)
        finite = torch.isfinite(norm) if loss is None else torch.isfinite(norm) & torch.isfinite(loss)
        found: Any = self._adamw  # the fused kernel skips the update by the one and divides by the other
        found.found_inf = (~finite).to(torch.float32)
        found.grad_scale = (norm / self._clip).clamp(min=1.0) if self._clip else None
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        if self._compute is not self.master:
            self._compute.copy_(self.master)
        return norm

    @contextmanager
    def masters(self) -> Iterator[None]:
        """While the block runs the network's parameters are the float32 weights."""
        self._point_at(self.master)
        try:
            yield
        finally:
            self._point_at(self._compute)

    def publish(self) -> None:
        """Gives the network the float32 weights as they are now, after they were written in `masters`."""
        self._compute.copy_(self.master)

    # --- state ---

    def state(self) -> dict[str, Tensor]:
        """What an exact continuation needs, as views: master, mean and square of P elements, the step counts."""
        states = [self._adamw.state[p] for group in self._adamw.param_groups for p in group["params"]]
        return {
            "master": self.master,
            "step": torch.stack([s["step"] for s in states]),
            **{f"mean.{i}": s["exp_avg"] for i, s in enumerate(states)},
            **{f"square.{i}": s["exp_avg_sq"] for i, s in enumerate(states)},
        }

    def layout(self) -> list[list[Any]]:
        """Names, starts and shapes of the slices, as JSON data."""
        return [[s.name, s.start, list(s.shape)] for s in self.slices.values()]

    def load(self, state: Mapping[str, Tensor], layout: list[list[Any]]) -> None:
        """Takes over what `state` and `layout` gave. Raises RefusedError where they are of another network."""
        if layout != self.layout():
            raise RefusedError("the saved optimizer state is of another network")
        with torch.no_grad():
            for name, tensor in self.state().items():
                if name != "step":
                    tensor.copy_(state[name])
            states = [self._adamw.state[p] for group in self._adamw.param_groups for p in group["params"]]
            for own, saved in zip(states, state["step"], strict=True):
                own["step"].copy_(saved)
            self._compute.copy_(self.master)


def _laid_out(parameters: Mapping[str, torch.nn.Parameter]) -> tuple[dict[str, Slice], int]:
    slices, position = {}, 0
    for name, p in parameters.items():
        slices[name] = Slice(name, position, tuple(p.shape))
        position += p.numel() + -p.numel() % _ALIGNMENT
    return slices, position
