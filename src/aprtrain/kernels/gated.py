"""silu(gate) * up, whose backward pass reads and writes every value once.

    d_up = g silu(gate),   d_gate = g up s (1 + gate (1 - s)),   s = sigmoid(gate)

torch.compile writes the two halves of the gradient by a kernel each, and both read all three inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional


def silu_gated(both: Tensor) -> Tensor:
    """silu(gate) * up [..., F] of gate and up side by side [..., 2 F]."""
    if both.is_cuda and both.dtype == torch.bfloat16 and torch.is_grad_enabled():
        run = cast(Callable[[Tensor], Tensor], _Gated.apply)
        return run(both)
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        found: Tensor = slope(grad, both)
        return found


@torch.library.custom_op("aprtrain::silu_gated_backward", mutates_args=())
def slope(grad: Tensor, both: Tensor) -> Tensor:
    """The gradient [..., 2 F] of gate and up, for that of their product [..., F]; bfloat16 on CUDA."""
    from aprtrain.kernels.gated_triton import launch

    both = both.contiguous()
    out = torch.empty_like(both)
    launch(grad.contiguous(), both, out)
    return out


@slope.register_fake
def _(grad: Tensor, both: Tensor) -> Tensor:
    return torch.empty_like(both, memory_format=torch.contiguous_format)
