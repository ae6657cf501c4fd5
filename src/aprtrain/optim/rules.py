"""Update rules: AdamW, Muon, and those of installed packages.

A rule turns a clipped gradient g into a direction u. Every weight then moves by

    w = w - lr (decay w + u)

where only matrices decay (Loshchilov and Hutter, 2019). An update does nothing if its gradient or loss is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from aprfmt.errors import UsageError
from aprtrain.features import current, importable
from aprtrain.plugins import OPTIMIZERS

_CHUNK = 1 << 24
"""Elements of an update at a time, for rules that need temporary tensors."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What update rules are given; `clip` is the gradient clipping norm, 0: off."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0


@dataclass(frozen=True)
class UpdateRule:
    """How a weight moves.

    Attributes:
        states: names of the float32 tensors that the rule keeps for each weight, in its shape, from zeros on.
        accumulate: (gradient, states, number of the update from 1, settings) -> (direction, new states). Tensors are
            float32, elementwise, and of any shape: parts of a weight or of several.
        orient: (direction of a matrix [rows, columns], or of matrices [..., rows, columns]) -> final direction. Such a
            rule updates the matrices of layers; embeddings, the output head, convolutions and vectors get AdamW.
    """

    states: tuple[str, ...]
    accumulate: Callable[[Tensor, Mapping[str, Tensor], Tensor, Settings], tuple[Tensor, Mapping[str, Tensor]]]
    orient: Callable[[Tensor], Tensor] | None = None

    def of(self, name: str, shape: Sequence[int]) -> UpdateRule:
        """The rule of a parameter: if this one needs matrices, AdamW for all others."""
        is_matrix = len(shape) > 1 and name.rpartition(".")[2] not in _NO_MATRICES
        return self if self.orient is None or is_matrix else ADAMW

    def kinds(self, name: str, shape: Sequence[int]) -> tuple[str, ...]:
        """Names of the tensors that an optimizer holds for a parameter, in float32."""
        return ("master", *self.of(name, shape).states)


_NO_MATRICES = ("embed", "ple_embed", "head", "conv")


def _adamw(
    grad: Tensor, states: Mapping[str, Tensor], count: Tensor, settings: Settings
) -> tuple[Tensor, Mapping[str, Tensor]]:
    b1, b2 = settings.betas
    mean, square = states["mean"].lerp(grad, 1 - b1), states["square"].lerp(grad.square(), 1 - b2)
    size = (square / (1 - b2**count)).sqrt() + settings.eps
    return mean / (1 - b1**count) / size, {"mean": mean, "square": square}


ADAMW = UpdateRule(("mean", "square"), _adamw)
"""m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)."""

_MOMENTUM = 0.95


def _nesterov(
    grad: Tensor, states: Mapping[str, Tensor], count: Tensor, settings: Settings
) -> tuple[Tensor, Mapping[str, Tensor]]:
    mean = states["mean"].lerp(grad, 1 - _MOMENTUM)
    return grad.lerp(mean, _MOMENTUM), {"mean": mean}


def orthogonalize(update: Tensor) -> Tensor:
    """Of each matrix, with singular value decomposition U S V^T, approximately U V^T times 0.2 sqrt(longer side).

    Five Newton-Schulz steps of a quintic that takes singular values to between 0.7 and 1.2 (Jordan et al. 2024, Muon),
    in bfloat16 on a GPU. The factor gives the elements the root mean square of AdamW's updates, so that learning rate
    and decay keep their meaning (Liu et al. 2025, arXiv:2502.16982).
    """
    rows, columns = update.shape[-2:]
    x = update.mT if rows > columns else update
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    x = x.mT if rows > columns else x
    oriented: Tensor = x.to(update.dtype) * (0.2 * math.sqrt(max(rows, columns)))
    return oriented


MUON = UpdateRule(("mean",), _nesterov, orthogonalize)

RULES = {"adamw": ADAMW, "muon": MUON}


def rule_of(name: str) -> UpdateRule:
    """A rule by its name, see `plugins.OPTIMIZERS`. Raises UsageError."""
    if (fault := OPTIMIZERS.unknown(name)) is not None:
        raise UsageError(fault)
    added: UpdateRule | None = None if name in RULES else OPTIMIZERS.installed()[name].load()
    return added or RULES[name]


def note_adamw(device: torch.device) -> bool:
    """Whether the fused kernel of AdamW updates weights on `device`; records the choice."""
    fused = device.type == "cuda" and current().check("triton", importable("triton"))
    current().use("AdamW", "Triton" if fused else "torch")
    return fused


Orient = Callable[[int, Callable[[Tensor], Tensor]], None]
"""See `Updates.update`."""


