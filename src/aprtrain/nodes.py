"""Several nodes without a shared folder: what the first process has on its disk, each other node fetches once.

A node's first process compares and writes; the bytes take the way that gradients take. Where nodes do share a folder,
the files are there already and nothing is fetched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from aprfmt.errors import AprError, RunError, storage_errors
from aprfmt.io.sink import AtomicFile
from aprfmt.io.source import Source
from aprtrain.world import ToldByFirst, World

_EDGE = 1 << 20  # bytes at both ends of a file that tell it from others of its size
_PIECE = 64 << 20


def fetch(names: Sequence[str], source: Path, folder: Path, world: World) -> list[Path]:
    """Puts the files `names` of the first process's `source` into every other node's `folder`; all take part.

    Gives the files that this process wrote. What the first process lacks is fetched by nobody. Raises RunError in all
    processes where one could not write.
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
        except AprError as failure:  # at its end: the others are still sending and receiving
            error = error or failure
    if world.any(error is not None):
        raise error or RunError("another node could not fetch its files") from ToldByFirst()
    return [folder / name for name in names if name in lacking]


def _identity(path: Path) -> tuple[int, str] | None:
    """Size, and a hash of both ends; None where there is no such file."""
    with storage_errors(path):
        if not path.is_file():
            return None
    with Source.open(path) as file:
        ends = file.read(0, min(_EDGE, file.size)), file.read(max(0, file.size - _EDGE), min(_EDGE, file.size))
        return file.size, hashlib.sha256(b"".join(ends)).hexdigest()


def _transfer(source: Path, target: Path | None, n_bytes: int, world: World) -> None:
    """Sends a file from the first process; `target` is where this one puts it. Raises once all of it has passed."""
    error: AprError | None = None
    with ExitStack() as stack:
        sink, file = None, stack.enter_context(Source.open(source)) if world.is_first else None
        try:
            if target is not None:
                with storage_errors(target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                sink = stack.enter_context(AtomicFile(target, force=True, n_bytes=n_bytes))
        except AprError as failure:
            error = failure
        for start in range(0, n_bytes, _PIECE):
            piece = torch.empty(min(_PIECE, n_bytes - start), dtype=torch.uint8)
            if file is not None:
                piece.copy_(torch.frombuffer(bytearray(file.read(start, len(piece))), dtype=torch.uint8))
            piece = world.from_first(piece)
            if sink is not None and error is None:
                try:
                    sink.write(piece.numpy().data)
                except AprError as failure:
                    error = failure
        if error is not None:
            raise error
