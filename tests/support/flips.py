"""Single bits of files that turn over: which ones are tried, and a file with one of them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_EDGE = 4096  # bytes at either end, where headers and footers stand


def draw(files: list[Path], n: int, seed: int = 0) -> Iterator[tuple[Path, int]]:
    """`n` pairs (file, bit): every file as often as any other, half of the bits near the ends of their file."""
    rng = random.Random(seed)
    for i in range(n):
        path = files[i % len(files)]
        size = path.stat().st_size
        edge = min(size, _EDGE)
        byte = rng.choice((rng.randrange(edge), size - 1 - rng.randrange(edge))) if i % 4 < 2 else rng.randrange(size)
        yield path, 8 * byte + rng.randrange(8)


def flip(path: Path, bit: int) -> None:
    """Turns over a bit of a file, counted from its beginning."""
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, bit // 8)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """A file with one bit turned over, while the block runs; its time of modification stays."""
    stat = path.stat()
    flip(path, bit)
    try:
        yield
    finally:
        flip(path, bit)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
