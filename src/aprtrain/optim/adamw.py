"""AdamW on flat buffers that hold all parameters, so that each operation is one kernel; with several processes each one
updates its shard.

There are two flat buffers of P elements: the float32 gradient, and the compute copy in the network's dtype, of which
the parameters are views. Matrices come first, since only they have weight decay. Each parameter begins at a multiple
of 64 elements.

The buffers are divided into buckets. Each of n processes owns one n-th of every bucket and holds float32 master
weights, mean and square of that part only. An update reduce-scatters the gradient, updates the owned weights, and
all-gathers the compute copy: one n-th of the states and of the work, for at most the traffic of an all-reduce of the
gradient (Rajbhandari et al., ZeRO, 2020, stage 1). Buckets are reduced while the last backward pass of the update
still computes earlier layers, and gathered until the next call of the network.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    w = w - lr (decay w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))      (Loshchilov and Hutter, 2019)
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from aprfmt.errors import CorruptError
from aprtrain.features import current, importable
from aprtrain.network.decoder import Decoder
from aprtrain.network.shape import Shape
from aprtrain.world import Communication, World

KINDS = ("master", "mean", "square")
"""Master weights and moments, which an optimizer holds in float32 for each parameter."""

_ALIGNMENT = 64
_BUCKET = 1 << 25
"""Minimum elements of a full bucket: enough for the full rate of a link, few enough to start early."""


def note_adamw(device: torch.device) -> bool:
    """Whether the fused kernel updates weights on `device`; records the choice."""
    fused = device.type == "cuda" and current().check("triton", importable("triton"))
    current().use("AdamW", "Triton" if fused else "torch")
    return fused


@dataclass(frozen=True, slots=True)
class Settings:
    """AdamW's settings; `clip` is the gradient clipping norm, 0: off."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0


class Adam:
    """The moments of float32 tensors, and their fused AdamW update."""

    def __init__(self, weights: Sequence[Tensor], decays: Sequence[bool], settings: Settings) -> None:
        """`decays`: whether each tensor has weight decay."""
        self._settings = settings
        self._decays = decays
        self.mean = [torch.zeros_like(w) for w in weights]
        self.square = [torch.zeros_like(w) for w in weights]
        self._counts = [torch.zeros((), device=w.device) for w in weights]

    @property
    def count(self) -> Tensor:
        """Number of updates so far, a float32 scalar."""
        return self._counts[0]

    def of(self, kind: str, weights: list[Tensor]) -> list[Tensor]:
        """The tensors of one of KINDS, given the master `weights`."""
        return {"master": weights, "mean": self.mean, "square": self.square}[kind]

    def set_count(self, count: Tensor) -> None:
        """Sets the number of updates, when a run resumes."""
        for own in self._counts:
            own.copy_(count)

    def update(
        self,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        lr: float,
        norm: Tensor,
        loss: Tensor | None,
        copies: Sequence[Tensor] = (),
    ) -> None:
        """Updates the weights unless the norm or the loss is not finite; the host does not wait.

        `norm` is that of the whole gradient. The weights are also written to `copies`, in their dtype. Overwrites
        `grads`.
        """
        s = self._settings
        finite = torch.isfinite(norm) if loss is None else torch.isfinite(norm) & torch.isfinite(loss)
        # The fused kernel skips the update if `skip` is 1 and divides the gradient by `scale`.
        skip = (~finite).to(torch.float32)
        scale = (norm / s.clip).clamp(min=1.0) if s.clip else torch.ones_like(norm)
        if note_adamw(norm.device):
            from aprtrain.kernels.adam_triton import update

            betas = {"beta1": s.betas[0], "beta2": s.betas[1]}
            for n, count in enumerate(self._counts):
                count.add_(1 - skip)
                update(
                    weights[n], grads[n], self.mean[n], self.square[n], copies[n] if copies else None, skip, scale,
                    count, lr=lr, eps=s.eps, decay=s.weight_decay if self._decays[n] else 0.0, **betas,
                )  # fmt: skip
            return
        for decays in (True, False):
            some = [i for i, own in enumerate(self._decays) if own is decays and weights[i].numel()]
            if some:
                adamw(
                    [weights[i] for i in some], [grads[i] for i in some], [self.mean[i] for i in some],
                    [self.square[i] for i in some], [], [self._counts[i] for i in some], fused=True,
                    grad_scale=scale, found_inf=skip, amsgrad=False, maximize=False, lr=lr, eps=s.eps,
                    beta1=s.betas[0], beta2=s.betas[1], weight_decay=s.weight_decay if decays else 0.0,
                )  # fmt: skip
        for copy, weight in zip(copies, weights, strict=False):
            copy.copy_(weight)


