"""Reversible row moves on raw tensor bytes: whole rows change places, so quantised blocks lose nothing."""

from __future__ import annotations

from aprfmt.errors import RefusedError
from aprfmt.io.source import Buffer

INVERSE = {"rope_permute": "rope_unpermute", "rope_unpermute": "rope_permute"}
"""Each move and the one that undoes it; `rope_permute` goes from Hugging Face order to GGUF order."""


def move_group(name: str, n_rows: int, n_heads: int) -> int:
    """Rows that a move shuffles among themselves: a head. Raises RefusedError where they do not divide."""
    if n_heads <= 0 or n_rows % n_heads or n_rows // n_heads % 2:
        raise RefusedError(f"{n_rows} rows do not divide into {n_heads} heads of even size, as {name} needs")
    return n_rows // n_heads


def apply_move(name: str, chunk: Buffer, row_bytes: int, head_rows: int) -> bytes:
    """The rows of `chunk` after move `name`.

    Hugging Face rotates the halves of a head against each other: rows (0 .. d/2), (d/2 .. d). GGUF's llama
    rotates neighbours: rows 0, d/2, 1, d/2 + 1, ... So a head viewed as [2, d/2] becomes [d/2, 2], and back.

    Args:
        name: a key of INVERSE.
        chunk: stored bytes of whole heads, any dtype whose rows are `row_bytes` long.
        row_bytes: stored bytes of a row (of an element for biases).
        head_rows: rows a head (head_dim).

    Raises RefusedError where the chunk is not made of whole heads.
    """
    import numpy as np

    n_bytes = memoryview(chunk).nbytes
    if n_bytes == 0:
        return b""
    if row_bytes <= 0 or head_rows <= 0 or head_rows % 2 or n_bytes % (row_bytes * head_rows):
        raise RefusedError(f"{n_bytes} bytes are not whole heads of {head_rows} rows of {row_bytes} bytes")
    halves = (head_rows // 2, 2) if name == "rope_unpermute" else (2, head_rows // 2)
    # A row as one void element: numpy then copies row by row instead of byte by byte.
    rows = np.frombuffer(chunk, dtype=np.dtype((np.void, row_bytes))).reshape(-1, *halves)
    return rows.swapaxes(1, 2).tobytes()
