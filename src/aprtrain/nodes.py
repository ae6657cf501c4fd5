"""Several nodes without a shared folder: each node fetches the first process's files once.

A node's first process compares and writes; the bytes use the same transport as gradients. If nodes share a folder, the
files are already present and nothing is fetched.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from aprfmt.errors import AprError, storage_errors
from aprfmt.io.sink import AtomicFile
from aprfmt.io.source import Source
from aprtrain.world import World

_EDGE = 1 << 20  # bytes at both ends of a file that identify it among files of its size
_PIECE = 64 << 20


def fetch(names: Sequence[str], source: Path, folder: Path, world: World) -> list[Path]:
    """Copies the files `names` of the first process's `source` into every other node's `folder`. Collective.

    Returns the files that this process wrote. Files that the first process lacks are skipped. If one process cannot
    read or write, all raise its error.
    """
    if world.is_one_node:
        return []
    mine = {name: told for name in names if world.is_first and (told := _identity(source / name)) is not None}
    offered = world.gather(mine)[0]
    writes = world.is_local_first and not world.is_first
    lacking = {name for name, told in offered.items() if writes and _identity(folder / name) != told}
    wanted = set().union(*world.gather(lacking))
    error: AprError | None = None
    for name in (name for name in names if name in wanted):
        try:
            _transfer(source / name, folder / name if name in lacking else None, offered[name][0], world)
        except AprError as found:  # raised at the end: the others are still sending and receiving
            error = error or found
    if (failure := world.first_error(error)) is not None:
        raise failure
    return [folder / name for name in names if name in lacking]


def _identity(path: Path) -> tuple[int, str] | None:
    """Size, and a hash of both ends; None if missing."""
    with storage_errors(path):
        if not path.is_file():
            return None
    with Source.open(path) as file:
        ends = file.read(0, min(_EDGE, file.size)), file.read(max(0, file.size - _EDGE), min(_EDGE, file.size))
        return file.size, hashlib.sha256(b"".join(ends)).hexdigest()


def _transfer(source: Path, target: Path | None, n_bytes: int, world: World) -> None:
    """Sends a file from the first process to `target` here. Raises only after the whole transfer."""
    with ExitStack() as stack:
        file = stack.enter_context(Source.open(source)) if world.is_first else None
        pieces = (_sent(file, start, min(_PIECE, n_bytes - start), world) for start in range(0, n_bytes, _PIECE))
        try:
            if target is not None:
                with storage_errors(target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                with AtomicFile(target, force=True, n_bytes=n_bytes) as sink:
                    for piece in pieces:
                        sink.write(piece.numpy().data)
        finally:
            deque(pieces, maxlen=0)  # the others are still sending and receiving


def _sent(file: Source | None, start: int, n_bytes: int, world: World) -> Tensor:
    """A chunk of the first process's file, received here."""
    piece = torch.empty(n_bytes, dtype=torch.uint8)
    if file is not None:
        piece.copy_(torch.frombuffer(bytearray(file.read(start, n_bytes)), dtype=torch.uint8))
    return world.broadcast(piece)
