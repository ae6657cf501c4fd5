"""MXFP4 in the two layouts that files have: pieces of Hugging Face checkpoints, rows of GGUF. No value changes.

A block is 32 4-bit values under one scale, a power of two with the bias 127 in a byte (E8M0):

    Hugging Face   two tensors: 16 bytes a block, values 2j (low half) and 2j + 1 in byte j; 1 byte a block, the scale
    GGUF           17 bytes a block: the scale, then values j (low half) and j + 16 in byte j
"""

from __future__ import annotations

from aprfmt.codecs.stream import blocks as parts
from aprfmt.errors import CorruptError
from aprfmt.io.source import Buffer

PIECE_BYTES, SCALE_BYTES, ROW_BYTES = 16, 1, 17
"""Bytes of a block: in the piece with the values, in the piece with the scales, in a GGUF row."""

_STEP = 1 << 12


def pack(blocks: Buffer, scales: Buffer) -> bytes:
    """The GGUF blocks of whole Hugging Face blocks, in order. Raises CorruptError where the pieces do not fit."""
    import numpy as np

    values, scale = np.frombuffer(blocks, dtype="u1"), np.frombuffer(scales, dtype="u1")
    if values.size != scale.size * PIECE_BYTES:
        raise CorruptError(
            f"{values.size} bytes of MXFP4 values do not match {scale.size} scales",
            hint=f"one scale covers {PIECE_BYTES} bytes",
        )
    values = values.reshape(-1, PIECE_BYTES)
    out = np.empty((scale.size, ROW_BYTES), dtype="u1")
    out[:, 0] = scale
    for part in parts(scale.size, _STEP):
        first, second = values[part, :8], values[part, 8:]
        out[part, 1::2] = first & 0x0F | second << 4
        out[part, 2::2] = first >> 4 | second & 0xF0
    return out.tobytes()


def unpack(rows: Buffer) -> tuple[bytes, bytes]:
    """The Hugging Face pieces (values, scales) of whole GGUF blocks. Raises CorruptError for a part of a block."""
    import numpy as np

    stored = np.frombuffer(rows, dtype="u1")
    if stored.size % ROW_BYTES:
        raise CorruptError(f"{stored.size} bytes are not whole MXFP4 blocks of {ROW_BYTES}")
    stored = stored.reshape(-1, ROW_BYTES)
    out = np.empty((len(stored), PIECE_BYTES), dtype="u1")
    for part in parts(len(stored), _STEP):
        even, odd = stored[part, 1::2], stored[part, 2::2]
        out[part, :8] = even & 0x0F | odd << 4
        out[part, 8:] = even >> 4 | odd & 0xF0
    return out.tobytes(), stored[:, 0].tobytes()
