"""Triton kernels that dequantize GGML blocks to bf16. Imported only on CUDA.

A program handles ROWS rows; a row is a run of one block with contiguous codes, so loads and stores are runs of 16 or 32
values. Layouts as in llama.cpp's ggml-common.h. Every code times its scale is exact in float32.
"""

import torch
import triton
import triton.language as tl

ROWS, WARPS = 64, 4


@triton.jit
def _q4_k(bytes_ptr, words_ptr, out_ptr, n_rows, ROWS: tl.constexpr):
    """A row is one of four groups of a block: 32 bytes, whose low and high nibbles are 32 values each.

    A block is 36 words: two f16 (scale, minimum), 12 bytes of eight scales and minima of 6 bits, 128 bytes of codes.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < n_rows
    block, group = row // 4, (row % 4).to(tl.int32)
    j = tl.arange(0, 32)[None, :]
    codes = tl.load(bytes_ptr + (block * 144 + 16 + group * 32)[:, None] + j, mask=live[:, None], other=0).to(tl.int32)

    head = tl.load(words_ptr + block * 36, mask=live, other=0)
    d = (head & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    m = ((head >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    shift = (group % 2) * 16
    first = tl.load(words_ptr + block * 36 + 1, mask=live, other=0) >> shift
    second = tl.load(words_ptr + block * 36 + 2, mask=live, other=0) >> shift
    third = tl.load(words_ptr + block * 36 + 3, mask=live, other=0) >> shift
    lower = group < 2  # of the eight scales, the first four are contiguous and the others split in two parts
    scale = tl.where(lower, first & 0x3F3F, (third & 0x0F0F) | ((first >> 2) & 0x3030))
    least = tl.where(lower, second & 0x3F3F, ((third >> 4) & 0x0F0F) | ((second >> 2) & 0x3030))

    out = out_ptr + (row * 64)[:, None] + j
    low = (codes & 15).to(tl.float32) * (d * (scale & 63).to(tl.float32))[:, None]
    low -= (m * (least & 63).to(tl.float32))[:, None]
    tl.store(out, low.to(tl.bfloat16), mask=live[:, None])
    high = (codes >> 4).to(tl.float32) * (d * ((scale >> 8) & 63).to(tl.float32))[:, None]
    high -= (m * ((least >> 8) & 63).to(tl.float32))[:, None]
    tl.store(out + 32, high.to(tl.bfloat16), mask=live[:, None])


@triton.jit
def _q6_k(bytes_ptr, words_ptr, out_ptr, n_rows, ROWS: tl.constexpr):
    """A row is 16 columns of one half of a block: four runs of 16 values that share 16 bytes of upper bits.

    A block is 128 bytes of lower four bits, 64 of upper two, 16 scales (int8) and an f16: 105 words of two bytes.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < n_rows
    block, half, part = row // 4, (row // 2 % 2).to(tl.int32), (row % 2).to(tl.int32)
    d = tl.load(words_ptr + block * 105 + 104, mask=live, other=0).to(tl.float16, bitcast=True).to(tl.float32)
    at = (block * 210 + part * 16)[:, None] + tl.arange(0, 16)[None, :]
    mask = live[:, None]
    near = tl.load(bytes_ptr + at + half[:, None] * 64, mask=mask, other=0).to(tl.int32)
    far = tl.load(bytes_ptr + at + half[:, None] * 64 + 32, mask=mask, other=0).to(tl.int32)
    upper = tl.load(bytes_ptr + at + half[:, None] * 32 + 128, mask=mask, other=0).to(tl.int32)
    scales = bytes_ptr + block * 210 + 192 + half * 8 + part
    out = out_ptr + (block * 256 + half * 128 + part * 16)[:, None] + tl.arange(0, 16)[None, :]
    for k in tl.static_range(4):
        low = near if k % 2 == 0 else far
        code = ((low >> (k // 2 * 4)) & 15) | (((upper >> (2 * k)) & 3) << 4)
        scale = tl.load(scales + 2 * k, mask=live, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        value = (code - 32).to(tl.float32) * (d * scale)[:, None]
        tl.store(out + 32 * k, value.to(tl.bfloat16), mask=mask)


@triton.jit
def _q8_0(bytes_ptr, words_ptr, out_ptr, n_rows, ROWS: tl.constexpr):
    """A row is a block: an f16 and 32 codes (int8), 17 words of two bytes."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < n_rows
    j = tl.arange(0, 32)[None, :]
    d = tl.load(words_ptr + row * 17, mask=live, other=0).to(tl.float16, bitcast=True).to(tl.float32)
    codes = tl.load(bytes_ptr + (row * 34 + 2)[:, None] + j, mask=live[:, None], other=0)
    value = codes.to(tl.int8, bitcast=True).to(tl.float32) * d[:, None]
    tl.store(out_ptr + (row * 32)[:, None] + j, value.to(tl.bfloat16), mask=live[:, None])


_KERNELS = {
    #        kernel, values a row, words by which headers are read
    "Q4_K": (_q4_k, 64, torch.int32),
    "Q6_K": (_q6_k, 64, torch.int16),
    "Q8_0": (_q8_0, 32, torch.int16),
}


def launch(dtype: str, stored_B: torch.Tensor, out_RC: torch.Tensor) -> None:
    """Launches the kernel of `dtype` on the current stream; the caller checks sizes."""
    kernel, width, word = _KERNELS[dtype]
    n_rows = out_RC.numel() // width
    if n_rows:
        grid = (triton.cdiv(n_rows, ROWS),)
        kernel[grid](stored_B, stored_B.view(word), out_RC, n_rows, ROWS=ROWS, num_warps=WARPS)
