"""Encoders of encode.py as Triton kernels. Imported only where CUDA is used.

A program takes some groups of values with a scale each, as two halves: a byte of 4-bit codes has one of either. It
writes the bytes of the blocks, or the values that they decode to. Products and sums must not be fused, and quotients
must be rounded to nearest, or a code at a tie would be another.
"""

import torch
import triton
import triton.language as tl

_ROWS, _WARPS = 64, 4


@triton.jit
def _halves(values_ptr, row, live, HALF: tl.constexpr):
    """The values [rows, HALF] of the first half of each group, and those of the second."""
    at = values_ptr + (row * (2 * HALF))[:, None] + tl.arange(0, HALF)[None, :]
    mask = live[:, None]
    return tl.load(at, mask=mask, other=0.0), tl.load(at + HALF, mask=mask, other=0.0)


@triton.jit
def _put_values(out_ptr, row, live, low, high, HALF: tl.constexpr):
    at = out_ptr + (row * (2 * HALF))[:, None] + tl.arange(0, HALF)[None, :]
    mask = live[:, None]
    tl.store(at, low.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(at + HALF, high.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _put_f16(at, live, scale):
    bits = scale.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    tl.store(at, (bits & 255).to(tl.uint8), mask=live)
    tl.store(at + 1, (bits >> 8 & 255).to(tl.uint8), mask=live)


@triton.jit
def _put_nibbles(at, live, low, high, HALF: tl.constexpr):
    tl.store(at[:, None] + tl.arange(0, HALF)[None, :], (low | high << 4).to(tl.uint8), mask=live[:, None])


@triton.jit
def _inverse(scale):
    """1 / scale, 0 where it is 0; infinite where it is too small."""
    return tl.where(scale == 0, 0.0, tl.div_rn(scale * 0 + 1, tl.where(scale == 0, 1.0, scale)))


@triton.jit
def _on_step(x, inverse):
    return tl.minimum(tl.maximum(tl.floor(x * inverse[:, None] + 0.5), -8.0), 7.0)


@triton.jit
def _q4_0(values_ptr, steps_ptr, out_ptr, n_rows, BYTES: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < n_rows
    low, high = _halves(values_ptr, row, live, 16)
    inverse = _inverse(tl.load(steps_ptr + row, mask=live, other=0.0))
    low_code, high_code = _on_step(low, inverse), _on_step(high, inverse)
    square = tl.sum(low_code * low_code, axis=1) + tl.sum(high_code * high_code, axis=1)
    d = tl.div_rn(tl.sum(low * low_code, axis=1) + tl.sum(high * high_code, axis=1), tl.maximum(square, 1.0))
    low, high = low_code.to(tl.int32) + 8, high_code.to(tl.int32) + 8
    if BYTES:
        at = out_ptr + row * 18
        _put_f16(at, live, d)
        _put_nibbles(at + 2, live, low, high, 16)
    else:
        scale = d.to(tl.float16).to(tl.float32)[:, None]
        _put_values(out_ptr, row, live, (low - 8).to(tl.float32) * scale, (high - 8).to(tl.float32) * scale, 16)


@triton.jit
def _rounded_away(y):
    return tl.where(y < 0, y - 0.49999997, y + 0.49999997).to(tl.int32)


@triton.jit
def _q8_0(values_ptr, steps_ptr, out_ptr, n_rows, BYTES: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < n_rows
    low, high = _halves(values_ptr, row, live, 16)
    most = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
    d = tl.div_rn(most, 127.0 + most * 0)
    inverse = _inverse(d)
    inverse = tl.where(inverse < float("inf"), inverse, 0.0)[:, None]
    low, high = _rounded_away(low * inverse), _rounded_away(high * inverse)
    if BYTES:
        at = out_ptr + row * 34
        _put_f16(at, live, d)
        at = at[:, None] + 2 + tl.arange(0, 16)[None, :]
        tl.store(at, low.to(tl.int8).to(tl.uint8, bitcast=True), mask=live[:, None])
        tl.store(at + 16, high.to(tl.int8).to(tl.uint8, bitcast=True), mask=live[:, None])
    else:
        scale = d.to(tl.float16).to(tl.float32)[:, None]
        _put_values(out_ptr, row, live, low.to(tl.float32) * scale, high.to(tl.float32) * scale, 16)


@triton.jit
def _nearest(x, half):
    """Codes of 4-bit floats, each the first of the nearest, and their values; `half` is half the scale of a row."""
    size = tl.abs(x)
    best, index, value = size, tl.zeros_like(x).to(tl.int32), tl.zeros_like(x)
    for i in tl.static_range(1, 8):
        # Twice the values of E2M1: 1, 2, 3, 4, 6, 8, 12.
        known = half[:, None] * (i if i < 5 else (6 if i == 5 else (8 if i == 6 else 12)))
        error = tl.abs(known - size)
        closer = error < best
        best = tl.where(closer, error, best)
        index = tl.where(closer, i, index)
        value = tl.where(closer, known, value)
    negative = (x < 0) & (index != 0)
    return tl.where(negative, index | 8, index), tl.where(negative, -value, value)


@triton.jit
def _nvfp4(values_ptr, steps_ptr, out_ptr, n_rows, BYTES: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < n_rows
    low, high = _halves(values_ptr, row, live, 8)
    most = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
    scale = tl.minimum(tl.div_rn(most, 6.0 + most * 0), 448.0)
    bits = scale.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 120
    # The mantissa rounded to 3 bits; a carry goes into the exponent by itself.
    normal = (exponent << 3) + (bits >> 20 & 7) + (bits >> 19 & 1)
    normal = tl.where(normal < 0x78, normal, 0x7E)
    small = tl.minimum(scale * 512 + 0.5, 7.0).to(tl.int32)
    code = tl.where(exponent <= 0, small, normal)
    mantissa = code & 7
    half = ((code >> 3) + 119 << 23 | mantissa << 20).to(tl.float32, bitcast=True)
    half = tl.where(code >= 8, half, mantissa.to(tl.float32) * 0.0009765625)
    low_code, low = _nearest(low, half)
    high_code, high = _nearest(high, half)
    if BYTES:  # four groups are a block: their scales, then their codes
        block, group = row // 4, row % 4
        tl.store(out_ptr + block * 36 + group, code.to(tl.uint8), mask=live)
        _put_nibbles(out_ptr + block * 36 + 4 + group * 8, live, low_code, high_code, 8)
    else:
        _put_values(out_ptr, row, live, low, high, 8)


@triton.jit
def _mxfp4(values_ptr, steps_ptr, out_ptr, n_rows, BYTES: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < n_rows
    low, high = _halves(values_ptr, row, live, 16)
    most = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
    power = tl.floor(tl.log2(tl.where(most > 0, most, 1.0).to(tl.float64)).to(tl.float32)).to(tl.int32) + 125
    code = tl.where(most > 0, power, 0) & 255
    half = tl.where(code < 2, 0x00200000 << (code & 1), code - 1 << 23).to(tl.float32, bitcast=True)
    low_code, low = _nearest(low, half)
    high_code, high = _nearest(high, half)
    if BYTES:
        at = out_ptr + row * 17
        tl.store(at, code.to(tl.uint8), mask=live)
        _put_nibbles(at + 1, live, low_code, high_code, 16)
    else:
        _put_values(out_ptr, row, live, low, high, 16)


_KERNELS = {"Q4_0": (_q4_0, 32), "Q8_0": (_q8_0, 32), "NVFP4": (_nvfp4, 16), "MXFP4": (_mxfp4, 32)}
"""Kernel, and values under one scale."""


def launch(dtype: str, values_P: torch.Tensor, out: torch.Tensor, steps_B1: torch.Tensor | None) -> None:
    """Starts the kernel of `dtype`: uint8 targets get blocks, others values. The steps are of Q4_0.

    Checks of sizes are the caller's.
    """
    kernel, group = _KERNELS[dtype]
    n_rows = values_P.numel() // group
    if n_rows:
        with torch.cuda.device(values_P.device):
            kernel[(triton.cdiv(n_rows, _ROWS),)](
                values_P, values_P if steps_B1 is None else steps_B1, out, n_rows,
                BYTES=out.dtype == torch.uint8, ROWS=_ROWS, num_warps=_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
