"""Gated MLPs, silu(gate) * up, fused with the products around them to save memory traffic.

    h = silu(gate) up,   d_up = g silu(gate),   d_gate = g up s (1 + gate (1 - s)),   s = sigmoid(gate)

If quack-kernels is installed and agrees with torch, the product that computes gate and up also writes h, and the
backward product that computes g writes d_gate, d_up and h again: g is never stored, and h need not be kept. There gate
and up alternate along a row. Otherwise the gradient is a Triton kernel that reads and writes every value once;
torch.compile would use a kernel for each half, and both would read all three inputs.

Shape suffixes: S tokens, D = d_model, F width of h.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from aprtrain.features import Verdict, importable
from aprtrain.kernels.context import GradientContext
from aprtrain.kernels.cross_check import agree

_HAS_TRITON = bool(importable("triton"))


def silu_gated(both: Tensor) -> Tensor:
    """silu(gate) * up [..., F] for gate and up side by side [..., 2 F]."""
    if both.is_cuda and both.dtype == torch.bfloat16 and torch.is_grad_enabled() and _HAS_TRITON:
        run = cast(Callable[[Tensor], Tensor], _Gated.apply)
        return run(both)
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: GradientContext, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: GradientContext, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        found: Tensor = slope(grad, both)
        return found


@torch.library.custom_op("aprtrain::silu_gated_backward", mutates_args=())
def slope(grad: Tensor, both: Tensor) -> Tensor:
    """The gradient [..., 2 F] of gate and up, from that of their product [..., F]; bfloat16 on CUDA."""
    from aprtrain.kernels.gated_triton import launch

    both = both.contiguous()
    out = torch.empty_like(both)
    launch(grad.contiguous(), both, out)
    return out


@slope.register_fake
def _(grad: Tensor, both: Tensor) -> Tensor:
    return torch.empty_like(both, memory_format=torch.contiguous_format)


# --- in the products themselves ---


def gated_product(x: Tensor, gate_up: Tensor) -> Tensor:
    """silu(gate) * up [..., F] of x [..., D] and both matrices stacked [2 F, D]; not differentiable."""
    h_SF: Tensor = _product(x.flatten(0, -2), gate_up, keep=False)[0]
    return h_SF.view(*x.shape[:-1], -1)


@torch.library.custom_op("aprtrain::add_product", mutates_args=("total",))
def add_product(total: Tensor, h: Tensor, down_DF: Tensor) -> None:
    """Adds h [..., F] times the matrix to `total` [..., D] in the product's epilogue."""
    total.view(-1, len(down_DF)).addmm_(h.flatten(0, -2), down_DF.t())


def feed_forward(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """silu(gate) * up of x [..., D], times the matrix `down` [D, F]; bfloat16, all three differentiable."""
    run = cast(Callable[..., Tensor], _FeedForward.apply)
    return run(x.flatten(0, -2), gate_up, down).view_as(x)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: GradientContext, x_SD: Tensor, gate_up: Tensor, down_DF: Tensor) -> Tensor:
        h_SF, both = _product(x_SD, gate_up, keep=True)
        ctx.save_for_backward(x_SD, gate_up, down_DF, both)
        return functional.linear(h_SF, down_DF)

    @staticmethod
    def backward(ctx: GradientContext, grad_SD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_SD, gate_up, down_DF, both = ctx.saved_tensors
        slopes, h_SF = _slopes(grad_SD, down_DF, both)
        in_turn = gate_up.view(2, -1, x_SD.shape[1]).transpose(0, 1).flatten(0, 1)
        of_both = (slopes.t() @ x_SD).view(-1, 2, x_SD.shape[1]).transpose(0, 1).flatten(0, 1)
        return slopes @ in_turn, of_both, grad_SD.t() @ h_SF


@torch.library.custom_op("aprtrain::gated_product", mutates_args=())
def _product(x_SD: Tensor, gate_up: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """h [S, F], and gate and up interleaved [S, 2 F] if they are to be kept."""
    from quack.gemm_interface import gemm_gated

    both, h = gemm_gated(
        x_SD.contiguous().unsqueeze(0), gate_up.t().unsqueeze(0), activation="swiglu", store_preact=keep, tuned=False,
        concat_layout=("B",),
    )  # fmt: skip
    return h.squeeze(0), x_SD.new_empty(0) if both is None else both.squeeze(0)


@_product.register_fake
def _(x_SD: Tensor, gate_up: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    rows = len(gate_up)
    return x_SD.new_empty(len(x_SD), rows // 2), x_SD.new_empty((len(x_SD), rows) if keep else 0)


@torch.library.custom_op("aprtrain::gated_slopes", mutates_args=())
def _slopes(grad_SD: Tensor, down_DF: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gate and up interleaved [S, 2 F], and h [S, F]."""
    from quack.gemm_interface import gemm_dgated

    slopes, h_SF = gemm_dgated(
        grad_SD.contiguous(), down_DF, both, activation="swiglu", dynamic_scheduler=False, tuned=False, config=_tiles()
    )
    return slopes, h_SF


@cache
def _tiles() -> object:
    """The fastest tiles measured on an H200, by a quarter over the package's own choice."""
    from quack.gemm_config import GemmConfig

    return GemmConfig(tile_m=128, tile_n=160, pingpong=True, is_dynamic_persistent=False)


@_slopes.register_fake
def _(grad_SD: Tensor, down_DF: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(both), both.new_empty(len(both), both.shape[1] // 2)


@cache
def products_agree(*, learns: bool) -> Verdict:
    """Whether quack-kernels is installed and agrees with torch on this GPU, gradients too if one `learns`.

    It compiles its kernels on the first call, which takes seconds each.
    """
    if (capability := torch.cuda.get_device_capability())[0] != 9:
        return Verdict(
            False, f"it needs a Hopper GPU (compute capability 9.0), this is {capability[0]}.{capability[1]}"
        )
    if not (found := importable("quack")):
        return found
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (300, 256), (640, 256), (256, 320)
    some = [torch.randn(s, generator=generator, device="cuda").mul_(s[1] ** -0.25).bfloat16() for s in shapes]
    x, gate_up, down = (value.requires_grad_() for value in some)

    def known() -> list[Tensor]:
        h = silu_gated(functional.linear(x, gate_up))
        return [h.detach(), *gradients(functional.linear(h, down))]

    def other() -> list[Tensor]:
        h = gated_product(x.detach(), gate_up.detach())
        return [h, *gradients(feed_forward(x, gate_up, down))]

    def gradients(out: Tensor) -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad(out, (x, gate_up, down), x.detach())] if learns else []

    return agree(known, other)
