"""The optimizer of a network that every process holds whole: flat buffers hold all parameters, so that each operation
is one kernel; with several processes each one updates its shard.

There are two flat buffers of P elements: the float32 gradient, and the compute copy in the network's dtype, of which
the parameters are views. Matrices come first, since only they have weight decay. Each parameter begins at a multiple
of 64 elements.

The buffers are divided into buckets. Each of n processes owns one n-th of every bucket and holds float32 master
weights and the states of the update rule of that part only. An update reduce-scatters the gradient, updates the owned
weights, and all-gathers the compute copy: one n-th of the states and of the work, for at most the traffic of an
all-reduce of the gradient (Rajbhandari et al., ZeRO, 2020, stage 1). Buckets are reduced while the last backward pass
of the update still computes earlier layers, and gathered until the next call of the network. A rule that needs whole
matrices all-gathers their directions too, and each process orients those that it owns a part of.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import Work
from torch.nn.utils import get_total_norm

from aprtrain.optim.rules import ADAMW, Settings, UpdateRule, Updates
from aprtrain.qat import Quantizer
from aprtrain.world import World

_ALIGNMENT = 64
_BUCKET = 1 << 25
"""Minimum elements of a full bucket: enough for the full rate of a link, few enough to start early."""


Matrices = Callable[[str, Tensor], Sequence[Tensor]]
"""(name of a parameter, its values) -> the weight matrices it is fused from, as views."""


def unfused(name: str, whole: Tensor) -> Sequence[Tensor]:
    """The matrices of a network whose parameters are not fused."""
    return [whole]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A range of the flat buffers: whole parameters with the same update rule, all with weight decay or all without."""

    start: int
    stop: int
    decays: bool
    rule: UpdateRule
    names: frozenset[str]

    def of(self, flat_P: Tensor) -> Tensor:
        """The view of a buffer."""
        return flat_P[self.start : self.stop]

    def own(self, flat_P: Tensor, world: World) -> Tensor:
        """This process's shard of it."""
        return world.part(self.of(flat_P))


