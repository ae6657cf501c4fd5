"""Zeros for biases that llama.cpp adds in every network of an architecture."""

from __future__ import annotations

from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.arch.zero_biases import zero_biases


def made(row: str, **extra: object) -> dict[str, int]:
    """Name -> number of zeros, of a network of two layers."""
    h = Hyperparams(
        num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=12, vocab_size=30
    )
    h.extra = {**extra}
    found = zero_biases(h, ARCHITECTURES[row])
    assert all(set(values) == {0.0} for values in found.values())
    return {name: len(values) for name, values in found.items()}


def test_what_a_config_switches_off_and_a_loader_needs() -> None:
    sizes = {"state_size": 4, "conv_kernel": 4, "time_step_rank": 2, "use_bias": False}
    assert made("mamba", use_conv_bias=True, **sizes) == {}
    off = made("mamba", use_conv_bias=False, **sizes)
    assert off == {"blk.0.ssm_conv1d.bias": 12, "blk.1.ssm_conv1d.bias": 12}


def test_all_biases_of_a_switch() -> None:
    """llama.cpp needs that of the output alone; a folder made from the GGUF has those of Q, K and V too."""
    found = made("jais2", attention_bias=False, mlp_bias=True)
    assert {name.removeprefix("blk.1.") for name in found if name.startswith("blk.1.")} == {
        "attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias",
    }  # fmt: skip
    assert (found["blk.0.attn_q.bias"], found["blk.0.attn_k.bias"], found["blk.0.attn_output.bias"]) == (8, 4, 8)


def test_biases_that_may_be_absent_are() -> None:
    assert made("llama", attention_bias=False, mlp_bias=False) == {}
