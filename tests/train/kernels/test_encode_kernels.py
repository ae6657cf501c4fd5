"""Weights to blocks on a device: the bytes of aprfmt's codecs, and the values that they decode to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_encode import BLOCK, CASES, by_rule, random_values

from aprfmt.codecs import ggml
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.errors import UsageError
from aprtrain.kernels import encode as kernels
from aprtrain.kernels.encode import ENCODED, encode, fit_steps, round_trip

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
BY_CODEC = tuple(dtype for dtype in ENCODED if dtype != kernels.STEPPED)
"""Types that have the bytes of the codec."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", BY_CODEC)
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
@pytest.mark.parametrize("dtype", BY_CODEC)
@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 130), seed=st.integers(0, 2**32 - 1))
def test_any_number_of_blocks(dtype: str, device: str, n: int, seed: int) -> None:
    values = random_values(n, seed)
    assert np.array_equal(encode(dtype, values.to(device)).cpu().numpy(), ggml.encode(dtype, values.numpy()))


@pytest.mark.parametrize("dtype", ENCODED)
def test_pieces_join_where_they_are_cut(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_PIECE", 2 * BLOCK)
    values, out = random_values(67, 1), torch.empty(67 * BLOCK)
    steps = fit_steps(values) if dtype == kernels.STEPPED else None
    stored = encode(dtype, values, steps).numpy()
    if steps is None:
        assert np.array_equal(stored, ggml.encode(dtype, values.numpy()))
    round_trip(dtype, values, out, steps)
    assert np.array_equal(out.numpy(), ggml.decode(dtype, stored))


@pytest.mark.parametrize("dtype", ["Q8_0", "MXFP4"])
def test_values_of_blocks_stay_as_they_are(dtype: str) -> None:
    """So weights that were saved as floats encode to the same blocks again."""
    once, twice = torch.empty(200 * BLOCK), torch.empty(200 * BLOCK)
    round_trip(dtype, random_values(200, 5), once)
    round_trip(dtype, once, twice)
    assert torch.equal(once, twice)


# --- Q4_0 on given steps ---


@pytest.mark.parametrize("device", DEVICES)
def test_codes_on_steps_have_the_scale_of_least_squares(device: str) -> None:
    first, later = random_values(200, 8), random_values(200, 8) + 0.02 * random_values(200, 9)
    steps = fit_steps(first.to(device))
    wanted, scales = by_rule(later, steps.cpu())
    stored = encode("Q4_0", later.to(device), steps).cpu().numpy()
    decoded = torch.from_numpy(ggml.decode("Q4_0", stored)).view(-1, 32)
    halves = torch.from_numpy(stored.reshape(-1, 18)[:, :2].copy().view("<f2").astype("f4"))
    normal = scales.abs() > 1e-4
    assert int(normal.sum()) > 150
    assert torch.allclose(halves.double()[normal], scales[normal], rtol=2**-11 * 1.01)
    codes = torch.from_numpy(stored.reshape(-1, 18)[:, 2:]).int()
    codes = torch.cat((codes & 15, codes >> 4), 1) - 8
    assert float((codes == wanted).float().mean()) > 0.9999  # one at a tie may differ
    for target in (torch.float32, torch.bfloat16):
        out = torch.full_like(later, torch.nan, dtype=target, device=device)
        round_trip("Q4_0", later.to(device), out, steps)
        assert torch.equal(out.cpu(), decoded.view(-1).to(target))


def test_steps_are_better_than_the_codec_and_find_a_lattice() -> None:
    values = torch.randn(64 * BLOCK, generator=torch.Generator().manual_seed(1))
    on_steps, by_codec = (
        torch.empty_like(values),
        torch.from_numpy(ggml.decode("Q4_0", ggml.encode("Q4_0", values.numpy()))),
    )
    round_trip("Q4_0", values, on_steps, fit_steps(values))
    assert float((on_steps - values).square().mean()) < 0.9 * float((by_codec - values).square().mean())
    twice = torch.empty_like(values)
    round_trip("Q4_0", by_codec, twice, fit_steps(by_codec))
    torch.testing.assert_close(twice, by_codec, rtol=1e-3, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_one_value_that_grows_moves_no_other_code(device: str) -> None:
    values = torch.randn(32, generator=torch.Generator().manual_seed(2)).to(device)
    steps = fit_steps(values)
    place = values.abs().argmax()
    values[place] *= 2  # now beyond the largest code
    before = encode("Q4_0", values, steps)
    values[place] *= 2
    after = encode("Q4_0", values, steps)
    assert not torch.equal(after[:2], before[:2])
    assert torch.equal(after[2:], before[2:])


@pytest.mark.parametrize("case", ["zeros", "below the least scale"])
def test_blocks_without_a_step_are_zeros(case: str) -> None:
    values = CASES[case]()
    out = torch.full_like(values, torch.nan)
    round_trip("Q4_0", values, out, fit_steps(values))
    assert not out.any()


def test_other_values_are_refused() -> None:
    with pytest.raises(UsageError, match="2 steps do not belong to 32 values of Q4_0"):
        encode("Q4_0", torch.zeros(32), torch.zeros(2, 1))
    with pytest.raises(UsageError, match="1 steps do not belong to 32 values of Q8_0"):
        round_trip("Q8_0", torch.zeros(32), torch.zeros(32), torch.zeros(1, 1))
    with pytest.raises(UsageError, match="0 steps do not belong to 32 values of Q4_0"):
        encode("Q4_0", torch.zeros(32))
    for values, words in (
        (torch.zeros(32, dtype=torch.bfloat16), "contiguous float32"),
        (torch.zeros(64)[::2], "contiguous float32"),
        (torch.zeros(DTYPES["Q4_0"].block + 1), "do not divide 33"),
    ):
        with pytest.raises(UsageError, match=words):
            encode("Q4_0", values)
    with pytest.raises(UsageError, match="contiguous target"):
        round_trip("Q8_0", torch.zeros(64), torch.zeros(32))
