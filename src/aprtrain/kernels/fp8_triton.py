"""The Triton kernel behind fp8.quantize_rows. Imported only where CUDA is used."""

import torch
import triton
import triton.language as tl


@triton.jit
def _quantize_rows(x_ptr, q_ptr, scale_ptr, cols, BLOCK: tl.constexpr):
    """A program a row: the largest size first, then the quotients; the second pass reads the cache."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for at in range(0, cols, BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * cols + i, mask=i < cols, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
    # tl.max passes over NaN: a row that holds one must get the scale NaN, and so must its products.
    bad = tl.sum((largest != largest).to(tl.int32), axis=0)  # noqa: PLR0124
    scale = tl.maximum(tl.div_rn(tl.max(largest, axis=0), 448.0), 1e-12)
    scale = tl.where(bad > 0, float("nan"), scale)
    tl.store(scale_ptr + row, scale)
    for at in range(0, cols, BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * cols + i, mask=i < cols, other=0.0).to(tl.float32)
        value = tl.clamp(tl.div_rn(x, scale), -448.0, 448.0)
        tl.store(q_ptr + row * cols + i, value.to(tl.float8e4nv), mask=i < cols)


def quantize(x_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a contiguous bf16 or float32 matrix as e4m3, and their scales, float32 [N, 1]."""
    n, cols = x_NI.shape
    q_NI = torch.empty_like(x_NI, dtype=torch.float8_e4m3fn)
    scale_N1 = torch.empty((n, 1), dtype=torch.float32, device=x_NI.device)
    if n:
        block = min(triton.next_power_of_2(cols), 4096)
        _quantize_rows[(n,)](x_NI, q_NI, scale_N1, cols, BLOCK=block, num_warps=8)
    return q_NI, scale_N1