class Updates:
    """The states of float32 tensors, and the updates of their rules; `count`, a float32 scalar, is their number."""

    def __init__(
        self, weights: Sequence[Tensor], decays: Sequence[bool], settings: Settings, rules: Sequence[UpdateRule]
    ) -> None:
        """`decays`: whether each tensor has weight decay. `rules`: of each tensor."""
        self._settings = settings
        self._decays = decays
        self._rules = rules
        self.states = [
            {kind: torch.zeros_like(w) for kind in rule.states} for w, rule in zip(weights, self._rules, strict=True)
        ]
        self.count = torch.zeros((), device=weights[0].device if weights else None)

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds of tensors that the rules hold for parameters, "master" first."""
        return tuple(dict.fromkeys(("master", *(kind for states in self.states for kind in states))))

    def of(self, kind: str, weights: Sequence[Tensor]) -> list[Tensor | None]:
        """The tensors of one of `kinds`, given the master `weights`; None for one whose rule has no such state."""
        return list(weights) if kind == "master" else [states.get(kind) for states in self.states]

    def update(
        self,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        lr: float,
        norm: Tensor,
        loss: Tensor | None,
        copies: Sequence[Tensor] = (),
        orient: Orient | None = None,
    ) -> None:
        """Updates the weights unless the norm or the loss is not finite; the host does not wait.

        `norm` is that of the whole gradient. The weights are also written to `copies`, in their dtype. Overwrites
        `grads`. `orient`, which rules that need matrices call, is given the number n of a tensor and the rule's
        function, and applies it to the matrices whose directions are in `grads[n]`, which may hold a part of them.
        """
        s = self._settings
        finite = torch.isfinite(norm) if loss is None else torch.isfinite(norm) & torch.isfinite(loss)
        # The fused kernel skips the update if `skip` is 1 and divides the gradient by `scale`.
        skip = (~finite).to(torch.float32)
        scale = (norm / s.clip).clamp(min=1.0) if s.clip else torch.ones_like(norm)
        self.count.add_(1 - skip)
        adam = [n for n, rule in enumerate(self._rules) if rule is ADAMW]
        in_triton = note_adamw(norm.device)
        (self._triton if in_triton else self._torch)(adam, weights, grads, lr, skip, scale, copies)
        for n, rule in enumerate(self._rules):
            if rule is not ADAMW:
                self._generic(n, rule, weights[n], grads[n], lr, skip, scale, orient)
        for n, copy in enumerate(copies):
            if not (in_triton and n in adam):
                copy.copy_(weights[n])

    def _triton(
        self, adam: Sequence[int], weights: Sequence[Tensor], grads: Sequence[Tensor], lr: float, skip: Tensor,
        scale: Tensor, copies: Sequence[Tensor],
    ) -> None:  # fmt: skip
        from aprtrain.kernels.adam_triton import update

        s = self._settings
        for n in adam:
            update(
                weights[n], grads[n], self.states[n]["mean"], self.states[n]["square"], copies[n] if copies else None,
                skip, scale, self.count, lr=lr, eps=s.eps, decay=s.weight_decay if self._decays[n] else 0.0,
                beta1=s.betas[0], beta2=s.betas[1],
            )  # fmt: skip

    def _torch(
        self, adam: Sequence[int], weights: Sequence[Tensor], grads: Sequence[Tensor], lr: float, skip: Tensor,
        scale: Tensor, copies: Sequence[Tensor],
    ) -> None:  # fmt: skip
        s = self._settings
        for decays in (True, False):
            some = [n for n in adam if self._decays[n] is decays and weights[n].numel()]
            if some:
                adamw(
                    [weights[n] for n in some], [grads[n] for n in some], [self.states[n]["mean"] for n in some],
                    [self.states[n]["square"] for n in some], [], [self.count - 1 for _ in some], fused=True,
                    grad_scale=scale, found_inf=skip, amsgrad=False, maximize=False, lr=lr, eps=s.eps,
                    beta1=s.betas[0], beta2=s.betas[1], weight_decay=s.weight_decay if decays else 0.0,
                )  # fmt: skip

    def _generic(
        self, n: int, rule: UpdateRule, weight: Tensor, grad: Tensor, lr: float, skip: Tensor, scale: Tensor,
        orient: Orient | None,
    ) -> None:  # fmt: skip
        """Any rule, from torch's operations."""
        finite, decay = skip == 0, self._settings.weight_decay if self._decays[n] else 0.0
        count, states = self.count.clamp(min=1), self.states[n]
        for start in range(0, len(grad), _rows(grad)):
            part = slice(start, start + _rows(grad))
            before = {kind: state[part] for kind, state in states.items()}
            direction, after = rule.accumulate(grad[part] / scale, before, count, self._settings)
            grad[part] = direction
            for kind, state in before.items():
                state.copy_(torch.where(finite, after[kind], state))
        if rule.orient is not None:
            assert orient is not None
            orient(n, rule.orient)
        for start in range(0, len(grad), _rows(grad)):
            part = slice(start, start + _rows(grad))
            weight[part] = torch.where(finite, weight[part] * (1 - lr * decay) - lr * grad[part], weight[part])


def _rows(tensor: Tensor) -> int:
    """Rows of a chunk."""
    return max(1, _CHUNK // max(1, tensor.numel() // max(1, len(tensor))))


def learning_rate(step: int, *, peak: float, total: int, warmup: int, final: float) -> float:
    """The learning rate of update `step` (from 0): linear warmup, then cosine decay to `final` times the peak.

    peak * (step + 1) / warmup for step < warmup, then peak * (final + (1 - final) * (1 + cos(pi * t)) / 2), where t
    grows from 0 to 1 at the last update and stays 1 beyond `total`.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total - 1 - warmup)
    return peak * (final + (1 - final) * (1 + math.cos(math.pi * min(1.0, done))) / 2)
