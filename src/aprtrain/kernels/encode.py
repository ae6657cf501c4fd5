"""Encodes float32 weights as GGML blocks and decodes them, for quantization-aware training.

`encode` gives the bytes of aprfmt's codec (`codecs.ggml.encode`, llama.cpp's ggml-quants.c), and `round_trip` the
values that those bytes decode to. On CUDA each type of ENCODED has a Triton kernel, whose operations are rounded to
float32 one by one: a fused multiply-add would give other codes. Elsewhere the codec itself runs on the host.

Q4_0 is encoded by a rule of our own, on CUDA in Triton, else in torch: given the step of each block, which `fit_steps`
finds, it takes the codes nearest on these steps and the scale that decodes them with the least squared error. So codes
do not change because another value of their block did.

Shape suffixes: P values in order, B blocks, E values of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from aprfmt.codecs import ggml
from aprfmt.codecs.dtypes import DTYPES, Dtype
from aprfmt.errors import UsageError
from aprfmt.io.system import n_processors
from aprfmt.types import Array
from aprtrain.features import current, importable

ENCODED = ("Q4_0", "Q8_0", "NVFP4", "MXFP4")
"""Types that have a kernel."""

STEPPED = "Q4_0"
"""The type that is encoded on given steps."""

_BLOCK = 32
"""Values of a block of STEPPED."""

_PIECE = 1 << 20
"""Values per chunk off CUDA: of an encoding job, and of torch's temporary tensors."""

_LEVELS = tuple(8 + 0.15 * i for i in range(-10, 11))
"""Codes at which `fit_steps` tries the value farthest from zero."""


