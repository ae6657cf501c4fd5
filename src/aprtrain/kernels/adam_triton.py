"""AdamW as one kernel, which also writes the compute copy. Imported only on CUDA."""

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 1024, 4


@triton.jit
def _update(
    weight_ptr, grad_ptr, mean_ptr, square_ptr, copy_ptr, skip_ptr, shrink_ptr, count_ptr, n, lr, beta1, beta2, eps,
    decay, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`skip` is 1 to leave everything unchanged; gradients are divided by `shrink`; `count` includes this update."""
    if tl.load(skip_ptr) == 0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = i < n
        weight = tl.load(weight_ptr + i, mask=inside)
        grad = tl.load(grad_ptr + i, mask=inside) / tl.load(shrink_ptr)
        mean = tl.load(mean_ptr + i, mask=inside)
        square = tl.load(square_ptr + i, mask=inside)
        count = tl.load(count_ptr)
        mean += (1 - beta1) * (grad - mean)
        square = beta2 * square + (1 - beta2) * grad * grad
        size = tl.sqrt_rn(square / (1 - tl.exp2(count * tl.log2(beta2)))) + eps
        weight = weight * (1 - lr * decay) - lr * (mean / (1 - tl.exp2(count * tl.log2(beta1)))) / size
        tl.store(weight_ptr + i, weight, mask=inside)
        tl.store(mean_ptr + i, mean, mask=inside)
        tl.store(square_ptr + i, square, mask=inside)
        if COPIES:
            tl.store(copy_ptr + i, weight.to(copy_ptr.dtype.element_ty), mask=inside)


def update(
    weight: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, copy: torch.Tensor | None,
    skip: torch.Tensor, shrink: torch.Tensor, count: torch.Tensor, **settings: float,
) -> None:  # fmt: skip
    """One update of contiguous float32 tensors, see `_update`; `settings` are lr, beta1, beta2, eps and decay."""
    n = weight.numel()
    with torch.cuda.device(weight.device):
        _update[(triton.cdiv(n, _BLOCK),)](
            weight, grad, mean, square, weight if copy is None else copy, skip, shrink, count, n, **settings,
            COPIES=copy is not None, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
