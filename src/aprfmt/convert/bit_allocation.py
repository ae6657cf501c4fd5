"""Chooses a type for each tensor: the least predicted loss within a number of bytes, or the fewest bytes within a loss.

The loss is predicted as the sum over tensors of `cost` times the relative error of the type, which is close while
errors are small (linearity theorem, arXiv 2411.17525). The types of a tensor that can be optimal for some price of a
byte are the corners of the lower convex hull of (bytes, error). Steps from corner to corner, those that save the most
loss per byte first, are the solutions of the Lagrangian for every price; a budget between two of them, of bytes or of
loss, is filled with single steps that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(frozen=True, slots=True)
class TypeOption:
    """A candidate type of a tensor: its size in bytes and its relative error."""

    dtype: str
    n_bytes: int
    error: float


@dataclass(frozen=True, slots=True)
class AllocatedTensor:
    """A tensor to choose a type for.

    Attributes:
        name: of the tensor in a GGUF.
        options: the candidate types, at least one.
        cost: predicted loss per unit of relative error, in nats.
    """

    name: str
    options: tuple[TypeOption, ...]
    cost: float

    def loss(self, option: TypeOption) -> float:
        """The predicted loss in nats with that type."""
        return self.cost * option.error


Allocation = dict[str, TypeOption]
"""The chosen type of each tensor by name."""


def hull(options: Sequence[TypeOption]) -> list[TypeOption]:
    """The corners of the lower convex hull of (bytes, error), from the smallest option to the most precise one."""
    corners: list[TypeOption] = []
    for option in sorted(options, key=lambda o: (o.n_bytes, o.error)):
        if corners and option.error >= corners[-1].error:
            continue
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) <= _slope(corners[-1], option):
            corners.pop()
        corners.append(option)
    return corners


def _slope(a: TypeOption, b: TypeOption) -> float:
    """Error saved per byte from `a` to the larger `b`."""
    return (a.error - b.error) / max(1, b.n_bytes - a.n_bytes)


def fit_bytes(tensors: Sequence[AllocatedTensor], budget: int) -> Allocation | None:
    """The types with the least predicted loss in at most `budget` bytes; None if the smallest types need more."""
    chosen = smallest(tensors)
    left = budget - total_bytes(chosen)
    if left < 0:
        return None

    def take(tensor: AllocatedTensor, option: TypeOption) -> bool:
        nonlocal left
        more = option.n_bytes - chosen[tensor.name].n_bytes
        if more > left:
            return False
        left -= more
        chosen[tensor.name] = option
        return True

    _climb(tensors, take)
    while (best := _best_step(tensors, chosen, left)) is not None:
        take(*best)
    return chosen


def fit_loss(tensors: Sequence[AllocatedTensor], most: float) -> Allocation | None:
    """The fewest bytes with a predicted loss of at most `most` nats; None if the most precise types lose more."""
    chosen = smallest(tensors)
    if sum(tensor.loss(hull(tensor.options)[-1]) for tensor in tensors) > most:
        return None
    loss = total_loss(tensors, chosen)

    def take(tensor: AllocatedTensor, option: TypeOption) -> bool:
        nonlocal loss
        if loss <= most:
            return False
        loss -= tensor.loss(chosen[tensor.name]) - tensor.loss(option)
        chosen[tensor.name] = option
        return True

    _climb(tensors, take)
    while (found := _smallest_step(tensors, chosen, most - total_loss(tensors, chosen))) is not None:
        chosen[found[0].name] = found[1]
    return chosen


def smallest(tensors: Sequence[AllocatedTensor]) -> Allocation:
    """The smallest type of each tensor."""
    return {tensor.name: hull(tensor.options)[0] for tensor in tensors}


def total_bytes(chosen: Mapping[str, TypeOption]) -> int:
    """Bytes of all tensors."""
    return sum(option.n_bytes for option in chosen.values())


def total_loss(tensors: Sequence[AllocatedTensor], chosen: Mapping[str, TypeOption]) -> float:
    """The predicted loss in nats."""
    return sum(tensor.loss(chosen[tensor.name]) for tensor in tensors)


def _climb(tensors: Sequence[AllocatedTensor], take: Callable[[AllocatedTensor, TypeOption], bool]) -> None:
    """Offers the steps between corners to `take`, the most loss saved per byte first.

    A tensor whose step is refused keeps its type.
    """
    corners = [hull(tensor.options) for tensor in tensors]

    def gain(i: int, step: int) -> float:
        return tensors[i].cost * _slope(corners[i][step - 1], corners[i][step])

    steps = [(-gain(i, 1), i, 1) for i in range(len(tensors)) if len(corners[i]) > 1]
    heapify(steps)
    while steps:
        _, i, step = heappop(steps)
        if take(tensors[i], corners[i][step]) and step + 1 < len(corners[i]):
            heappush(steps, (-gain(i, step + 1), i, step + 1))


def _best_step(
    tensors: Sequence[AllocatedTensor], chosen: Allocation, left: int
) -> tuple[AllocatedTensor, TypeOption] | None:
    """The change of one tensor that saves the most loss in at most `left` further bytes."""
    found = [
        (tensor.loss(chosen[tensor.name]) - tensor.loss(option), i, tensor, option)
        for tensor in tensors
        for i, option in enumerate(tensor.options)
        if option.error < chosen[tensor.name].error and option.n_bytes - chosen[tensor.name].n_bytes <= left
    ]
    best = max(found, key=lambda row: (row[0], -row[1]), default=None)
    return (best[2], best[3]) if best is not None and best[0] > 0 else None


def _smallest_step(
    tensors: Sequence[AllocatedTensor], chosen: Mapping[str, TypeOption], left: float
) -> tuple[AllocatedTensor, TypeOption] | None:
    """The change of one tensor that saves the most bytes and loses at most `left` more; the last step of a climb may
    have been that of a large tensor.
    """
    found = [
        (chosen[tensor.name].n_bytes - option.n_bytes, -i, tensor, option)
        for i, tensor in enumerate(tensors)
        for option in tensor.options
        if option.n_bytes < chosen[tensor.name].n_bytes
        and tensor.loss(option) - tensor.loss(chosen[tensor.name]) <= left
    ]
    best = max(found, key=lambda row: row[:2], default=None)
    return (best[2], best[3]) if best is not None else None