class Optimizer(Protocol):
    """Owner of a network's float32 weights, moments and gradient.

    All methods are collective: every process must call them.
    """

    shapes: Mapping[str, tuple[int, ...]]
    adam: Adam
    is_sharded: bool
    """Whether the network itself is sharded, so that no process can run it alone."""

    def clear(self) -> None:
        """Zeroes the gradient."""

    def grad_of(self, name: str) -> Tensor:
        """The float32 gradient of a parameter, in its shape; code that computes gradients itself adds to it."""

    def sync_next_backward(self) -> None:
        """Marks the next backward pass as the last one of the update."""

    def step(self, lr: float, loss: Tensor | None = None) -> Tensor:
        """Updates the weights; returns the norm of the gradient before clipping, on the device.

        The gradient is summed over all processes. Nothing changes if its norm or the loss is not finite.
        """

    def search_scales(self) -> None:
        """Rounds the weights of quantization-aware training as a checkpoint would store them, with a search for the
        scales.
        """

    def gather(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, values) of every parameter, for one of KINDS; on the device, valid until the next one.

        Overwrites the gradient.
        """

    def load(self, kind: str, write: Callable[[str, Tensor], object]) -> None:
        """Calls `write` with the name and a tensor on the device of every parameter, to fill in its values.

        Overwrites the gradient.
        """


def states(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The state that resumes training exactly, for any number of processes: "master.NAME", ..., and "step".

    Each tensor is valid until the next one.
    """
    for kind in KINDS:
        for name, tensor in optimizer.gather(kind):
            yield f"{kind}.{name}", tensor
    yield "step", optimizer.adam.count


def load_states(optimizer: Optimizer, state: Mapping[str, Tensor]) -> None:
    """Loads what `states` yielded; "rng" is ignored. Raises CorruptError if it belongs to another network."""
    wanted = {f"{kind}.{name}" for kind in KINDS for name in optimizer.shapes} | {"step"}
    if wrong := sorted(wanted ^ (set(state) - {"rng"})):
        raise CorruptError("the saved optimizer state belongs to a different network", tensor=wrong[0])
    for kind in KINDS:
        optimizer.load(kind, partial(_read, state, kind))
    optimizer.adam.set_count(state["step"])


