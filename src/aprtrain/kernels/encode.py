"""Encodes float32 weights as GGML blocks and decodes them, on the weights' device, for quantization-aware training.

`encode` gives the bytes of aprfmt's codec (`codecs.ggml.encode`, llama.cpp's ggml-quants.c), and `round_trip` the
values that those bytes decode to. On CUDA each type has a Triton kernel; elsewhere torch does the same arithmetic.
Each operation is rounded to float32: a fused multiply-add would give other codes.

Given the step of each block, which `fit_steps` finds, Q4_0 takes the codes nearest on these steps and the scale that
decodes them with the least squared error. So codes do not change because another value of their block did.

Shape suffixes: P values in order, B blocks (or groups with a scale each), E values of one, C bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from aprfmt.codecs.dtypes import DTYPES, Dtype
from aprfmt.errors import UsageError
from aprtrain.features import current, importable

ENCODED = ("Q4_0", "Q8_0", "NVFP4", "MXFP4")
"""Types that are encoded on the device."""

_PIECE = 1 << 20
"""Values per chunk in torch, which allocates a dozen temporary tensors of that size."""

_BELOW_HALF = 0.49999997
"""The largest float32 below 0.5: added before truncation, it rounds halves away from zero, and only them."""

_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Twice the values of E2M1 floats."""


_LEVELS = tuple(8 + 0.15 * i for i in range(-10, 11))
"""Codes at which `fit_steps` tries the value farthest from zero."""


class EncodedBlocks(NamedTuple):
    """Encoded blocks of one type.

    Attributes:
        scale_BC: the stored bytes of the scale, uint8.
        codes_BC: the stored bytes of the codes, uint8.
        values_BE: the decoded values, float32.
    """

    scale_BC: Tensor
    codes_BC: Tensor
    values_BE: Tensor


