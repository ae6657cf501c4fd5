"""Several processes in a test: as threads that share memory, or as forks that speak through gloo."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from train_children import forked

from aprtrain.world import World

_MOST_S = 120  # after which a process that waits for another one is ended


@dataclass
class _Arriving:
    """What comes into its place when it is waited for, and not before."""

    place: Tensor
    values: Tensor

    def wait(self) -> None:
        """Puts it there."""
        self.place.copy_(self.values)


class Threads:
    """As many worlds as threads; what they exchange meets in a list.

    Attributes:
        sent: lengths of what was summed in parts, in the order of process 0.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: list[int] = []
        self._meeting = threading.Barrier(size)
        self._brought: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What every process brought, in their order."""
        self._brought[rank] = value.clone() if isinstance(value, Tensor) else value
        self._meeting.wait(30)
        found = list(self._brought)
        self._meeting.wait(30)
        return found

    def run(self, work: Callable[[World], Any]) -> list[Any]:
        """What `work` gives in each of the worlds."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                results[rank] = work(_world(self, rank))
            except BaseException as error:
                errors.append(error)
                self._meeting.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return results


def _world(threads: Threads, rank: int) -> World:
    class Mine(World):
        """One thread's."""

        def gather(self, value: Any) -> list[Any]:
            return [pickle.loads(found) for found in threads.exchange(rank, pickle.dumps(value))]

        def all_reduce(self, tensor: Tensor) -> None:
            tensor.copy_(torch.stack(threads.exchange(rank, tensor)).sum(0))

        def reduce_scatter(self, whole: Tensor) -> Any:
            if rank == 0:
                threads.sent.append(len(whole))
            total = torch.stack(threads.exchange(rank, whole)).sum(0)
            whole.fill_(float("nan"))
            return _Arriving(self.part(whole), self.part(total))

        def all_gather(self, whole: Tensor) -> Any:
            values = torch.cat(threads.exchange(rank, self.part(whole)))
            whole.fill_(float("nan"))
            return _Arriving(whole, values)

    return Mine(torch.device("cpu"), rank, threads.size)


def together(work: Callable[[int], object], size: int = 2) -> None:
    """Does `work(rank)` in forks that are the processes of one run. Fails where one does not end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

    def child(rank: int) -> None:
        signal.alarm(_MOST_S)
        os.environ |= {"WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        try:
            work(rank)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    with ExitStack() as stack:
        children = [stack.enter_context(forked(lambda rank=rank: child(rank))) for rank in range(size)]  # type: ignore[misc]
        assert [one.wait() for one in children] == [0] * size