def _read(state: Mapping[str, Tensor], kind: str, name: str, target: Tensor) -> None:
    saved = state[f"{kind}.{name}"]
    if saved.shape != target.shape:
        raise CorruptError("the saved optimizer state belongs to a different network", tensor=f"{kind}.{name}")
    target.copy_(saved)


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """Position of a parameter in the flat buffers."""

    start: int
    shape: tuple[int, ...]

    def of(self, flat_P: Tensor) -> Tensor:
        """The view of a buffer."""
        return flat_P[self.start : self.start + math.prod(self.shape)].view(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A range of the flat buffers: whole parameters, either all with weight decay or all without."""

    start: int
    stop: int
    decays: bool
    names: frozenset[str]

    def of(self, flat_P: Tensor) -> Tensor:
        """The view of a buffer."""
        return flat_P[self.start : self.stop]

    def own(self, flat_P: Tensor, world: World) -> Tensor:
        """This process's shard of it."""
        return world.part(self.of(flat_P))


class WeightRounding(Protocol):
    """Rounds the compute copy in quantization-aware training; see `qat.Quantizer`."""

    @property
    def alignment(self) -> int:
        """Every part of the flat buffers begins at a multiple of this many elements."""

    @property
    def is_searched(self) -> bool:
        """Whether rounding depends on `searches`."""

    def lay_out(self, slices: Mapping[str, BufferSlice]) -> None:
        """Receives the positions of the parameters."""

    def fix_steps(self, flat_P: Tensor) -> None:
        """Receives all weights, float32, whenever new ones are loaded."""

    def begin(self, *, searches: bool = False) -> None:
        """Called before all weights are rounded again."""

    def round(self, start: int, master_P: Tensor, compute_P: Tensor) -> None:
        """Rounds a part of the compute copy, which begins at element `start`."""


class FlatAdamW:
    """An Optimizer of a network that every process holds whole; the parameters become views of the compute copy.

    Each gradient is added to the float32 buffer as soon as autograd completes it, and then freed.
    """

    is_sharded = False

    def __init__(
        self,
        network: torch.nn.Module,
        settings: Settings = Settings(),
        world: World | None = None,
        rounding: WeightRounding | None = None,
    ) -> None:
        """From now on the network computes in the dtype of its parameters.

        Weights are rounded by `rounding` from the first `load` or update on.
        """
        self._parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.shapes: Mapping[str, tuple[int, ...]] = {n: tuple(p.shape) for n, p in self._parameters.items()}
        first = next(iter(self._parameters.values()))
        self._world = world or World(first.device)
        alignment = max(_ALIGNMENT, rounding.alignment if rounding is not None else 0)
        self.slices, self._buckets = _laid_out(self.shapes, self._world.size, alignment)
        if rounding is not None:
            rounding.lay_out(self.slices)
        end = self._buckets[-1].stop
        self.grad = torch.zeros(end, dtype=torch.float32, device=first.device)
        self._compute = torch.zeros_like(self.grad, dtype=first.dtype)
        is_one = self._world.size == 1 and first.dtype == torch.float32 and rounding is None
        self.master = self._compute if is_one else self.grad.new_zeros(end // self._world.size)
        self._masters = list(torch.split(self.master, [(b.stop - b.start) // self._world.size for b in self._buckets]))
        self._arriving: list[Communication] = []
        self.adam = Adam(self._masters, [b.decays for b in self._buckets], settings)
        self._rounding: WeightRounding | None = None  # the parameters may be NaN still
        self.load("master", lambda name, whole: whole.copy_(self._parameters[name].detach()))
        self._rounding = rounding
        for name, slice in self.slices.items():
            self._parameters[name].data = slice.of(self._compute)
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(self._adder(name))  # type: ignore[no-untyped-call]
        if self._world.size > 1:
            network.register_forward_pre_hook(lambda *_: _wait(self._arriving))
        self._formed = set[str]()  # what autograd forms gradients of, known after the first backward pass
        self._awaited: set[str] | None = None
        self._unsent: list[Bucket] = []
        self._sending: list[Communication] = []
        self.clear()

    # --- the gradient ---

    def clear(self) -> None:
        """Zeroes the gradient."""
        self.grad.zero_()
        self._awaited = None
        # The gradient of the last layer is complete first; the last bucket, norms and biases, needs the first layer
        # too.
        self._unsent = sorted(self._buckets, key=lambda b: b.decays) if self._world.size > 1 else []

    def grad_of(self, name: str) -> Tensor:
        """The float32 gradient of a parameter, in its shape."""
        return self.slices[name].of(self.grad)

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
        """Starts to reduce the buckets whose gradients are complete, up to the first one that still waits for a
        gradient.
        """
        while self._unsent and awaited.isdisjoint(self._unsent[-1].names):
            self._sending.append(self._world.reduce_scatter(self._unsent.pop().of(self.grad)))

    # --- the update ---

    @torch.no_grad()
    def step(self, lr: float, loss: Tensor | None = None) -> Tensor:
        """Updates the weights; returns the norm of the gradient before clipping, on the device. See Optimizer."""
        self._send(set())
        _wait(self._sending)
        grads = [bucket.own(self.grad, self._world) for bucket in self._buckets]
        norm = global_norm(get_total_norm(grads, foreach=False), self._world)
        alone = self._world.size == 1 and self._compute is not self.master
        copies = [bucket.of(self._compute) for bucket in self._buckets] if alone else ()
        self.adam.update(self._masters, grads, lr, norm, loss, copies)
        self._publish(is_copied=alone)
        return norm

    @torch.no_grad()
    def search_scales(self) -> None:
        """Rounds the weights with a search for the codec's scales. See Optimizer."""
        if self._rounding is not None and self._rounding.is_searched:
            self._publish(searches=True)

    def _publish(self, *, is_copied: bool = False, searches: bool = False) -> None:
        """Copies the current master weights to the network; with `is_copied` only rounding is left."""
        _wait(self._arriving)
        if self._rounding is not None:
            self._rounding.begin(searches=searches)
        if self._compute is not self.master:
            self._arriving = self._gathering(self._masters, self._compute, self._rounding, is_copied=is_copied)

    def _gathering(
        self,
        pieces: Sequence[Tensor],
        whole_P: Tensor,
        rounding: WeightRounding | None = None,
        *,
        is_copied: bool = False,
    ) -> list[Communication]:
        """Starts to all-gather the parts that the processes own."""
        works = list[Communication]()
        for bucket, piece in zip(self._buckets, pieces, strict=True):
            own = bucket.own(whole_P, self._world)
            if not is_copied:
                own.copy_(piece)
            if rounding is not None:
                rounding.round(bucket.start + self._world.rank * len(own), piece, own)
            if self._world.size > 1:
                works.append(self._world.all_gather(bucket.of(whole_P)))
        return works

    # --- values ---

    @torch.no_grad()
    def gather(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, values) of every parameter, for one of KINDS. See Optimizer."""
        _wait(self._gathering(self.adam.of(kind, self._masters), self.grad))
        for name, slice in self.slices.items():
            yield name, slice.of(self.grad)

    @torch.no_grad()
    def load(self, kind: str, write: Callable[[str, Tensor], object]) -> None:
        """Calls `write` to fill in the values of every parameter. See Optimizer."""
        for name, slice in self.slices.items():
            write(name, slice.of(self.grad))
        if kind == "master" and self._rounding is not None:
            self._rounding.fix_steps(self.grad)
        for bucket, piece in zip(self._buckets, self.adam.of(kind, self._masters), strict=True):
            piece.copy_(bucket.own(self.grad, self._world))
        if kind == "master":
            self._publish(searches=True)


def _wait(works: list[Communication]) -> None:
    """Waits for the given communication (on a GPU the host does not wait) and empties the list."""
    while works:
        works.pop().wait()


def global_norm(own: Tensor, world: World) -> Tensor:
    """The norm of a sharded gradient, from the norm of this process's shard; bitwise equal in all processes."""
    square = own.square()
    world.all_reduce(square)
    return square.sqrt()


def _laid_out(
    shapes: Mapping[str, tuple[int, ...]], n: int, alignment: int = _ALIGNMENT
) -> tuple[dict[str, BufferSlice], list[Bucket]]:
    """Lays out slices and buckets for n processes; a single process needs two buckets only."""
    slices, buckets, end = dict[str, BufferSlice](), list[Bucket](), 0
    for decays in (True, False):
        start, names = end, list[str]()
        some = [name for name, shape in shapes.items() if (len(shape) > 1) is decays]
        for name in some:
            slices[name] = BufferSlice(end, shapes[name])
            names.append(name)
            end += _up(math.prod(shapes[name]), alignment)
            if name == some[-1] or (n > 1 and end - start >= _BUCKET):
                end = start + _up(end - start, alignment * n)
                buckets.append(Bucket(start, end, decays, frozenset(names)))
                start, names = end, []
    return slices, buckets


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


# --- weights divided among the processes ---


def shard_weights(shape: Shape, dtype: torch.dtype, world: World) -> Decoder:
    """A network that computes in `dtype` and is sharded over the processes; fill in its values with `load`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    decoder = Decoder(shape, dtype, "meta").float()
    mesh = init_device_mesh(world.device.type, (world.size,))
    # Rotation tables stay float32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in (*decoder.blocks, decoder):
        sharded = fully_shard(part, mesh=mesh, mp_policy=policy)
        # Each process's loss is its share of the mean, so gradients are summed, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    decoder.to_empty(device=world.device)
    return decoder


class ShardedAdamW:
    """The Optimizer of a network from `shard_weights`, for a student that does not fit on one GPU.

    Each process holds one n-th of the rows of every parameter in float32, with their moments and gradient. Gathered, in
    the network's dtype, are only: one block while it runs, forward and backward; and the embedding, last norm and head
    from the start of the forward pass to the end of the backward pass, since the loss reads the head in between.
    Gradients are reduced in float32 after every micro-batch. Only the gradient of the head is computed whole, by the
    loss (`grad_of`), and reduced once per update. So all processes must run the network together.
    """

    is_sharded = True

    def __init__(self, network: torch.nn.Module, settings: Settings, world: World) -> None:
        """Fill in the network's values with `load`."""
        self._world = world
        self._parameters: dict[str, Any] = dict(network.named_parameters())
        self.shapes: Mapping[str, tuple[int, ...]] = {n: tuple(p.shape) for n, p in self._parameters.items()}
        decays = [len(shape) > 1 for shape in self.shapes.values()]
        self.adam = Adam(self._masters(), decays, settings)
        self._formed: dict[str, Tensor] = {}

    @torch.no_grad()
    def _masters(self) -> list[Tensor]:
        """This process's rows; looked up at each use, since FSDP may move them."""
        return [p.to_local() for p in self._parameters.values()]

    def _padded(self, name: str) -> tuple[int, ...]:
        """A parameter's shape with its rows padded to a multiple of the number of processes."""
        rows, *rest = self.shapes[name]
        return (-(-rows // self._world.size) * self._world.size, *rest)

    # --- the gradient ---

    def clear(self) -> None:
        """Zeroes the gradient."""
        for parameter in self._parameters.values():
            parameter.grad = None
        for buffer in self._formed.values():
            buffer.zero_()

    def grad_of(self, name: str) -> Tensor:
        """The float32 gradient of a parameter that the loss computes, at least in part. See Optimizer."""
        if name not in self._formed:
            self._formed[name] = torch.zeros(self._padded(name), device=self._world.device)
        return self._formed[name][: self.shapes[name][0]]

    def sync_next_backward(self) -> None:
        """Does nothing: FSDP reduces every micro-batch."""

    def search_scales(self) -> None:
        """Does nothing: the weights are never rounded."""

    def _grad(self, name: str, own: Tensor) -> Tensor:
        """This process's rows of the reduced gradient."""
        found = self._parameters[name].grad
        grad = torch.zeros_like(own) if found is None else found.to_local()
        if name in self._formed:
            buffer = self._formed[name]
            self._world.reduce_scatter(buffer).wait()
            grad = grad + self._world.part(buffer)[: len(own)]
        return grad

    # --- the update ---

    @torch.no_grad()
    def step(self, lr: float, loss: Tensor | None = None) -> Tensor:
        """Updates the weights; returns the norm of the gradient before clipping, on the device. See Optimizer."""
        masters = self._masters()
        grads = [self._grad(name, own) for name, own in zip(self.shapes, masters, strict=True)]
        norm = global_norm(get_total_norm(grads), self._world)
        self.adam.update(masters, grads, lr, norm, loss)
        return norm

    # --- values ---

    @torch.no_grad()
    def gather(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, values) of every parameter, for one of KINDS, gathering one at a time. See Optimizer."""
        for (name, shape), own in zip(self.shapes.items(), self.adam.of(kind, self._masters()), strict=True):
            whole = torch.empty(self._padded(name), device=own.device)
            self._world.part(whole)[: len(own)] = own
            self._world.all_gather(whole).wait()
            yield name, whole[: shape[0]]

    @torch.no_grad()
    def load(self, kind: str, write: Callable[[str, Tensor], object]) -> None:
        """Calls `write` to fill in the values of every parameter, one at a time. See Optimizer."""
        for (name, shape), own in zip(self.shapes.items(), self.adam.of(kind, self._masters()), strict=True):
            whole = torch.zeros(self._padded(name), device=own.device)
            write(name, whole[: shape[0]])
            own.copy_(self._world.part(whole)[: len(own)])


# --- the rate ---


def learning_rate(step: int, *, peak: float, total: int, warmup: int, final: float) -> float:
    """The learning rate of update `step` (from 0): linear warmup, then cosine decay to `final` times the peak.

    peak * (step + 1) / warmup for step < warmup, then peak * (final + (1 - final) * (1 + cos(pi * t)) / 2), where t
    grows
    from 0 to 1 at the last update and stays 1 beyond `total`.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total - 1 - warmup)
    return peak * (final + (1 - final) * (1 + math.cos(math.pi * min(1.0, done))) / 2)
