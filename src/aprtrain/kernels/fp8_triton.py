"""The Triton kernel of fp8.quantize_rows. Imported only on CUDA."""

import torch
import triton
import triton.language as tl

_PIECE, _PIECES = 8, 5
"""Values per thread and iteration, and the maximum number of iterations that leaves enough occupancy."""


@triton.jit
def _quantize_rows(x_ptr, q_ptr, scale_ptr, cols, GATED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row, which it holds in registers: first the maximum, then the quotients.

    GATED: a row is gate and up, `cols` values each, and silu(gate) * up is stored.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * cols * (2 if GATED else 1)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    held = ()
    for n in tl.static_range(PIECES):
        i = n * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < cols, other=0.0).to(tl.float32)
        if GATED:
            x *= tl.sigmoid(x) * tl.load(x_ptr + cols + i, mask=i < cols, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
        held += (x,)  # type: ignore[assignment]
    # tl.max ignores NaN: a row that contains one must get the scale NaN, and so must its products.
    bad = tl.sum((largest != largest).to(tl.int32), axis=0)  # noqa: PLR0124
    scale = tl.maximum(tl.div_rn(tl.max(largest, axis=0), 448.0), 1e-12)
    scale = tl.where(bad > 0, float("nan"), scale)
    tl.store(scale_ptr + row, scale)
    inverse = tl.div_rn(1.0, scale)
    for n in tl.static_range(PIECES):
        i = n * BLOCK + tl.arange(0, BLOCK)
        value = tl.clamp(held[n] * inverse, -448.0, 448.0)
        tl.store(q_ptr + row * cols + i, value.to(tl.float8e4nv), mask=i < cols)


def quantize(x_NI: torch.Tensor, *, gated: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows of a contiguous bf16 or float32 matrix to e4m3, with their scales, float32 [N, 1].

    With gated rows, gate and up are side by side and the result is half as wide.
    """
    n, cols = x_NI.shape[0], x_NI.shape[1] // (1 + gated)
    q_NI = torch.empty((n, cols), dtype=torch.float8_e4m3fn, device=x_NI.device)
    scale_N1 = torch.empty((n, 1), dtype=torch.float32, device=x_NI.device)
    if n:
        warps = 8
        while warps < 32 and cols > _PIECES * _PIECE * 32 * warps:
            warps *= 2
        block = min(triton.next_power_of_2(cols), _PIECE * 32 * warps)
        _quantize_rows[(n,)](
            x_NI, q_NI, scale_N1, cols, GATED=gated, PIECES=triton.cdiv(cols, block), BLOCK=block, num_warps=warps
        )
    return q_NI, scale_N1