class FlatOptimizer:
    """Owner of the float32 weights, moments and gradient of a network that every process holds whole.

    The parameters become views of the compute copy. Each gradient is added to the float32 buffer as soon as autograd
    completes it, and then freed. All methods are collective: every process must call them.

    Attributes:
        shapes: of the parameters.
        updates: the states of the update rules.
        rule: that of the matrices of layers, see `UpdateRule.of`.
    """

    is_sharded = False
    """Whether the network itself is sharded, so that no process can run it alone."""

    def __init__(
        self,
        network: torch.nn.Module,
        settings: Settings | None = None,
        world: World | None = None,
        rounding: Quantizer | None = None,
        rule: UpdateRule = ADAMW,
        matrices: Matrices = unfused,
    ) -> None:
        """From now on the network computes in the dtype of its parameters.

        Weights are rounded by `rounding` from the first `load` or update on.
        """
        self.rule, self._matrices = rule, matrices
        self._parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.shapes: Mapping[str, tuple[int, ...]] = {n: tuple(p.shape) for n, p in self._parameters.items()}
        first = next(iter(self._parameters.values()))
        self._world = world or World(first.device)
        alignment = max(_ALIGNMENT, rounding.alignment if rounding is not None else 0)
        starts, self._buckets = _laid_out(self.shapes, self._world.size, alignment, rule)
        if rounding is not None:
            rounding.lay_out(starts)
        end = self._buckets[-1].stop
        self.grad = torch.zeros(end, dtype=torch.float32, device=first.device)
        self._grads = {name: _view(self.grad, start, self.shapes[name]) for name, start in starts.items()}
        self._compute = torch.zeros_like(self.grad, dtype=first.dtype)
        is_one = self._world.size == 1 and first.dtype == torch.float32 and rounding is None
        self.master = self._compute if is_one else self.grad.new_zeros(end // self._world.size)
        self._masters = list(torch.split(self.master, [(b.stop - b.start) // self._world.size for b in self._buckets]))
        self._arriving: list[Work] = []
        decays, rules = [b.decays for b in self._buckets], [b.rule for b in self._buckets]
        self.updates = Updates(self._masters, decays, settings or Settings(), rules)
        self._rounding: Quantizer | None = None  # the parameters may be NaN still
        self.load("master", lambda name, whole: whole.copy_(self._parameters[name].detach()))
        self._rounding = rounding
        for name, parameter in self._parameters.items():
            parameter.data = _view(self._compute, starts[name], self.shapes[name])
            parameter.register_post_accumulate_grad_hook(self._adder(name))  # type: ignore[no-untyped-call]
        if self._world.size > 1:
            network.register_forward_pre_hook(lambda *_: _wait(self._arriving))
        self._formed = set[str]()  # what autograd forms gradients of, known after the first backward pass
        self._awaited: set[str] | None = None
        self._unsent: list[Bucket] = []
        self._sending: list[Work] = []
        self.clear()

    # --- the gradient ---

    def clear(self) -> None:
        """Zeroes the gradient."""
        self.grad.zero_()
        self._awaited = None
        # The gradient of the last layer is complete first; the last buckets, of the embedding and of norms and biases,
        # need the first layer too.
        self._unsent = (
            sorted(self._buckets, key=lambda b: (b.decays, b.rule is self.rule)) if self._world.size > 1 else []
        )

    def grad_of(self, name: str) -> Tensor:
        """The float32 gradient of a parameter, in its shape; code that computes gradients itself adds to it."""
        return self._grads[name]

    def _adder(self, name: str) -> Callable[[Tensor], None]:
        # Autograd's references to hooks are invisible to the garbage collector: a hook that owned the optimizer, and
        # thereby the hooked parameter, would leak both with all their buffers.
        total, reference = self.grad_of(name), weakref.ref(self)

        def add(parameter: Tensor) -> None:
            if (optimizer := reference()) is None:
                return
            if parameter.grad is not None:
                total.add_(parameter.grad)
                parameter.grad = None
            optimizer._formed.add(name)
            if optimizer._awaited is not None:
                optimizer._awaited.discard(name)
                optimizer._send(optimizer._awaited)

        return add

    def sync_next_backward(self) -> None:
        """Marks the next backward pass as the last one of the update."""
        # All processes reduce in the same order, whatever the order of the hooks.
        self._awaited = set(self._formed) if self._formed else None

    def _send(self, awaited: set[str]) -> None:
        """Starts to reduce the buckets whose gradients are complete, up to the first one that is not."""
        while self._unsent and awaited.isdisjoint(self._unsent[-1].names):
            self._sending.append(self._world.reduce_scatter(self._unsent.pop().of(self.grad)))

    # --- the update ---

    @torch.no_grad()
    def step(self, lr: float, loss: Tensor | None = None) -> Tensor:
        """Updates the weights; returns the norm of the gradient before clipping, on the device.

        The gradient is summed over all processes. Nothing changes if its norm or the loss is not finite.
        """
        self._send(set())
        _wait(self._sending)
        grads = [bucket.own(self.grad, self._world) for bucket in self._buckets]
        norm = global_norm(get_total_norm(grads, foreach=False), self._world)
        alone = self._world.size == 1 and self._compute is not self.master
        copies = [bucket.of(self._compute) for bucket in self._buckets] if alone else ()
        self.updates.update(self._masters, grads, lr, norm, loss, copies, self._orient)
        self._publish(is_copied=alone)
        return norm

    def _orient(self, n: int, orient: Callable[[Tensor], Tensor]) -> None:
        """Replaces the owned directions of a bucket by those of the whole matrices that they are a part of."""
        bucket = self._buckets[n]
        if self._world.size > 1:
            self._world.all_gather(bucket.of(self.grad)).wait()
        n_own = (bucket.stop - bucket.start) // self._world.size
        start = bucket.start + n_own * self._world.rank
        for name in bucket.names:
            for matrix in self._matrices(name, self._grads[name]):
                first = matrix.storage_offset()
                if first < start + n_own and start < first + matrix.numel():
                    matrix.copy_(orient(matrix))

    @torch.no_grad()
    def search_scales(self) -> None:
        """Rounds the weights of --qat as a checkpoint would store them, with a search for the codec's scales."""
        if self._rounding is not None and self._rounding.is_searched:
            self._publish(searches=True)

    def _publish(self, *, is_copied: bool = False, searches: bool = False) -> None:
        """Copies the current master weights to the network; with `is_copied` only rounding is left."""
        _wait(self._arriving)
        if self._rounding is not None:
            self._rounding.begin(searches=searches)
        if self._compute is self.master:
            return
        for bucket, master in zip(self._buckets, self._masters, strict=True):
            own = bucket.own(self._compute, self._world)
            if not is_copied:
                own.copy_(master)
            if self._rounding is not None:
                self._rounding.round(bucket.start + self._world.rank * len(own), master, own)
            if self._world.size > 1:
                self._arriving.append(self._world.all_gather(bucket.of(self._compute)))

    # --- values ---

    @torch.no_grad()
    def gather(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, values) of every parameter that has one of `updates.kinds`, on the device until the next one.

        Overwrites the gradient.
        """
        works = list[Work]()
        for bucket, piece in zip(self._buckets, self.updates.of(kind, self._masters), strict=True):
            if piece is not None:
                bucket.own(self.grad, self._world).copy_(piece)
                if self._world.size > 1:
                    works.append(self._world.all_gather(bucket.of(self.grad)))
        _wait(works)
        yield from self._whole(kind)

    def _whole(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """The room in the gradient of every parameter that has this kind."""
        return ((name, grad) for name, grad in self._grads.items() if kind in self.rule.kinds(name, grad.shape))

    @torch.no_grad()
    def load(self, kind: str, write: Callable[[str, Tensor], object]) -> None:
        """Calls `write` with the name and a tensor on the device of every parameter that has one of `updates.kinds`, to
        fill in its values.

        Overwrites the gradient.
        """
        for name, whole in self._whole(kind):
            write(name, whole)
        if kind == "master" and self._rounding is not None:
            self._rounding.fix_steps(self.grad)
        for bucket, piece in zip(self._buckets, self.updates.of(kind, self._masters), strict=True):
            if piece is not None:
                piece.copy_(bucket.own(self.grad, self._world))
        if kind == "master":
            self._publish(searches=True)


def _wait(works: list[Work]) -> None:
    """Waits for the given communication (on a GPU the host does not wait) and empties the list."""
    while works:
        works.pop().wait()


def global_norm(own: Tensor, world: World) -> Tensor:
    """The norm of a sharded gradient, from the norm of this process's shard; bitwise equal in all processes."""
    square = own.square()
    world.all_reduce(square)
    return square.sqrt()


def _view(flat_P: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """A parameter in a flat buffer."""
    return flat_P[start : start + math.prod(shape)].view(shape)


def _laid_out(
    shapes: Mapping[str, tuple[int, ...]], n: int, alignment: int = _ALIGNMENT, rule: UpdateRule = ADAMW
) -> tuple[dict[str, int], list[Bucket]]:
    """First elements of parameters, and buckets for n processes; a single one needs one bucket of each kind only."""
    starts, buckets, end = dict[str, int](), list[Bucket](), 0
    rules = {name: rule.of(name, shape) for name, shape in shapes.items()}
    kinds = ((True, rule), (True, ADAMW), (False, rule), (False, ADAMW))
    for decays, own in dict.fromkeys(kinds):
        start, names = end, list[str]()
        some = [name for name, shape in shapes.items() if (len(shape) > 1) is decays and rules[name] is own]
        for name in some:
            starts[name] = end
            names.append(name)
            end += _up(math.prod(shapes[name]), alignment)
            if name == some[-1] or (n > 1 and end - start >= _BUCKET):
                end = start + _up(end - start, alignment * n)
                buckets.append(Bucket(start, end, decays, own, frozenset(names)))
                start, names = end, []
    return starts, buckets


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
