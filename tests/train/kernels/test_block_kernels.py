from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from train_blocks import BYTES, edge_blocks, random_blocks

from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.errors import CorruptError, UsageError
from aprtrain.kernels import blocks as kernel
from aprtrain.kernels import fp8
from aprtrain.kernels.blocks import BLOCK_TYPES, Blocks, decode, is_kept, pick_rows, some_rows, upload

CPU = torch.device("cpu")


@dataclass
class Stored:
    """What a tensor of a file has."""

    dtype: str
    shape: tuple[int, ...]
    n_bytes: int
    parts: Sequence[bytes | memoryview] = ()
    name: str = "w"

    def chunks(self) -> Sequence[bytes | memoryview]:
        return self.parts


def stored(
    dtype: str, shape: tuple[int, ...], n_bytes: int, parts: Sequence[bytes | memoryview] = ()
) -> CanonicalTensor:
    return cast(CanonicalTensor, Stored(dtype, shape, n_bytes, parts))


DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.cuda)]


def _expected(dtype: str, stored: np.ndarray[Any, Any]) -> torch.Tensor:
    """What the gguf package decodes, rounded to bf16."""
    with np.errstate(all="ignore"):
        values = dequantize(stored.reshape(1, -1), gguf.GGMLQuantizationType[dtype])
    return torch.from_numpy(np.array(values, dtype=np.float32).reshape(-1)).to(torch.bfloat16)


def _blocks(dtype: str, data: np.ndarray[Any, Any], device: torch.device = CPU, rows: int = 1) -> Blocks:
    shape = rows, data.size // BYTES[dtype] * DTYPES[dtype].block // rows
    return upload(stored(dtype, shape, data.size, [data.tobytes()]), device)


def _decoded(blocks: Blocks) -> torch.Tensor:
    target = torch.full(blocks.shape, float("nan"), dtype=torch.bfloat16, device=blocks.stored_B.device)
    assert decode(blocks, target) is target
    return target.flatten().cpu()


