"""A cache of the most recently used values."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class RecentValues(Generic[_K, _V]):
    """Keeps the `most` most recently used values. Thread-safe; other threads wait while a value is computed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[_K, _V] = {}
        self._lock = Lock()

    def get(self, key: _K, compute: Callable[[], _V]) -> _V:
        """The value of `key`, computed if it is not kept."""
        with self._lock:
            value = self._held.pop(key) if key in self._held else compute()
            self._held[key] = value
            if len(self._held) > self._most:
                del self._held[next(iter(self._held))]
            return value
