"""Building blocks of rows: Kimi's delta attention."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import linear, norm, tensor
from aprfmt.arch.row import TensorRow


_KDA, _ATTENTION = "linear_attention", "full_attention"
_HEADS, _SIZE, _KERNEL = "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"
_INNER = f"{_HEADS}*{_SIZE}"


def delta_attention(
    *gates: TensorRow, heads: str = _HEADS, size: str = _SIZE, kernel: str = _KERNEL, hf: str = "self_attn."
) -> tuple[TensorRow, ...]:
    """Delta attention with a decay per channel; Q, K and V each go through a convolution of their own."""
    inner = f"{heads}*{size}"
    wide = f"{inner},1,{kernel}"
    rows = (
        *(
            tensor(f"{n}_conv1d.weight", f"ssm_conv1d_{n}.weight", wide, gguf_dims=(f"1,{wide}",))
            for n in ("q", "k", "v")
        ),
        *(row for n in ("q", "k", "v") for row in linear(f"{n}_proj", f"attn_{n}", f"{inner},hidden")), *gates,
        *linear("b_proj", "ssm_beta", f"{heads},hidden"), tensor("dt_bias", "ssm_dt.bias", inner),
        *norm("o_norm", "ssm_norm", size), *linear("o_proj", "attn_output", f"hidden,{inner}"),
    )
    return tuple(replace(row, hf=tuple(hf + name for name in row.hf), layers=_KDA) for row in rows)


def low_rank(name: str) -> tuple[TensorRow, ...]:
    """A low-rank projection with the rank of the head size."""
    return (
        *linear(f"{name}_a_proj", f"ssm_{name}_a", f"{_SIZE},hidden"),
        *linear(f"{name}_b_proj", f"ssm_{name}_b", f"{_INNER},{_SIZE}"),
    )
