"""Hidden states of windows in files that threads and processes share, each window with a checksum.

    PART.states     window after window [T, D], as they were computed: bf16, or float32; holes where none are kept
    PART.sums       8 bytes a window: 0 where none are kept, else 2^32 + the CRC-32 of its states, begun at its number

A window's sum is written behind its states and compared whenever they are read. So a process may be killed at any
moment, the power may fail, several processes may write the same files: what does not agree is missing.

Shape suffixes: T positions, D width of the states.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aprfmt.errors import storage_error
from aprfmt.io.crc import crc32

__all__ = ["Store"]

_KEPT = 1 << 32
_SUM_BYTES = 8


class Store:
    """The states of the windows of one part, in two files that several processes may have open.

    Attributes:
        size: T and D.
        dtype: of the states.
        window_bytes: bytes of a window's states.
        writes: whether windows may be added.
        lost: whether the file of states was shorter than it should be, and all windows are missing for that.
    """

    def __init__(
        self,
        folder: Path,
        part: str,
        n: int,
        size: tuple[int, int],
        dtype: torch.dtype,
        *,
        writes: bool = True,
    ) -> None:
        """Opens the states of `n` windows, or makes room for them. Raises NotFoundError, StorageError."""
        self.size = size
        self.dtype = dtype
        self.window_bytes = size[0] * size[1] * dtype.itemsize
        self.writes = writes
        self._n = n
        self._states, is_short = _opened(folder / f"{part}.states", n * self.window_bytes, writes)
        self._sums, _ = _opened(folder / f"{part}.sums", n * _SUM_BYTES, writes)
        self.lost = writes and is_short and bool(self.kept().any())
        if self.lost:
            os.ftruncate(self._sums, 0)
            os.ftruncate(self._sums, n * _SUM_BYTES)

    def __len__(self) -> int:
        return self._n

    def kept(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Of which windows [n] there are states."""
        data = _pread(self._sums, self._n * _SUM_BYTES, 0)
        sums = np.frombuffer(data.ljust(self._n * _SUM_BYTES, b"\0"), "<u8")
        found: np.ndarray[Any, np.dtype[np.bool_]] = sums != 0
        return found

    def has(self, windows: Iterable[int]) -> bool:
        """Whether there are states of all these windows; negative ones, which are empty, need none."""
        return all(i < 0 or self._sum(i) for i in windows)

    def read(self, window: int, out_TD: Tensor) -> bool:
        """Fills `out_TD`, contiguous in main memory; False where the states are missing or damaged.

        Damaged ones are missing from then on.
        """
        data = _bytes(out_TD)
        with suppress(OSError):
            n = os.preadv(self._states, [data], window * self.window_bytes)
            if n == len(data) and _sum_of(window, data) == self._sum(window):
                return True
            if self.writes:
                os.pwrite(self._sums, bytes(_SUM_BYTES), window * _SUM_BYTES)
        return False

    def write(self, window: int, states_TD: Tensor) -> None:
        """Adds the states of a window, in main memory. Raises OSError."""
        data = _bytes(states_TD)
        assert len(data) == self.window_bytes
        start, done = window * self.window_bytes, 0
        while done < len(data):
            done += os.pwrite(self._states, data[done:], start + done)
        os.pwrite(self._sums, _sum_of(window, data).to_bytes(_SUM_BYTES, "little"), window * _SUM_BYTES)

    def close(self) -> None:
        """Closes the files."""
        os.close(self._states)
        os.close(self._sums)

    def _sum(self, window: int) -> int:
        data = _pread(self._sums, _SUM_BYTES, window * _SUM_BYTES)
        return int.from_bytes(data, "little")


def _opened(path: Path, n_bytes: int, writes: bool) -> tuple[int, bool]:
    """The file, and whether it was too short; it has `n_bytes` bytes then."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY, 0o666)
        size = os.fstat(file).st_size
        if writes and size != n_bytes:
            os.ftruncate(file, n_bytes)
    except OSError as error:
        raise storage_error(error, path) from error
    return file, size < n_bytes


def _pread(file: int, n_bytes: int, start: int) -> bytes:
    """What there is; nothing where it cannot be read."""
    try:
        return os.pread(file, n_bytes, start)
    except OSError:
        return b""


def _bytes(states_TD: Tensor) -> memoryview:
    flat: Any = states_TD.view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _sum_of(window: int, data: memoryview) -> int:
    return _KEPT | crc32(data, window & 0xFFFFFFFF)
