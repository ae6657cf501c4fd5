"""The optimizer of a network that is sharded over the processes, by FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from aprtrain.network.decoder import Decoder
from aprtrain.network.shape import Shape
from aprtrain.optim.flat import Matrices, global_norm
from aprtrain.optim.rules import Settings, UpdateRule, Updates
from aprtrain.world import World


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


class ShardedOptimizer:
    """Like FlatOptimizer, of a network from `shard_weights`, for a student that does not fit on one GPU.

    Each process holds one n-th of the rows of every parameter in float32, with their moments and gradient. Gathered, in
    the network's dtype, are only: one block while it runs, forward and backward; and the embedding, last norm and head
    from the start of the forward pass to the end of the backward pass, since the loss reads the head in between.
    Gradients are reduced in float32 after every micro-batch. Only the gradient of the head is computed whole, by the
    loss (`grad_of`), and reduced once per update. So all processes must run the network together.
    """

    is_sharded = True

    def __init__(
        self, network: torch.nn.Module, settings: Settings, world: World, rule: UpdateRule, matrices: Matrices
    ) -> None:
        """Fill in the network's values with `load`."""
        self.rule, self._matrices = rule, matrices
        self._world = world
        self._parameters: dict[str, Any] = dict(network.named_parameters())
        self.shapes: Mapping[str, tuple[int, ...]] = {n: tuple(p.shape) for n, p in self._parameters.items()}
        decays = [len(shape) > 1 for shape in self.shapes.values()]
        rules = [rule.of(name, shape) for name, shape in self.shapes.items()]
        self.updates = Updates(self._masters(), decays, settings, rules)
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
        """The float32 gradient of a parameter that the loss computes, at least in part. See FlatOptimizer."""
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
        """Updates the weights; returns the norm of the gradient before clipping, on the device. See FlatOptimizer."""
        masters = self._masters()
        grads = [self._grad(name, own) for name, own in zip(self.shapes, masters, strict=True)]
        norm, names = global_norm(get_total_norm(grads), self._world), list(self.shapes)

        def orient(n: int, function: Callable[[Tensor], Tensor]) -> None:
            name = names[n]
            whole = self._whole(name, grads[n])
            for matrix in self._matrices(name, whole[: self.shapes[name][0]]):
                matrix.copy_(function(matrix))
            grads[n].copy_(self._world.part(whole)[: len(grads[n])])

        self.updates.update(masters, grads, lr, norm, loss, orient=orient)
        return norm

    def _whole(self, name: str, own: Tensor) -> Tensor:
        """The rows of all processes, padded."""
        whole = torch.empty(self._padded(name), device=own.device)
        self._world.part(whole)[: len(own)] = own
        self._world.all_gather(whole).wait()
        return whole

    # --- values ---

    @torch.no_grad()
    def gather(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, values) of every parameter that has this kind, gathered one at a time. See FlatOptimizer."""
        for (name, shape), own in zip(self.shapes.items(), self.updates.of(kind, self._masters()), strict=True):
            if own is not None:
                yield name, self._whole(name, own)[: shape[0]]

    @torch.no_grad()
    def load(self, kind: str, write: Callable[[str, Tensor], object]) -> None:
        """Calls `write` to fill in the values of every parameter, one at a time. See FlatOptimizer."""
        for (name, shape), own in zip(self.shapes.items(), self.updates.of(kind, self._masters()), strict=True):
            if own is None:
                continue
            whole = torch.zeros(self._padded(name), device=own.device)
            write(name, whole[: shape[0]])
            own.copy_(self._world.part(whole)[: len(own)])