def encode(dtype: str, values_P: Tensor, steps_B1: Tensor | None = None) -> Tensor:
    """Encodes finite float32 values as blocks of `dtype` (one of ENCODED): uint8 on the same device.

    `steps_B1`: see `fit_steps`; for Q4_0 only.
    """
    row = _check(dtype, values_P, steps_B1)
    out = values_P.new_empty(values_P.numel() // row.block * row.block_bytes, dtype=torch.uint8)
    if uses_triton(values_P.device):
        from aprtrain.kernels.encode_triton import launch

        launch(dtype, values_P, out, GROUPS[dtype], steps_B1)
        return out
    done = 0
    for piece_P, found in _encoded(dtype, values_P, steps_B1):
        # NVFP4 has four scales before the codes of its four groups.
        parts = [part_BC.reshape(piece_P.numel() // row.block, -1) for part_BC in found[:2]]
        stored = torch.cat(parts, 1).view(-1)
        out[done : done + stored.numel()] = stored
        done += stored.numel()
    return out


def round_trip(dtype: str, values_P: Tensor, out_P: Tensor, steps_B1: Tensor | None = None) -> None:
    """Fills `out_P`, float32 or bfloat16, with the values decoded from `encode`; never waits for a GPU."""
    _check(dtype, values_P, steps_B1)
    if out_P.shape != values_P.shape or not out_P.is_contiguous():
        raise UsageError(f"{list(values_P.shape)} values need a contiguous target, not {list(out_P.shape)}")
    if uses_triton(values_P.device):
        from aprtrain.kernels.encode_triton import launch

        launch(dtype, values_P, out_P, GROUPS[dtype], steps_B1)
        return
    for (_, found), target_P in zip(_encoded(dtype, values_P, steps_B1), torch.split(out_P, _PIECE), strict=True):
        target_P.copy_(found.values_BE.view(-1))


def fit_steps(values_P: Tensor) -> Tensor:
    """The step of each Q4_0 block, float32 [B, 1]: of those that bring its largest value to code -6.5 ... -9.5, the
    one whose nearest codes have the least squared error. 0 for blocks of zeros or of values too small for a step.
    """
    _check("Q4_0", values_P, None)
    return torch.cat([_fit_steps(piece_P.view(-1, GROUPS["Q4_0"])) for piece_P in torch.split(values_P, _PIECE)])


def _encoded(dtype: str, values_P: Tensor, steps_B1: Tensor | None) -> Iterator[tuple[Tensor, EncodedBlocks]]:
    """Each piece of the values, and its blocks."""
    group = GROUPS[dtype]
    for start in range(0, values_P.numel(), _PIECE):
        piece_P = values_P[start : start + _PIECE]
        x_BE = piece_P.view(-1, group)
        if steps_B1 is None:
            yield piece_P, _ENCODERS[dtype](x_BE)
        else:
            yield piece_P, _q4_0_on(x_BE, steps_B1[start // group :][: len(x_BE)])


def uses_triton(device: torch.device) -> bool:
    """Whether Triton kernels encode on `device`; records the choice."""
    fused = device.type == "cuda" and current().check("triton", importable("triton"))
    current().use("quantization", "Triton" if fused else "torch")
    return fused


def _check(dtype: str, values_P: Tensor, steps_B1: Tensor | None) -> Dtype:
    row = DTYPES[dtype]
    if steps_B1 is not None and (dtype != "Q4_0" or 32 * steps_B1.numel() != values_P.numel()):
        raise UsageError(f"{steps_B1.numel()} steps do not belong to {values_P.numel()} values of {dtype}")
    if values_P.dtype != torch.float32 or values_P.ndim != 1 or not values_P.is_contiguous():
        raise UsageError(f"{dtype} is made of contiguous float32 values, not of {values_P.dtype}")
    if values_P.numel() % row.block:
        raise UsageError(f"{dtype} stores blocks of {row.block} values, which do not divide {values_P.numel()}")
    return row


# --- in torch ---


def _bytes_of(scale_B1: Tensor) -> Tensor:
    """F16 as two bytes."""
    return scale_B1.contiguous().view(torch.uint8)


def _nibbles(codes_BE: Tensor) -> Tensor:
    """4-bit codes: the first half of a group in the low halves of its bytes, the second half in the high ones."""
    low, high = codes_BE.to(torch.uint8).chunk(2, 1)
    return low | high << 4


def _inverse(scale_B1: Tensor) -> Tensor:
    """1 / scale; 0 for a scale of 0, infinite for one that is too small."""
    return torch.where(scale_B1 == 0, 0, 1 / scale_B1)


def _q4_0(x_BE: Tensor) -> EncodedBlocks:
    """Codes 0 .. 15 are -8 .. 7 times d; the first of the values farthest from zero gets -8."""
    farthest_B1 = x_BE.gather(1, x_BE.abs().argmax(1, keepdim=True)) + 0.0
    d_B1 = farthest_B1 / -8
    codes_BE = x_BE * _inverse(d_B1) + 8.5
    codes_BE = codes_BE.where(codes_BE.isfinite(), 0).trunc_().clamp_(max=15)
    half_B1 = d_B1.half()
    return EncodedBlocks(_bytes_of(half_B1), _nibbles(codes_BE), (codes_BE - 8) * half_B1.float())


def _q4_0_on(x_BE: Tensor, step_B1: Tensor) -> EncodedBlocks:
    """Codes nearest on the given steps, halves upward; d by least squares."""
    codes_BE, d_B1 = _on_steps(x_BE, step_B1)
    half_B1 = d_B1.half()
    return EncodedBlocks(_bytes_of(half_B1), _nibbles(codes_BE + 8), codes_BE * half_B1.float())


def _on_steps(x_BE: Tensor, step_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Codes -8 ... 7 and the scale with which they are nearest to the values; 0 if all codes are 0."""
    codes_BE = (x_BE * _inverse(step_B1)).add_(0.5).floor_().clamp_(-8, 7)
    square_B1 = codes_BE.square().sum(1, keepdim=True)
    return codes_BE, (x_BE * codes_BE).sum(1, keepdim=True) / square_B1.clamp(min=1)


def _fit_steps(x_BE: Tensor) -> Tensor:
    farthest_B1 = x_BE.gather(1, x_BE.abs().argmax(1, keepdim=True))
    best_B1, step_B1 = torch.full_like(farthest_B1, -1), torch.zeros_like(farthest_B1)
    for level in _LEVELS:
        codes_BE, d_B1 = _on_steps(x_BE, farthest_B1 / -level)
        explained_B1 = d_B1 * (x_BE * codes_BE).sum(1, keepdim=True)  # what the error of zeros exceeds this one by
        better_B1 = explained_B1 > best_B1
        best_B1, step_B1 = torch.where(better_B1, explained_B1, best_B1), torch.where(better_B1, d_B1, step_B1)
    return step_B1.where((1 / step_B1).isfinite(), 0)


def _q8_0(x_BE: Tensor) -> EncodedBlocks:
    """Codes -127 .. 127 times d, halves away from zero."""
    d_B1 = x_BE.abs().amax(1, keepdim=True) / 127
    inverse_B1 = _inverse(d_B1)
    codes_BE = x_BE * inverse_B1.where(inverse_B1.isfinite(), 0)
    codes_BE += torch.full((), _BELOW_HALF, device=x_BE.device).copysign(codes_BE)
    codes_BE.trunc_()
    half_B1 = d_B1.half()
    return EncodedBlocks(_bytes_of(half_B1), codes_BE.to(torch.int8).view(torch.uint8), codes_BE * half_B1.float())


def _nearest(x_BE: Tensor, half_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 4-bit floats, each the first of the nearest, and their values; `half_B1` is half the scale."""
    size_BE = x_BE.abs()
    best_BE, index_BE = size_BE.clone(), torch.zeros_like(x_BE, dtype=torch.uint8)
    value_BE = torch.zeros_like(x_BE)
    for i, known in enumerate(_E2M1[1:], 1):
        known_B1 = half_B1 * known
        error_BE = (known_B1 - size_BE).abs_()
        closer_BE = error_BE < best_BE
        best_BE = torch.where(closer_BE, error_BE, best_BE)
        index_BE.masked_fill_(closer_BE, i)
        value_BE = torch.where(closer_BE, known_B1, value_BE)
    negative_BE = x_BE.signbit() & (index_BE != 0)
    return index_BE | negative_BE.to(torch.uint8) << 3, torch.where(negative_BE, -value_BE, value_BE)


def _nvfp4(x_BE: Tensor) -> EncodedBlocks:
    """Groups of 16 under an unsigned e4m3 float, which brings the largest value to 6; from 248 on it is 448."""
    scale_B1 = (x_BE.abs().amax(1, keepdim=True) / 6).clamp_(max=448)
    bits_B1 = scale_B1.view(torch.int32)
    exponent_B1 = (bits_B1 >> 23) - 120
    # The mantissa rounded to 3 bits; a carry goes into the exponent by itself.
    normal_B1 = (exponent_B1 << 3) + (bits_B1 >> 20 & 7) + (bits_B1 >> 19 & 1)
    normal_B1 = normal_B1.where(normal_B1 < 0x78, 0x7E)
    small_B1 = (scale_B1 * 512 + 0.5).clamp_(max=7).to(torch.int32)
    code_B1 = torch.where(exponent_B1 <= 0, small_B1, normal_B1)
    exponent_B1, mantissa_B1 = code_B1 >> 3, code_B1 & 7
    normal_B1 = (exponent_B1 + 119 << 23 | mantissa_B1 << 20).view(torch.float32)
    half_B1 = torch.where(exponent_B1 > 0, normal_B1, mantissa_B1 * 2.0**-10)
    codes_BE, values_BE = _nearest(x_BE, half_B1)
    return EncodedBlocks(code_B1.to(torch.uint8), _nibbles(codes_BE), values_BE)


def _mxfp4(x_BE: Tensor) -> EncodedBlocks:
    """Groups of 32 under a power of two, a quarter of that of the largest value; log2 is rounded to float32."""
    most_B1 = x_BE.abs().amax(1, keepdim=True)
    power_B1 = most_B1.double().log2_().float().floor_().clamp_(min=-149).to(torch.int32) + 125
    code_B1 = power_B1.where(most_B1 > 0, 0) & 255  # wraps below 2^-125, as in C
    bits_B1 = torch.where(code_B1 < 2, 0x00200000 << code_B1.clamp(max=1), code_B1 - 1 << 23)
    codes_BE, values_BE = _nearest(x_BE, bits_B1.to(torch.int32).view(torch.float32))
    return EncodedBlocks(code_B1.to(torch.uint8), _nibbles(codes_BE), values_BE)


GROUPS = {"Q4_0": 32, "Q8_0": 32, "NVFP4": 16, "MXFP4": 32}
"""Values under one scale."""

_ENCODERS: dict[str, Callable[[Tensor], EncodedBlocks]] = {
    "Q4_0": _q4_0,
    "Q8_0": _q8_0,
    "NVFP4": _nvfp4,
    "MXFP4": _mxfp4,
}
