"""The Triton kernel of gated.slope. Imported only on CUDA."""

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 1024, 4


@triton.jit
def _slope(grad_ptr, both_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """A program handles part of a row: gate and up are `width` values apart, and so are their gradients."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    grad = tl.load(grad_ptr + row * width + i, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(both_ptr + row * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    d_gate = grad * up * s * (1 + gate * (1 - s))
    tl.store(out_ptr + row * 2 * width + i, d_gate.to(tl.bfloat16), mask=inside)
    tl.store(out_ptr + row * 2 * width + width + i, (grad * gate * s).to(tl.bfloat16), mask=inside)


def launch(grad: torch.Tensor, both: torch.Tensor, out: torch.Tensor) -> None:
    """Launches the kernel on the current stream; all tensors are contiguous, and `out` has the shape of `both`."""
    width = grad.shape[-1]
    rows = grad.numel() // max(1, width)
    if rows:
        with torch.cuda.device(grad.device):
            _slope[(rows, triton.cdiv(width, _BLOCK))](grad, both, out, width, BLOCK=_BLOCK, num_warps=_WARPS)
