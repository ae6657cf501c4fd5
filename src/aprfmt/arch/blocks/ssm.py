"""Building blocks of rows: the mixers of Mamba and Mamba 2."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import linear, tensor
from aprfmt.arch.row import REQUIRED, TensorRow


def mixer(prefix: str, rows: tuple[TensorRow, ...], layers: str = "") -> tuple[TensorRow, ...]:
    """Rows of a layer's mixer: names get the prefix, layers the condition."""
    return tuple(replace(row, hf=tuple(prefix + n for n in row.hf), layers=layers) for row in rows)


def _conv(channels: str, kernel: str, bias: str) -> tuple[TensorRow, ...]:
    """A depthwise convolution over time."""
    weight = f"{channels},{kernel}"
    return (
        tensor("conv1d.weight", "ssm_conv1d.weight", f"{channels},1,{kernel}", gguf_dims=(weight,)),
        tensor("conv1d.bias", "ssm_conv1d.bias", channels, bias),
    )


def selective(inner: str, state: str, rank: str, kernel: str, bias: str, conv_bias: str) -> tuple[TensorRow, ...]:
    """The mixer of Mamba: a state of `state` values for each of `inner` channels, time steps of rank `rank`."""
    return (
        *linear("in_proj", "ssm_in", f"2*{inner},hidden", bias), *_conv(inner, kernel, conv_bias),
        *linear("x_proj", "ssm_x", f"{rank}+2*{state},{inner}"),
        *linear("dt_proj", "ssm_dt", f"{inner},{rank}", REQUIRED),
        tensor("A_log", "ssm_a", f"{inner},{state}", value="minus_exp"), tensor("D", "ssm_d", inner),
        *linear("out_proj", "ssm_out", f"hidden,{inner}", bias),
    )


def dual(
    inner: str, state: str, heads: str, groups: str, kernel: str, bias: str, conv_bias: str, out_bias: str = ""
) -> tuple[TensorRow, ...]:
    """The mixer of Mamba 2: `heads` heads in `groups` groups, each with its own B and C, and a grouped norm.

    `out_bias` is the need of the output projection's bias, if it is separate.
    """
    channels = f"{inner}+2*{groups}*{state}"
    return (
        *linear("in_proj", "ssm_in", f"{channels}+{inner}+{heads},hidden", bias), *_conv(channels, kernel, conv_bias),
        tensor("dt_bias", "ssm_dt.bias", heads),
        tensor("A_log", "ssm_a", heads, value="minus_exp", gguf_dims=(f"{heads},1",)),
        tensor("D", "ssm_d", heads, gguf_dims=(f"{heads},1",)),
        tensor("norm.weight", "ssm_norm.weight", inner, gguf_dims=(f"{groups},{inner}/{groups}",)),
        *linear("out_proj", "ssm_out", f"hidden,{inner}", out_bias or bias),
    )