def _same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_edge_blocks_decode_bit_by_bit(dtype: str, device: torch.device) -> None:
    stored = edge_blocks(dtype)
    assert _same_bits(_decoded(_blocks(dtype, stored, device)), _expected(dtype, stored))


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", BLOCK_TYPES)
@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 70), seed=st.integers(0, 2**32 - 1))
def test_random_blocks_decode_bit_by_bit(dtype: str, device: torch.device, n: int, seed: int) -> None:
    stored = random_blocks(dtype, n, seed)
    assert _same_bits(_decoded(_blocks(dtype, stored, device)), _expected(dtype, stored))


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_pieces_join_where_they_are_cut(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_PIECE", 512)
    stored = random_blocks(dtype, 67, 1)
    assert _same_bits(_decoded(_blocks(dtype, stored)), _expected(dtype, stored))


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_rows_are_picked_and_cut(dtype: str, device: torch.device) -> None:
    blocks = _blocks(dtype, random_blocks(dtype, 5 * 8, 2), device, rows=5)
    whole = _decoded(blocks).view(blocks.shape)
    rows = torch.tensor([4, 0, 0, 3])
    assert _same_bits(pick_rows(blocks, rows.to(device)).cpu(), whole[rows])
    assert _same_bits(_decoded(some_rows(blocks, 1, 3)), whole[1:4].flatten())


def test_uploads_come_in_chunks_of_any_size() -> None:
    data = random_blocks("Q6_K", 6, 3).tobytes()
    cuts = [0, 0, 1, 700, 701, len(data)]
    chunks = [memoryview(data)[a:b] for a, b in pairwise(cuts)]
    got = upload(stored("Q6_K", (2, 768), len(data), chunks), CPU)
    assert got.n_bytes == len(data)
    assert got.stored_B.numpy().tobytes() == data
    with pytest.raises(CorruptError, match="bytes are stored, but") as error:
        upload(stored("Q6_K", (2, 768), len(data), chunks[:-1]), CPU)
    assert error.value.tensor == "w"


def test_targets_of_another_kind_are_refused() -> None:
    blocks = _blocks("Q8_0", random_blocks("Q8_0", 4, 4))
    for target in (
        torch.empty(128),
        torch.empty(96, dtype=torch.bfloat16),
        torch.empty(128, 2, dtype=torch.bfloat16)[:, 0],
    ):
        with pytest.raises(UsageError, match="contiguous bf16"):
            decode(blocks, target)


@pytest.mark.parametrize(
    ("dtype", "shape", "kept"),
    [
        ("Q4_K", (4, 256), True),
        ("Q4_K", (2, 128), False),
        ("Q8_0", (4, 96), True),
        ("Q8_0", (96,), False),
        ("Q5_K", (4, 256), False),
        ("BF16", (4, 256), False),
    ],
)
def test_what_stays_blocks(dtype: str, shape: tuple[int, ...], kept: bool) -> None:
    n = int(np.prod(shape))
    row = DTYPES[dtype]
    assert is_kept(stored(dtype, shape, n // row.block * row.block_bytes)) is kept


def test_rows_filled_up_to_blocks_do_not_stay() -> None:
    assert is_kept(stored("Q8_0", (4, 32), 4 * 34))
    assert not is_kept(stored("Q8_0", (4, 32), 8 * 34))


def test_e4m3_keeps_each_row_within_its_own_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 64, generator=generator) * torch.logspace(-6, 6, 7)[:, None]
    x[3] = 0
    q, scale = fp8.quantize_rows(x)
    assert q.dtype == torch.float8_e4m3fn
    assert bool((q.float().abs().amax(1)[[0, 1, 2, 4, 5, 6]] == fp8.LARGEST).all())
    # Three bits of mantissa: half a unit of the last place is a sixteenth; below 2^-6 of 448 steps are equal.
    bound = torch.maximum(x.abs() / 16, scale * 2.0**-10) * 1.001
    assert bool(((q.float() * scale - x).abs() <= bound).all())
    assert bool((q[3].float() == 0).all())


@pytest.mark.parametrize("rows", [5, 1024])
def test_e4m3_products_are_near_those_in_bf16(rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 64, generator=generator)
    weight = torch.randn(48, 64, generator=generator) * torch.logspace(-3, 3, 48)[:, None]
    bias = torch.randn(48, generator=generator)
    quantized = fp8.quantize_weight(weight, rows=rows)
    assert (quantized.data_OI.element_size(), quantized.scale_O.shape) == (1, (48,))
    got, want = fp8.linear(x, quantized, bias), fp8.linear(x, weight, bias)
    assert got.shape == want.shape
    off = (got - want).square().mean((0, 1)).sqrt() / want.square().mean((0, 1)).sqrt()
    assert 0 < float(off.max()) < 0.08
    reference = (quantized.data_OI.double() * quantized.scale_O[:, None]) @ torch.ones(64, dtype=torch.float64)
    ones = fp8.linear(torch.ones(1, 64), quantized)
    torch.testing.assert_close(ones[0].double(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_e4m3_never_makes_a_bad_row_finite(bad: float, device: torch.device) -> None:
    x = torch.ones(3, 32, dtype=torch.bfloat16, device=device)
    x[1, 7] = bad
    weight = fp8.quantize_weight(torch.ones(16, 32, dtype=torch.bfloat16, device=device))
    y = fp8.linear(x, weight)
    assert not bool(torch.isfinite(y[1]).any())
    assert bool(torch.isfinite(y[[0, 2]]).all())


@pytest.mark.cuda
def test_e4m3_on_cuda_equals_the_cpu() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(64, 4112, generator=generator).to(torch.bfloat16)
    weight = torch.randn(32, 4112, generator=generator).to(torch.bfloat16)
    q, scale = fp8.quantize_rows(x.cuda())
    q_cpu, scale_cpu = fp8.quantize_rows(x)
    torch.testing.assert_close(scale.cpu(), scale_cpu, rtol=1e-6, atol=0)
    assert float((q.cpu().float() == q_cpu.float()).double().mean()) > 0.999
    got = fp8.linear(x.cuda(), fp8.quantize_weight(weight.cuda())).cpu()
    want = fp8.linear(x, fp8.quantize_weight(weight)).float()
    assert float((got.float() - want).norm() / want.norm()) < 5e-3  # tensor cores add e4m3 in fewer bits
