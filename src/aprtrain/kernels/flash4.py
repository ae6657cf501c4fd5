"""Causal attention with FlashAttention-4, if installed, within packed documents or whole rows.

It is a beta that torch.compile cannot trace, so both directions are custom operators here, and `network.attention` uses
them only if they agree with torch's kernel.

Shape suffixes: S tokens of all documents, N T for whole rows; H query heads, K key-value heads, E values of a head.
"""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from aprtrain.kernels.context import GradientContext


@cache
def _interface() -> ModuleType:
    """The package's functions, with warnings of its kernel compiler suppressed."""
    from flash_attn.cute import interface

    warnings.filterwarnings("ignore", ".*cannot be converted to a JitArgument", UserWarning)
    module: ModuleType = interface
    return module


def _options(ends: Tensor | None, longest: int, window: int, scale: float, softcap: float) -> dict[str, object]:
    bounds = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    named = {"cu_seqlens": ends, "max_seqlen": longest} if ends is not None else {}
    lengths = {f"{name}_{x}": value for x in "qk" for name, value in named.items()}
    return {"softmax_scale": scale, "causal": not window, "softcap": softcap, **bounds, **lengths}


@torch.library.custom_op("aprtrain::flash4", mutates_args=())
def flash4(
    q_SHE: Tensor, k_SKE: Tensor, v_SKE: Tensor, ends: Tensor | None, longest: int, window: int, scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Values [S, H, E] and log-sums [H, S] or [N, H, T] in float32.

    `ends` and `longest` are as in Documents, no ends for whole rows; `window` and `softcap` are 0 for none.
    """
    q, k, v = q_SHE.contiguous(), k_SKE.contiguous(), v_SKE.contiguous()
    out, sums = _interface()._flash_attn_fwd(
        q, k, v, return_lse=True, **_options(ends, longest, window, scale, softcap)
    )[:2]
    return out, sums


@flash4.register_fake
def _(
    q_SHE: Tensor, k_SKE: Tensor, v_SKE: Tensor, ends: Tensor | None, longest: int, window: int, scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    *rows, tokens, heads, _ = q_SHE.shape
    out = torch.empty_like(q_SHE, memory_format=torch.contiguous_format)
    return out, q_SHE.new_empty(*rows, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("aprtrain::flash4_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, ends: Tensor | None, longest: int,
    window: int, scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, grad = q.contiguous(), k.contiguous(), v.contiguous(), grad.contiguous()
    options = _options(ends, longest, window, scale, softcap)
    dq, dk, dv = _interface()._flash_attn_bwd(q, k, v, out, grad, sums, **options)[:3]
    return dq, dk, dv


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, ends: Tensor | None, longest: int,
    window: int, scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


class _Flash4Context(GradientContext, Protocol):
    longest: int
    window: int
    scale: float
    softcap: float


def _keep(ctx: _Flash4Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.window, ctx.scale, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output)


def _slopes(ctx: _Flash4Context, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, ends, out, sums = ctx.saved_tensors
    how = ctx.longest, ctx.window, ctx.scale, ctx.softcap
    return (*_backward(grad, q, k, v, out, sums, ends, *how), None, *[None] * len(how))


flash4.register_autograd(_slopes, setup_context=_keep)
