"""Products of 8-bit floats (e4m3), scaled by row: weights per output channel, activations dynamically per token.

    y[n, o] = (sum_i xq[n, i] * wq[o, i]) * sx[n] * sw[o] + bias[o],    scale = largest |value| of the row / 448

448 is the largest finite e4m3. On CUDA the product runs on the tensor cores by torch._scaled_mm with float32
accumulation; elsewhere the same numbers are multiplied in float32, for tests. A row with NaN or infinity yields no
finite value.

Shape suffixes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from aprtrain.kernels.gated import silu_gated

LARGEST = 448.0

_SMALLEST_SCALE = 1e-12
"""Keeps zero rows zero."""


class Fp8Weight(NamedTuple):
    """The weight of a linear map: data_OI e4m3, scale_O float32, value = data * scale."""

    data_OI: torch.Tensor
    scale_O: torch.Tensor


def fits(rows: int, cols: int) -> bool:
    """Whether the tensor cores support a weight of this size."""
    return rows % 16 == 0 and cols % 16 == 0


def quantize_weight(weight_OI: torch.Tensor, *, rows: int = 1024) -> Fp8Weight:
    """Quantizes a bf16 weight to e4m3 with one scale per output channel, `rows` channels at a time to save memory."""
    data_OI = torch.empty_like(weight_OI, dtype=torch.float8_e4m3fn)
    scale_O = torch.empty(weight_OI.shape[0], dtype=torch.float32, device=weight_OI.device)
    for at in range(0, weight_OI.shape[0], rows):
        part, scale_N1 = _quantize(weight_OI[at : at + rows])
        data_OI[at : at + rows] = part
        scale_O[at : at + rows] = scale_N1[:, 0]
    return Fp8Weight(data_OI, scale_O)


def linear(x: torch.Tensor, weight: torch.Tensor | Fp8Weight, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., I] times the weight [O, I], plus the bias, in the dtype of x; in e4m3 if the weight is."""
    if not isinstance(weight, Fp8Weight):
        return functional.linear(x, weight, bias_O)
    return _product(x, quantize_rows(x.reshape(-1, x.shape[-1])), weight, bias_O)


def gated_linear(both: torch.Tensor, weight: torch.Tensor | Fp8Weight, bias_O: torch.Tensor | None) -> torch.Tensor:
    """`linear` of silu(gate) * up [..., I], for gate and up side by side [..., 2 I]."""
    if not isinstance(weight, Fp8Weight) or not both.is_cuda:
        return linear(silu_gated(both), weight, bias_O)
    return _product(both, _quantize_gated(both.flatten(0, -2)), weight, bias_O)


def _product(
    x: torch.Tensor, quantized: tuple[torch.Tensor, torch.Tensor], weight: Fp8Weight, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """In the dtype, and with the leading dims, of x."""
    xq_NI, scale_N1 = quantized
    scale_1O = weight.scale_O[None, :]
    if x.is_cuda:
        y_NO = torch._scaled_mm(
            xq_NI, weight.data_OI.t(), scale_a=scale_N1, scale_b=scale_1O, out_dtype=x.dtype, use_fast_accum=True
        )
    else:
        y_NO = ((xq_NI.float() @ weight.data_OI.float().t()) * scale_N1 * scale_1O).to(x.dtype)
    if bias_O is not None:
        y_NO = y_NO + bias_O
    return y_NO.view(*x.shape[:-1], weight.data_OI.shape[0])


def quantize_rows(x_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes each row to e4m3 with its scale, float32 [N, 1]: one Triton pass on CUDA outside of torch.compile."""
    if x_NI.is_cuda and not torch.compiler.is_compiling():
        from aprtrain.kernels.fp8_triton import quantize

        return quantize(x_NI.contiguous())
    return _quantize(x_NI)


@torch.library.custom_op("aprtrain::quantize_gated", mutates_args=())
def _quantize_gated(both_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows of silu(gate) * up to e4m3 with their scales, for gate and up side by side; CUDA."""
    from aprtrain.kernels.fp8_triton import quantize

    return quantize(both_NI.contiguous(), gated=True)


@_quantize_gated.register_fake
def _(both_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = both_NI.shape
    q_NI = both_NI.new_empty(rows, cols // 2, dtype=torch.float8_e4m3fn)
    return q_NI, both_NI.new_empty(rows, 1, dtype=torch.float32)


def _quantize(x_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x_NI = x_NI.float()
    scale_N1 = x_NI.abs().amax(dim=1, keepdim=True).div(LARGEST).clamp(min=_SMALLEST_SCALE)
    return (x_NI * (1 / scale_N1)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale_N1
