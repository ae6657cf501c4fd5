"""GGML blocks for tests of the kernels: random ones, and those at the ends of what a block can hold."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from aprtrain.network.decoder import Decoder
from aprtrain.teacher.teacher import BlocksDecoder

Array = np.ndarray[Any, Any]

SCALES = {"Q4_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,)}
"""Where the f16 scales of a block lie."""

BYTES = {"Q4_K": 144, "Q6_K": 210, "Q8_0": 34}

_HALVES = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF)
"""Zeros, smallest and largest subnormal, smallest normal, one, largest of both signs."""


def random_blocks(dtype: str, n: int, seed: int, size: float | None = None) -> Array:
    """[n, bytes of a block], every byte random; scales finite, or of about `size` (of both signs)."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (n, BYTES[dtype]), dtype=np.uint8)
    for at in SCALES[dtype]:
        if size is None:
            half = random.integers(0, 0x10000, n).astype("<u2")
            half[(half & 0x7C00) == 0x7C00] ^= 0x0400
        else:
            half = (random.choice([-size, size], n) * random.uniform(0.5, 1, n)).astype("<f2").view("<u2")
        blocks[:, at : at + 2] = half[:, None].view("u1")
    return blocks


def edge_blocks(dtype: str) -> Array:
    """Each extreme scale with codes and inner scales of all zeros, all ones, one bit set."""
    fills = [np.full(BYTES[dtype], byte, dtype=np.uint8) for byte in (0, 255, 0x80, 0x7F, 0xF0, 0x0F, 0x55)]
    places = SCALES[dtype]
    found = []
    for fill, halves in product(fills, product(_HALVES, repeat=len(places))):
        block = fill.copy()
        for at, half in zip(places, halves, strict=True):
            block[at : at + 2] = np.array([half], dtype="<u2").view("u1")
        found.append(block)
    return np.stack(found)


def resident_bytes(decoder: Decoder) -> int:
    """Bytes of all that a teacher's network holds between batches, what is shared counted once."""
    tensors = [parameter.detach() for parameter in decoder.parameters() if parameter.device.type != "meta"]
    tensors += [part for block in decoder.blocks for value in vars(block).values() for part in _tensors(value)]
    if isinstance(decoder, BlocksDecoder):
        tensors += [blocks.stored_B for parts in decoder.stored.values() for blocks in parts]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _tensors(value: object) -> list[Tensor]:
    """The tensors of an Fp8Weight, which is an attribute where a bf16 weight is a parameter."""
    return [part for part in value if isinstance(part, Tensor)] if isinstance(value, tuple) else []
