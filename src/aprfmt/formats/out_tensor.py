"""A tensor on its way into a container: the input of every writer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from aprfmt.io.pipe import Item, Stream, run_jobs


@dataclass(frozen=True, slots=True)
class OutTensor:
    """Name, dtype, shape (row-major) and the bytes, produced when they are written.

    `chunks()` yields the stored bytes of `dtype` in order, `n_bytes` in all, as buffers or as jobs that produce them;
    it may be called more than once. `held_bytes` of memory are used meanwhile, in addition to the chunks.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int
    chunks: Callable[[], Iterable[Item]]
    held_bytes: int = 0

    def data(self) -> bytes:
        """All bytes at once."""
        return b"".join(map(bytes, run_jobs(self.chunks())))

    def stream(self) -> Stream:
        """The bytes as a segment of a file."""
        return Stream(self.n_bytes, self.chunks, self.name)


def group_by_size(
    tensors: Sequence[OutTensor], max_bytes: int, cost: Callable[[OutTensor], int], first: int = 0, other: int = 0
) -> list[list[OutTensor]]:
    """Groups `tensors` into the files of a sharded model: at least one group, none empty if there are tensors.

    A group ends before the tensor that would make its file exceed `max_bytes`. `cost` gives the bytes of a tensor in a
    file, its index entry included; `first` and `other` are the bytes of the first and each further file without
    tensors.
    """
    groups: list[list[OutTensor]] = [[]]
    size = first
    for tensor in tensors:
        n_bytes = cost(tensor)
        if groups[-1] and size + n_bytes > max_bytes:
            groups.append([])
            size = other
        groups[-1].append(tensor)
        size += n_bytes
    return groups


def dominant_dtype(tensors: Iterable[OutTensor]) -> str:
    """The dtype with the most bytes among the matrices."""
    totals: dict[str, int] = {}
    for tensor in tensors:
        if len(tensor.shape) >= 2:
            totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.n_bytes
    return max(totals, key=lambda d: totals[d], default="F32")
