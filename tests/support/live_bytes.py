"""How many bytes tensors take at most while some code runs, counted at each operation: the same on every machine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages that operations make while it is entered, until they are freed.

    Attributes:
        peak: the most bytes that they took at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {s._cdata for s in map(_storage, tree_leaves((args, kwargs))) if s is not None}
        for storage in map(_storage, tree_leaves(out)):
            if storage is not None and storage._cdata not in self._known | given:
                self._known.add(storage._cdata)
                self._live += storage.nbytes()
                self.peak = max(self.peak, self._live)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return out

    def _freed(self, key: int, n_bytes: int) -> None:
        self._known.discard(key)
        self._live -= n_bytes


def _storage(value: object) -> torch.UntypedStorage | None:
    return value.untyped_storage() if isinstance(value, torch.Tensor) else None
