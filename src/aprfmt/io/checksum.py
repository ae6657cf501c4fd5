"""CRC-32 of a stretch of a file: parts side by side, each through one small buffer that stays in the cache.

Reading keeps resident memory small, and a file that is cut short meanwhile raises; a mapping would do neither.
"""

from __future__ import annotations

import threading

from aprfmt.io.crc import combine, crc32
from aprfmt.io.source import Source
from aprfmt.io.system import n_processors

_PART_BYTES = 8 << 20
_BUFFER_BYTES = 512 << 10
_MOST_THREADS = 4  # two or three take all of the memory's speed


def crc32_of_range(source: Source, start: int, end: int) -> int:
    """CRC-32 of the bytes [start, end). Raises TruncatedError, StorageError."""
    line = _Line(source, start, end)
    n_threads = min(_MOST_THREADS, n_processors(), line.n_parts)
    others = [
        threading.Thread(target=line.work, name=f"apr-crc-{i}", daemon=True) for i in range(1, n_threads)
    ]
    for thread in others:
        thread.start()
    try:
        line.work()
        for thread in others:
            thread.join()
    finally:
        line.is_over = True  # after Ctrl-C: the others stop at their next piece
    if line.error is not None:
        raise line.error
    value = 0
    for part, crc in enumerate(line.values):
        value = combine(value, crc, len(line.part(part)))
    return value


class _Line:
    """The parts of the stretch, and what the threads found."""

    def __init__(self, source: Source, start: int, end: int) -> None:
        self.source = source
        self.stretch = range(start, end)
        self.n_parts = -(-len(self.stretch) // _PART_BYTES)
        self.values = [0] * self.n_parts
        self.error: BaseException | None = None
        self.is_over = False
        self._next = iter(range(self.n_parts))
        self._taking = threading.Lock()

    def part(self, number: int) -> range:
        """Its bytes."""
        return self.stretch[number * _PART_BYTES : (number + 1) * _PART_BYTES]

    def _take(self) -> int | None:
        with self._taking:
            return next(self._next, None)

    def work(self) -> None:
        """Takes parts until none is left."""
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, len(self.stretch))))
        try:
            while (number := self._take()) is not None:
                part, crc = self.part(number), 0
                for start in range(part.start, part.stop, _BUFFER_BYTES):
                    if self.is_over:
                        return
                    view = buffer[: part.stop - start]
                    self.source.read_into(start, view)
                    crc = crc32(view, crc)
                self.values[number] = crc
        except Exception as error:
            self.error = error
            self.is_over = True
