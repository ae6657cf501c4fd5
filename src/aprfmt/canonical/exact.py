"""What an inverse map does not give back to the last bit: kept as differences, so that the way back is exact.

`x + 1` and `-exp(x)` round, and rows that a GGUF has no place for are cut. What the inverse gives differs from the
original in a few last bits; the differences of the stored integers compress to almost nothing.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence

from aprfmt.arch.links import Link
from aprfmt.canonical.rowmap import BufferedPiece, produce
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.pieces import Piece
from aprfmt.codecs.recode import encode
from aprfmt.types import Array

MAX_BYTES = 64 << 20
"""Largest tensor that is looked at; only norms, decays and position tables are of this kind."""

Corrections = dict[str, list[str]]
"""Hugging Face name -> [dtype, base64 of the deflated differences]."""

_FLOATS = ("F32", "F16", "BF16")


def corrections(tensors: Mapping[str, CanonicalTensor], links: Sequence[Link]) -> Corrections:
    """What the tensors of an `.apr` need beside a GGUF with these links, to be had back bit by bit."""
    out: Corrections = {}
    for link in links:
        if not (link.row_map.value or link.row_map.skip) or len(link.hf) != 1:
            continue
        tensor = tensors[link.hf[0]]
        if tensor.dtype not in _FLOATS or tensor.n_bytes > MAX_BYTES:
            continue
        original = _bits(b"".join(bytes(chunk) for chunk in tensor.chunks()), tensor.dtype)
        made = produce([tensor.piece()], link.row_map, 0)
        found = _bits(_inverse(made.piece(tensor.name), link, tensor.dtype), tensor.dtype)
        if not (original == found).all():
            packed = zlib.compress((original - found).tobytes(), 9)
            out[tensor.name] = [tensor.dtype, base64.b64encode(packed).decode()]
    return out


def restore(link: Link, pieces: Sequence[Piece], correction: Sequence[str]) -> Piece | None:
    """The original tensor from that of a GGUF and its correction; None unless it gives that tensor again."""
    try:
        dtype, text = str(correction[0]), str(correction[1])
        n_bytes = DTYPES[dtype].n_bytes(link.row_map.before[0])
        if dtype not in _FLOATS or n_bytes > MAX_BYTES or len(link.hf) != 1:
            return None
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), max(1, n_bytes))
        bits = _bits(_inverse(pieces[0], link, dtype), dtype) + _bits(data, dtype)
    except (ValueError, KeyError, IndexError, zlib.error, binascii.Error):
        return None
    original = bits.tobytes()
    piece = BufferedPiece(link.hf[0], dtype, link.row_map.before[0], lambda: [original])
    again = b"".join(bytes(chunk) for chunk in produce([piece], link.row_map, 0).chunks())
    return piece if again == pieces[0].raw() else None


def _inverse(piece: Piece, link: Link, dtype: str) -> bytes:
    made = produce([piece], link.row_map, 0, inverse=True)
    if made.dtype == dtype:
        return b"".join(bytes(chunk) for chunk in made.chunks())
    return encode(dtype, made.values())


def _bits(data: bytes, dtype: str) -> Array:
    import numpy as np

    return np.frombuffer(data, f"<u{DTYPES[dtype].block_bytes}")
