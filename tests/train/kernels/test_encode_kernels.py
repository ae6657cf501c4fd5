"""Weights to blocks on a device: the bytes of aprfmt's codecs, and the values that they decode to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aprfmt.codecs import ggml
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.errors import UsageError
from aprtrain.kernels import encode as kernels
from aprtrain.kernels.encode import ENCODED, encode, round_trip

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
BLOCK = 64
"""Values that are whole blocks of every type."""


def random_values(n: int, seed: int) -> Tensor:
    """Blocks whose sizes range over what the scales of every type hold, with zeros and equal values among them."""
    generator = torch.Generator().manual_seed(seed)
    x_NB = torch.randn(n, BLOCK, generator=generator) * torch.exp2(torch.randint(-40, 9, (n, 1), generator=generator))
    x_NB[::7, ::3] = 0
    x_NB[1::5] = x_NB[1::5].sign() * x_NB[1::5, :1].abs()
    return x_NB.view(-1)


def near_powers() -> Tensor:
    """Largest values that are powers of two, or a few units in the last place beside them, of either sign."""
    steps = torch.arange(-6, 7, dtype=torch.int32)[:, None]
    bits = (torch.exp2(torch.arange(-100.0, 10.0)).view(torch.int32)[None] + steps).reshape(-1, 1)
    values = bits.view(torch.float32).expand(-1, BLOCK).clone()
    return (values * torch.linspace(-1, 1, BLOCK)).view(-1)


def ties() -> Tensor:
    """Values halfway between two codes of each type."""
    generator = torch.Generator().manual_seed(3)
    x_NB = torch.randint(-254, 255, (96, BLOCK), generator=generator).float()
    x_NB[:, 0], x_NB[:, 1] = -254, 254
    scales = torch.exp2(torch.arange(-10.0, 6.0)).repeat_interleave(6)[:, None]
    return torch.cat((x_NB * scales, (x_NB / 16).round() / 2 * scales)).view(-1)


CASES: dict[str, Callable[[], Tensor]] = {
    "random": lambda: random_values(300, 0),
    "powers": near_powers,
    "ties": ties,
    "zeros": lambda: torch.zeros(2 * BLOCK) * torch.tensor([1.0, -1.0]).repeat(BLOCK),
    "tiny": lambda: random_values(40, 1) * 2.0**-86,
    "below the least scale": lambda: random_values(40, 2) * 2.0**-110,
    "small scales": lambda: torch.linspace(0, 0.05, 40 * BLOCK) * torch.tensor([1.0, -1.0]).repeat(20 * BLOCK),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ENCODED)
@pytest.mark.parametrize("case", CASES)
def test_bytes_and_values_are_those_of_the_codec(dtype: str, case: str, device: str) -> None:
    values = CASES[case]()
    wanted = ggml.encode(dtype, values.numpy())
    assert encode(dtype, values.to(device)).cpu().numpy().tobytes() == wanted.tobytes()
    decoded = torch.from_numpy(ggml.decode(dtype, wanted))
    for target in (torch.float32, torch.bfloat16):
        out = torch.full_like(values, torch.nan, dtype=target, device=device)
        round_trip(dtype, values.to(device), out)
        assert torch.equal(out.cpu(), decoded.to(target))


@pytest.mark.parametrize("dtype", ["NVFP4", "MXFP4"])
@pytest.mark.parametrize("device", DEVICES)
def test_values_beyond_the_largest_scale(dtype: str, device: str) -> None:
    values = random_values(60, 4) * torch.exp2(torch.arange(60.0) * 2).repeat_interleave(BLOCK)
    assert float(values.abs().max()) > 1e30
    wanted = ggml.encode(dtype, values.numpy())
    assert encode(dtype, values.to(device)).cpu().numpy().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ENCODED)
@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 130), seed=st.integers(0, 2**32 - 1))
def test_any_number_of_blocks(dtype: str, device: str, n: int, seed: int) -> None:
    values = random_values(n, seed)
    assert np.array_equal(encode(dtype, values.to(device)).cpu().numpy(), ggml.encode(dtype, values.numpy()))


@pytest.mark.parametrize("dtype", ENCODED)
def test_pieces_join_where_they_are_cut(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_PIECE", 2 * BLOCK)
    values = random_values(67, 1)
    assert np.array_equal(encode(dtype, values).numpy(), ggml.encode(dtype, values.numpy()))
    out = torch.empty_like(values)
    round_trip(dtype, values, out)
    assert np.array_equal(out.numpy(), ggml.decode(dtype, encode(dtype, values).numpy()))


@pytest.mark.parametrize("dtype", ["Q4_0", "Q8_0", "MXFP4"])
def test_values_of_blocks_stay_as_they_are(dtype: str) -> None:
    """So weights that were saved as floats encode to the same blocks again."""
    once, twice = torch.empty(200 * BLOCK), torch.empty(200 * BLOCK)
    round_trip(dtype, random_values(200, 5), once)
    round_trip(dtype, once, twice)
    assert torch.equal(once, twice)


def test_other_values_are_refused() -> None:
    for values, words in (
        (torch.zeros(32, dtype=torch.bfloat16), "contiguous float32"),
        (torch.zeros(64)[::2], "contiguous float32"),
        (torch.zeros(DTYPES["Q4_0"].block + 1), "do not divide 33"),
    ):
        with pytest.raises(UsageError, match=words):
            encode("Q4_0", values)
    with pytest.raises(UsageError, match="contiguous target"):
        round_trip("Q4_0", torch.zeros(64), torch.zeros(32))
