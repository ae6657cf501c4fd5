"""NVFP4 in its two layouts: Hugging Face checkpoints and GGUF blocks; lossless in both directions.

A group is 16 4-bit floats (E2M1) with one scale, an 8-bit float (E4M3):

    Hugging Face   two tensors: 8 bytes per group, values 2j (low half) and 2j + 1 in byte j; 1 scale byte per group
    GGUF           36 bytes for four groups: their scales, then values j (low half) and j + 8 of each group in byte j
"""

from __future__ import annotations

from aprfmt.codecs.mxfp4 import as_halves, as_pairs
from aprfmt.codecs.stream import blocks as parts
from aprfmt.errors import CorruptError
from aprfmt.io.source import Buffer

GROUP = 16
"""Values per scale."""
SCALES, CODES, BLOCK_BYTES = 4, 32, 36
"""Bytes of a GGUF block: its scales, its codes, both."""

_STEP = 1 << 12


def pack(codes: Buffer, scales: Buffer) -> bytes:
    """Packs whole groups of a checkpoint into GGUF blocks, four per block; the sign of a scale is dropped.

    Raises CorruptError if the sizes do not match.
    """
    import numpy as np

    pairs, scale = np.frombuffer(codes, dtype="u1"), np.frombuffer(scales, dtype="u1")
    if pairs.size * SCALES != scale.size * CODES or scale.size % SCALES:
        raise CorruptError(f"{pairs.size} bytes of NVFP4 codes do not match {scale.size} scales in blocks of {SCALES}")
    pairs = pairs.reshape(-1, SCALES, 8)
    out = np.empty((len(pairs), BLOCK_BYTES), dtype="u1")
    out[:, :SCALES] = scale.reshape(-1, SCALES) & 0x7F
    for part in parts(len(pairs), _STEP):
        out[part, SCALES:] = as_halves(pairs[part]).reshape(-1, CODES)
    return out.tobytes()


def unpack(blocks: Buffer) -> tuple[bytes, bytes]:
    """Unpacks whole GGUF blocks into (codes, scales). Raises CorruptError for a partial block."""
    import numpy as np

    stored = np.frombuffer(blocks, dtype="u1")
    if stored.size % BLOCK_BYTES:
        raise CorruptError(f"{stored.size} bytes are not a multiple of the NVFP4 block size, {BLOCK_BYTES}")
    stored = stored.reshape(-1, BLOCK_BYTES)
    out = np.empty((len(stored), SCALES, 8), dtype="u1")
    for part in parts(len(stored), _STEP):
        out[part] = as_pairs(stored[part, SCALES:].reshape(-1, SCALES, 8))
    return out.tobytes(), stored[:, :SCALES].tobytes()
