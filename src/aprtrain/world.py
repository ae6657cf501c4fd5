"""The processes of a run: one, or those that torchrun started, each with a whole student and its part of a batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from aprfmt.errors import MissingDependencyError, UsageError


@dataclass(frozen=True, slots=True)
class World:
    """This process: its device, its rank, how many there are."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes and speaks for all."""
        return self.rank == 0

    def add_up(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all processes, in every process the same bits."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)

    def barrier(self) -> None:
        """Waits for the other processes."""
        if self.size > 1:
            torch.distributed.barrier()


def device_of(word: str, local_rank: int = 0) -> torch.device:
    """The device that `word` ("cuda", "cuda:N", "cpu") names; there is no fallback.

    Raises MissingDependencyError (exit 6) when it is not there, UsageError for other words.
    """
    try:
        device = torch.device(word)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cuda", "cpu"):
        raise UsageError(f"--device is cuda, cuda:N or cpu, not {word!r}")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            "no CUDA device is available",
            hint="check nvidia-smi and the torch build; --device cpu trains on the CPU",
        )
    index = local_rank if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise MissingDependencyError(
            f"there is no cuda:{index}; {torch.cuda.device_count()} devices are visible"
        )
    return torch.device("cuda", index)


@contextmanager
def joined(word: str) -> Iterator[World]:
    """The world that torchrun's variables describe, or a world of one. Raises as `device_of`."""
    # torchrun sets these.
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = device_of(word, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        yield World(device)
        return
    if device.type == "cuda" and torch.device(word).index is not None:
        raise UsageError(f"{size} processes cannot share {word}", hint="--device cuda gives each its own")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    on_gpu = device.type == "cuda"
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        yield World(device, rank, size)
    finally:
        torch.distributed.destroy_process_group()
