"""MXFP4: Hugging Face pieces and GGUF rows hold the same values, and every byte comes back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from aprfmt.codecs import mxfp4
from aprfmt.errors import CorruptError

gguf = pytest.importorskip("gguf.quants")


def _pieces(n: int, seed: int = 0) -> tuple[bytes, bytes]:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n, 16), dtype="u1")
    scales = rng.integers(118, 136, n, dtype="u1")
    return blocks.tobytes(), scales.tobytes()


def _from_gguf(rows: bytes) -> Any:
    from gguf import GGMLQuantizationType

    stored = np.frombuffer(rows, dtype="u1").reshape(1, -1)
    return gguf.dequantize(stored, GGMLQuantizationType.MXFP4).reshape(-1)


def test_a_block_byte_by_byte() -> None:
    """Values 0..15 and 15..0: each layout puts its pairs into bytes of its own."""
    blocks = bytes([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, 0xEF, 0xCD, 0xAB, 0x89, 0x67, 0x45, 0x23, 0x01])
    row = bytes([127, 0xF0, 0xE1, 0xD2, 0xC3, 0xB4, 0xA5, 0x96, 0x87, 0x78, 0x69, 0x5A, 0x4B, 0x3C, 0x2D, 0x1E, 0x0F])
    assert mxfp4.pack(blocks, bytes([127])) == row
    assert mxfp4.unpack(row) == (blocks, bytes([127]))


@pytest.mark.parametrize("n", [0, 1, 7, 5000])
def test_every_byte_comes_back(n: int) -> None:
    blocks, scales = _pieces(n)
    rows = mxfp4.pack(blocks, scales)
    assert len(rows) == 17 * n
    assert mxfp4.unpack(rows) == (blocks, scales)
    assert mxfp4.pack(*mxfp4.unpack(rows)) == rows


def test_chunks_of_whole_blocks_make_the_same_bytes() -> None:
    blocks, scales = _pieces(9000, seed=1)
    cuts = [0, 1, 4096, 4097, 9000]
    chunks = [mxfp4.pack(blocks[16 * a : 16 * b], scales[a:b]) for a, b in pairwise(cuts)]
    assert b"".join(chunks) == mxfp4.pack(blocks, scales)


def test_the_values_are_those_of_gguf_and_of_the_definition() -> None:
    blocks, scales = _pieces(300, seed=2)
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype="f4")
    packed = np.frombuffer(blocks, dtype="u1").reshape(-1, 16)
    values = codes[np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, 32)]
    values = values * np.exp2(np.frombuffer(scales, dtype="u1").astype("f4") - 127)[:, None]
    np.testing.assert_array_equal(_from_gguf(mxfp4.pack(blocks, scales)), values.reshape(-1))


def test_the_values_are_those_of_transformers() -> None:
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = _pieces(2 * 6 * 3, seed=3)
    decoded = convert_moe_packed_tensors(
        torch.tensor(np.frombuffer(blocks, dtype="u1").reshape(2, 6, 3, 16).copy()),
        torch.tensor(np.frombuffer(scales, dtype="u1").reshape(2, 6, 3).copy()),
        dtype=torch.float32,
    )
    # transformers hands out [experts, in, out] of the stored [experts, out, in].
    ours = _from_gguf(mxfp4.pack(blocks, scales)).reshape(2, 6, 96)
    np.testing.assert_array_equal(decoded.transpose(1, 2).numpy(), ours)


def test_pieces_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CorruptError, match="17 bytes of MXFP4 values do not match 1 scales"):
        mxfp4.pack(bytes(17), bytes(1))
    with pytest.raises(CorruptError, match="18 bytes are not a multiple of the MXFP4 block size, 17"):
        mxfp4.unpack(bytes(18))
