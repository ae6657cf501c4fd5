"""MXFP4 in its two layouts: Hugging Face checkpoints and GGUF rows; lossless in both directions.

A block is 32 4-bit values with one scale, a power of two with the bias 127 in a byte (E8M0):

    Hugging Face   two tensors: 16 bytes per block, values 2j (low half) and 2j + 1 in byte j; 1 scale byte per block
    GGUF           17 bytes per block: the scale, then values j (low half) and j + 16 in byte j
"""

from __future__ import annotations

from aprfmt.codecs.stream import blocks as parts
from aprfmt.errors import CorruptError
from aprfmt.io.source import Buffer
from aprfmt.types import Array

PIECE_BYTES, SCALE_BYTES, ROW_BYTES = 16, 1, 17
"""Bytes per block: values and scale in a checkpoint, both in a GGUF row."""

_STEP = 1 << 12


def as_halves(pairs: Array) -> Array:
    """Converts bytes with 4-bit values 2j and 2j + 1 to bytes with values j and j + n; the last axis has n bytes, a
    block.
    """
    import numpy as np

    first, second = np.split(pairs, 2, axis=-1)
    out = np.empty_like(pairs)
    out[..., 0::2] = first & 0x0F | second << 4
    out[..., 1::2] = first >> 4 | second & 0xF0
    return out


def as_pairs(halves: Array) -> Array:
    """The inverse of as_halves."""
    import numpy as np

    even, odd = halves[..., 0::2], halves[..., 1::2]
    return np.concatenate((even & 0x0F | odd << 4, even >> 4 | odd & 0xF0), axis=-1)


def pack(blocks: Buffer, scales: Buffer) -> bytes:
    """Packs whole Hugging Face blocks into GGUF blocks, in order. Raises CorruptError if the sizes do not match."""
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
        out[part, SCALE_BYTES:] = as_halves(values[part])
    return out.tobytes()


def unpack(rows: Buffer) -> tuple[bytes, bytes]:
    """Unpacks whole GGUF blocks into (values, scales) of a checkpoint. Raises CorruptError for a partial block."""
    import numpy as np

    stored = np.frombuffer(rows, dtype="u1")
    if stored.size % ROW_BYTES:
        raise CorruptError(f"{stored.size} bytes are not a multiple of the MXFP4 block size, {ROW_BYTES}")
    stored = stored.reshape(-1, ROW_BYTES)
    out = np.empty((len(stored), PIECE_BYTES), dtype="u1")
    for part in parts(len(stored), _STEP):
        out[part] = as_pairs(stored[part, SCALE_BYTES:])
    return out.tobytes(), stored[:, 0].tobytes()
