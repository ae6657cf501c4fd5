"""The state of either optimizer, in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor

from aprfmt.errors import CorruptError
from aprtrain.optim.flat import FlatOptimizer
from aprtrain.optim.sharded import ShardedOptimizer

Optimizer = FlatOptimizer | ShardedOptimizer


def states(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The state that resumes training exactly, for any number of processes: "master.NAME", ..., and "step".

    Each tensor is valid until the next one.
    """
    for kind in optimizer.updates.kinds:
        for name, tensor in optimizer.gather(kind):
            yield f"{kind}.{name}", tensor
    yield "step", optimizer.updates.count


def load_states(optimizer: Optimizer, state: Mapping[str, Tensor]) -> None:
    """Loads what `states` yielded; "rng" and the projection of `hidden` are ignored.

    Raises CorruptError if it belongs to another network.
    """
    wanted = {
        f"{kind}.{name}" for name in optimizer.shapes for kind in optimizer.rule.kinds(name, optimizer.shapes[name])
    } | {"step"}
    found = {name for name in state if name != "rng" and not name.endswith(".hidden.head")}
    if wrong := sorted(wanted ^ found):
        raise CorruptError("the saved optimizer state belongs to a different network", tensor=wrong[0])
    for kind in optimizer.updates.kinds:
        optimizer.load(kind, partial(_read, state, kind))
    optimizer.updates.count.copy_(state["step"])


def _read(state: Mapping[str, Tensor], kind: str, name: str, target: Tensor) -> None:
    saved = state[f"{kind}.{name}"]
    if saved.shape != target.shape:
        raise CorruptError("the saved optimizer state belongs to a different network", tensor=f"{kind}.{name}")
    target.copy_(saved)
