"""A student whose weights are divided among the processes as well (torch's FSDP2): one that does not fit one GPU.

A process holds an n-th of the rows of every parameter, in float32, with their moments and gradient. Whole, in the
network's dtype, are only a block while it runs, forward and backward, and the embedding, last norm and head from the
start of the forward pass to the end of the backward one, since the loss reads the head in between. Gradients are
summed in float32, by the process that has the rows, after every micro-batch. Only the head's is formed whole, by the
loss (`grad_of`), and summed once an update.

So every process must run the network whenever one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from aprtrain.network.decoder import Decoder
from aprtrain.network.shape import Shape
from aprtrain.optim.adamw import Adam, Settings, joint_norm
from aprtrain.world import World


def shard_weights(shape: Shape, dtype: torch.dtype, world: World) -> Decoder:
    """A network that computes in `dtype`, divided among the processes; its values are to be written by `load`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    decoder = Decoder(shape, dtype, "meta").float()
    mesh = init_device_mesh(world.device.type, (world.size,))
    # Tables of rotations are float32 and stay so.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in (*decoder.blocks, decoder):
        sharded = fully_shard(part, mesh=mesh, mp_policy=policy)
        # The loss is a process's share of the mean, so its gradients are to be summed and not averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    decoder.to_empty(device=world.device)
    return decoder


class ShardedAdamW:
    """An `optim.Optimizer` of a network that `shard_weights` made."""

    is_sharded = True

    def __init__(self, network: torch.nn.Module, settings: Settings, world: World) -> None:
        """The network's values are to be written by `load`."""
        self._world = world
        self._parameters: dict[str, Any] = dict(network.named_parameters())
        self.shapes: Mapping[str, tuple[int, ...]] = {n: tuple(p.shape) for n, p in self._parameters.items()}
        decays = [len(shape) > 1 for shape in self.shapes.values()]
        self.adam = Adam(self._masters(), decays, settings)
        self._formed: dict[str, Tensor] = {}

    @torch.no_grad()
    def _masters(self) -> list[Tensor]:
        """The rows that this process has; asked for at each use, since FSDP may lay them elsewhere."""
        return [p.to_local() for p in self._parameters.values()]

    def _of(self, kind: str) -> list[Tensor]:
        return {"master": self._masters(), "mean": self.adam.mean, "square": self.adam.square}[kind]

    def _padded(self, name: str) -> tuple[int, ...]:
        """A parameter's shape with so many rows that all processes have as many; the last ones may have fewer."""
        rows, *rest = self.shapes[name]
        return (-(-rows // self._world.size) * self._world.size, *rest)

    # --- the gradient ---

    def clear(self) -> None:
        """Makes the gradient zero."""
        for parameter in self._parameters.values():
            parameter.grad = None
        for buffer in self._formed.values():
            buffer.zero_()

    def grad_of(self, name: str) -> Tensor:
        """The float32 gradient of a parameter that autograd forms none of, or only a part of. See optim.Optimizer."""
        if name not in self._formed:
            self._formed[name] = torch.zeros(self._padded(name), device=self._world.device)
        return self._formed[name][: self.shapes[name][0]]

    def send_when_complete(self) -> None:
        """FSDP sums every micro-batch by itself."""

    def _grad(self, name: str, own: Tensor) -> Tensor:
        """This process's rows of the summed gradient."""
        found = self._parameters[name].grad
        grad = torch.zeros_like(own) if found is None else found.to_local()
        if name in self._formed:
            buffer = self._formed[name]
            self._world.sum_parts(buffer).wait()
            grad = grad + self._world.part(buffer)[: len(own)]
        return grad

    # --- the update ---

    @torch.no_grad()
    def step(self, lr: float, loss: Tensor | None = None) -> Tensor:
        """One update; gives the norm of the gradient before clipping, on the device. See optim.Optimizer."""
        masters = self._masters()
        grads = [self._grad(name, own) for name, own in zip(self.shapes, masters, strict=True)]
        norm = joint_norm(get_total_norm(grads), self._world)
        self.adam.update(masters, grads, lr, norm, loss)
        return norm

    # --- values ---

    @torch.no_grad()
    def gather(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """(name, values) of every parameter, for one of KINDS, one whole at a time. See optim.Optimizer."""
        for (name, shape), own in zip(self.shapes.items(), self._of(kind), strict=True):
            whole = torch.empty(self._padded(name), device=own.device)
            self._world.part(whole)[: len(own)] = own
            self._world.gather_parts(whole).wait()
            yield name, whole[: shape[0]]

    @torch.no_grad()
    def load(self, kind: str, write: Callable[[str, Tensor], object]) -> None:
        """Lets `write` fill the values of every parameter, one whole at a time. See optim.Optimizer."""
        for (name, shape), own in zip(self.shapes.items(), self._of(kind), strict=True):
            whole = torch.zeros(self._padded(name), device=own.device)
            write(name, whole[: shape[0]])
            own.copy_(self._world.part(whole)[: len(own)])
