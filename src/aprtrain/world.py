"""The processes of a run: one, or those that torchrun started, each with its part of a batch and of the weights."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import Work

from aprfmt.errors import AprError, MissingDependencyError, UsageError

T = TypeVar("T")

# torch 2.13 warns of the names that 2.11 and 2.12 have.
_reduce_scatter = getattr(torch.distributed, "reduce_scatter_single", torch.distributed.reduce_scatter_tensor)
_all_gather = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)

_TIMEOUT = timedelta(minutes=30)
"""Time limit of a collective: the first process may evaluate or save meanwhile."""

_PREPARE_TIMEOUT = timedelta(days=7)
"""Time limit of waiting for the first process to tokenize the data."""


class ReportedByFirst(Exception):
    """Cause of an error that all processes raise, in those that do not print it: rank 0 does."""


@dataclass(frozen=True, slots=True)
class World:
    """This process: its device, its rank, the world size; the same two within its node, 0: all are on one node.

    `preparation` is the group in which the others wait for the first process to tokenize the data.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 0
    preparation: torch.distributed.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process writes and logs for all."""
        return self.rank == 0

    @property
    def is_local_first(self) -> bool:
        """Whether this process reads and writes for its node."""
        return self.local_rank == 0 if self.local_size else self.is_first

    @property
    def is_one_node(self) -> bool:
        """Whether all processes see the same disks."""
        return self.local_size in (0, self.size)

    def gather(self, value: T) -> list[T]:
        """The `value` of every process, by rank; any picklable object."""
        found = [value] * self.size
        if self.size > 1:
            torch.distributed.all_gather_object(found, value)
        return found

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of rank 0, on the CPU; every process passes one of the same shape."""
        here = tensor.to(self.device)
        torch.distributed.broadcast(here, 0)
        return here.cpu()

    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all processes, bitwise identical on each."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)

    def part(self, whole: Tensor) -> Tensor:
        """This process's shard of `whole`: a view of one of `size` equal slices of dimension 0."""
        return whole.tensor_split(self.size)[self.rank] if self.size > 1 else whole

    def reduce_scatter(self, whole: Tensor) -> Work:
        """Starts to sum `whole` over all processes into `part(whole)`; overwrites the rest. `wait` for the result."""
        assert len(whole) % self.size == 0
        # NCCL allows its result to overlap its input; gloo does not.
        given = whole if whole.is_cuda else whole.clone()
        return cast(Work, _reduce_scatter(self.part(whole), given, async_op=True))

    def all_gather(self, whole: Tensor) -> Work:
        """Starts to fill `whole` with `part(whole)` of every process. `wait` for the result."""
        assert len(whole) % self.size == 0
        given = self.part(whole)
        given = given if whole.is_cuda else given.clone()
        return cast(Work, _all_gather(whole, given, async_op=True))

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true in some process; waits for all of them."""
        return any(self.gather(flag))

    def first_error(self, error: AprError | None) -> AprError | None:
        """The error of the lowest rank that has one, ready to raise here; None if no process has one."""
        found = next(((rank, each) for rank, each in enumerate(self.gather(error)) if each is not None), None)
        return found and self.told(found[1], found[0])

    def told(self, error: AprError, rank: int = 0) -> AprError:
        """The error of process `rank`, to be raised by all processes; only rank 0 prints it."""
        if rank:
            error.hint = f"in process {rank}" + (f"; {error.hint}" if error.hint else "")
        if not self.is_first:
            error.__cause__ = ReportedByFirst()
        return error

    def wait_for_first(self) -> None:
        """Waits until the first process has prepared the data, which may take hours."""
        if self.size > 1:
            torch.distributed.barrier(self.preparation)

    def barrier(self) -> None:
        """Waits for the other processes."""
        if self.size > 1:
            torch.distributed.barrier()


def copy_to(x: Tensor, device: torch.device) -> Tensor:
    """`x` on a device; copies to a GPU are asynchronous, from pinned memory."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def device_of(word: str, local_rank: int = 0) -> torch.device:
    """The device named by `word` ("cuda", "cuda:N", "cpu"), without fallback.

    Raises MissingDependencyError (exit 6) if it is not available, UsageError for other words.
    """
    try:
        device = torch.device(word)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cuda", "cpu"):
        raise UsageError(
            f"--device must be cuda, cuda:N or cpu, not {word!r}", hint="use --device cuda or --device cpu"
        )
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            "no CUDA device is available",
            hint="check nvidia-smi and the torch build; --device cpu uses the CPU, slowly",
        )
    index = local_rank if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise MissingDependencyError(
            f"no device cuda:{index}; {torch.cuda.device_count()} devices are visible",
            hint="--device cuda uses the first; CUDA_VISIBLE_DEVICES selects which are visible",
        )
    return torch.device("cuda", index)


def world_size() -> int:
    """The number of processes that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """The number of processes on this node; 0 if unknown, meaning all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0"))


@contextmanager
def join_world(word: str) -> Iterator[World]:
    """The world described by torchrun's variables, or a world of one. Raises as `device_of`."""
    size, rank = world_size(), int(os.environ.get("RANK", "0"))
    device = device_of(word, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # The backward thread creates its CUDA context on demand, and torch warns about it.
        warnings.filterwarnings(
            "ignore", "Attempting to run cuBLAS, but there was no current CUDA context", UserWarning
        )
    if size == 1:
        yield World(device)
        return
    if device.type == "cuda" and torch.device(word).index is not None:
        raise UsageError(f"{size} processes cannot share {word}", hint="use --device cuda: each process gets its own")
    # NVLink multicast fails in many containers; two GPUs reach 1.94 times one without it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    on_gpu = device.type == "cuda"
    world = World(device, rank, size, int(os.environ.get("LOCAL_RANK", "0")), local_world_size())
    if torch.distributed.is_initialized():  # by the launcher, which also terminates it
        yield world
        return
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo", device_id=device if on_gpu else None, timeout=_TIMEOUT
    )
    preparation = torch.distributed.new_group(backend="gloo", timeout=_PREPARE_TIMEOUT)
    is_well = False
    try:
        yield replace(world, preparation=preparation)
        is_well = True
    finally:
        # NCCL destroys communicators collectively, so a failed process would wait for the others, and they for what
        # it will never send. When it exits, torchrun terminates them all.
        if is_well or not on_gpu:
            torch.distributed.destroy_process_group()