def encode(dtype: str, values_P: Tensor, steps_B1: Tensor | None = None) -> Tensor:
    """Encodes finite float32 values as blocks of `dtype`: uint8 on their device, or in main memory if the codec does.

    `steps_B1`: see `fit_steps`; for STEPPED, which needs them. Raises RefusedError for values that the codec refuses.
    """
    row = _check(dtype, values_P, steps_B1)
    if dtype in ENCODED and uses_triton(dtype, values_P.device):
        from aprtrain.kernels.encode_triton import launch

        out = values_P.new_empty(values_P.numel() // row.block * row.block_bytes, dtype=torch.uint8)
        launch(dtype, values_P, out, steps_B1)
        return out
    if steps_B1 is None:
        return torch.from_numpy(encode_on_host(dtype, values_P))
    pieces = _on_given_steps(values_P, steps_B1)
    stored = [torch.cat((d_B1.view(torch.uint8), _nibbles(codes_BE + 8)), 1) for codes_BE, d_B1 in pieces]
    return torch.cat(stored).view(-1)


def round_trip(dtype: str, values_P: Tensor, out_P: Tensor, steps_B1: Tensor | None = None) -> None:
    """Fills `out_P`, float32 or bfloat16, with the values decoded from `encode`; a kernel never waits for the GPU."""
    _check(dtype, values_P, steps_B1)
    if out_P.shape != values_P.shape or not out_P.is_contiguous():
        raise UsageError(f"{list(values_P.shape)} values need a contiguous target, not {list(out_P.shape)}")
    if uses_triton(dtype, values_P.device):
        from aprtrain.kernels.encode_triton import launch

        launch(dtype, values_P, out_P, steps_B1)
        return
    decoded: Iterator[Tensor]
    if steps_B1 is None:
        decoded = (torch.from_numpy(ggml.decode(dtype, stored)) for stored in _pieces_on_host(dtype, values_P))
    else:
        decoded = (codes_BE * d_B1.float() for codes_BE, d_B1 in _on_given_steps(values_P, steps_B1))
    for target_P, found in zip(torch.split(out_P, _PIECE), decoded, strict=True):
        target_P.copy_(found.view(-1))


def uses_triton(dtype: str, device: torch.device) -> bool:
    """Whether a Triton kernel encodes on `device`; records the choice."""
    fused = device.type == "cuda" and current().check("triton", importable("triton"))
    current().use("quantization", "Triton" if fused else "torch" if dtype == STEPPED else "codec")
    return fused


def _check(dtype: str, values_P: Tensor, steps_B1: Tensor | None) -> Dtype:
    row = DTYPES[dtype]
    if values_P.dtype != torch.float32 or values_P.ndim != 1 or not values_P.is_contiguous():
        raise UsageError(f"{dtype} is made of contiguous float32 values, not of {values_P.dtype}")
    if values_P.numel() % row.block:
        raise UsageError(f"{dtype} stores blocks of {row.block} values, which do not divide {values_P.numel()}")
    n_steps = 0 if steps_B1 is None else steps_B1.numel()
    if n_steps != (values_P.numel() // _BLOCK if dtype == STEPPED else 0):
        raise UsageError(f"{n_steps} steps do not belong to {values_P.numel()} values of {dtype}")
    return row


# --- by the codec ---


def encode_on_host(dtype: str, values_P: Tensor) -> Array:
    """Blocks, uint8, by aprfmt's codec, in all threads. Raises RefusedError for NaN and infinity."""
    return np.concatenate([*_pieces_on_host(dtype, values_P)])


def _pieces_on_host(dtype: str, values_P: Tensor) -> Iterator[Array]:
    values = values_P.detach().cpu().numpy()
    with ThreadPoolExecutor(n_processors()) as pool:
        starts = range(0, values.size, _PIECE)
        yield from pool.map(lambda at: ggml.encode(dtype, values[at : at + _PIECE], start=at), starts)


# --- on steps, in torch ---


def fit_steps(values_P: Tensor) -> Tensor:
    """The step of each Q4_0 block, float32 [B, 1]: of those that bring its largest value to code -6.5 ... -9.5, the
    one whose nearest codes have the least squared error. 0 for blocks of zeros or of values too small for a step.
    """
    return torch.cat([_fit_steps(piece_P.view(-1, _BLOCK)) for piece_P in torch.split(values_P, _PIECE)])


def _fit_steps(x_BE: Tensor) -> Tensor:
    farthest_B1 = x_BE.gather(1, x_BE.abs().argmax(1, keepdim=True))
    best_B1, step_B1 = torch.full_like(farthest_B1, -1), torch.zeros_like(farthest_B1)
    for level in _LEVELS:
        codes_BE, d_B1 = _on_steps(x_BE, farthest_B1 / -level)
        explained_B1 = d_B1 * (x_BE * codes_BE).sum(1, keepdim=True)  # what the error of zeros exceeds this one by
        better_B1 = explained_B1 > best_B1
        best_B1, step_B1 = torch.where(better_B1, explained_B1, best_B1), torch.where(better_B1, d_B1, step_B1)
    return step_B1.where((1 / step_B1).isfinite(), 0)


def _on_given_steps(values_P: Tensor, steps_B1: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Codes -8 ... 7 and scales, f16, of a piece of the values at a time."""
    for piece_P, some_B1 in zip(torch.split(values_P, _PIECE), torch.split(steps_B1, _PIECE // _BLOCK), strict=True):
        codes_BE, d_B1 = _on_steps(piece_P.view(-1, _BLOCK), some_B1)
        yield codes_BE, d_B1.half()


def _on_steps(x_BE: Tensor, step_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Codes -8 ... 7 nearest on the steps, halves upward, and the scale with which they are nearest to the values.

    The scale is 0 if all codes are 0.
    """
    inverse_B1 = torch.where(step_B1 == 0, 0, 1 / step_B1)
    codes_BE = (x_BE * inverse_B1).add_(0.5).floor_().clamp_(-8, 7)
    square_B1 = codes_BE.square().sum(1, keepdim=True)
    return codes_BE, (x_BE * codes_BE).sum(1, keepdim=True) / square_B1.clamp(min=1)


def _nibbles(codes_BE: Tensor) -> Tensor:
    """4-bit codes: the first half of a block in the low halves of its bytes, the second half in the high ones."""
    low, high = codes_BE.to(torch.uint8).chunk(2, 1)
    return low | high << 4
