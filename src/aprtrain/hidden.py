"""The loss between hidden states of matched layers, besides the objective's:

    L = L_objective + W / |M| sum over the pairs (i, j) of M, and mean over labels, of d(P h_i, g_j)

with the student's output h_i of layer i, the teacher's g_j of layer j (before the final norm), and a distance d of
DISTANCES at each position. P is the identity for models of one width, else a matrix that learns with the student (as in
Jiao et al. 2020, arXiv:1909.10351) and is saved in checkpoints, but not exported.

Shape suffixes: P positions with a label, S and E widths of student and teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from aprfmt.errors import CorruptError
from aprtrain.network.decoder import Decoder
from aprtrain.optim.rules import Settings, UpdateRule, Updates
from aprtrain.world import World

PROJECTION = "hidden.head"
"""Its name among the parameters of an optimizer, which updates it as it does an output head."""


def _cosine(x_PE: Tensor, y_PE: Tensor) -> Tensor:
    return 1 - functional.cosine_similarity(x_PE, y_PE, dim=1)


def _mse(x_PE: Tensor, y_PE: Tensor) -> Tensor:
    size_P = y_PE.square().mean(1).clamp(min=torch.finfo(y_PE.dtype).tiny)
    return (x_PE - y_PE).square().mean(1) / size_P


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cosine": _cosine, "mse": _mse}
"""(student [P, E], teacher [P, E]) -> distance of each position: 1 - cos, or the squared error relative to the
teacher's mean square, which differs between layers and tokens by orders of magnitude.
"""


class HiddenStates:
    """The loss of two networks.

    Attributes:
        projection: P [E, S] in float32; None for networks of one width.
    """

    def __init__(
        self, student: Decoder, teacher: Decoder, pairs: Sequence[tuple[int, int]], distance: str,
        rule: UpdateRule, settings: Settings, world: World, seed: int,
    ) -> None:  # fmt: skip
        """`pairs`: layers of student and teacher. A projection starts with normal values of variance 1 / S."""
        self._pairs, self._distance = list(pairs), DISTANCES[distance]
        self._models, self._world = (student, teacher), world
        self._outputs: tuple[Mapping[int, Tensor], Mapping[int, Tensor]] = ({}, {})
        self.projection: Tensor | None = None
        rows, columns = teacher.shape.d_model, student.shape.d_model
        if rows != columns:
            start = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * columns**-0.5
            self.projection = start.to(world.device).requires_grad_()
        weights = [] if self.projection is None else [self.projection.detach()]
        self._updates = Updates(weights, [True], settings, [rule.of(PROJECTION, weight.shape) for weight in weights])

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it, the next pass of each network provides the hidden states of `loss`."""
        student, teacher = self._models
        some, others = zip(*self._pairs, strict=True)
        with student.layer_outputs(some) as ours, teacher.layer_outputs(others) as theirs:
            self._outputs = ours, theirs
            yield

    def loss(self, labels_N: Tensor, kept_P: Tensor | None, n_valid: int) -> Tensor:
        """The sum of d over pairs and labelled positions, divided by |M| and `n_valid`, those of the global batch."""
        rows_P = torch.arange(len(labels_N), device=labels_N.device) if kept_P is None else kept_P
        is_valid_P = labels_N[rows_P] >= 0
        (ours, theirs), self._outputs = self._outputs, ({}, {})
        found: list[Tensor] = []
        for layer, other in self._pairs:
            x_PS, y_PE = (outputs.flatten(0, 1).index_select(0, rows_P) for outputs in (ours[layer], theirs[other]))
            wide = torch.promote_types(x_PS.dtype, torch.float32)
            x_PE = x_PS if self.projection is None else x_PS @ self.projection.to(x_PS.dtype).t()
            found.append(self._distance(x_PE.to(wide), y_PE.to(wide)).where(is_valid_P, 0).sum())
        return torch.stack(found).sum() / (len(self._pairs) * n_valid)

    def step(self, lr: float, loss: Tensor) -> None:
        """Updates the projection by the gradients of all processes, unless one of them or `loss` is not finite."""
        if self.projection is None or self.projection.grad is None:
            return
        grad, self.projection.grad = self.projection.grad, None
        self._world.all_reduce(grad)
        self._updates.update([self.projection.detach()], [grad], lr, torch.linalg.vector_norm(grad), loss)

    def states(self) -> dict[str, Tensor]:
        """Copies of the projection and its optimizer states on the host, as those of a parameter of PROJECTION."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self._tensors().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `states` gave, if it has a projection. Raises CorruptError if it is of other networks."""
        for name, tensor in self._tensors().items():
            if name not in state:
                return
            if state[name].shape != tensor.shape:
                raise CorruptError("the saved projection of hidden states belongs to other networks", tensor=name)
            tensor.detach().copy_(state[name])
        if self.projection is not None:
            self._updates.count.copy_(state["step"])

    def _tensors(self) -> dict[str, Tensor]:
        if self.projection is None:
            return {}
        return {f"{kind}.{PROJECTION}": x for kind, x in {"master": self.projection, **self._updates.states[0]}.items()}
