"""Streaming figures against numpy over the whole tensor."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.codecs.dtypes import find_dtype
from aprfmt.codecs.recode import decode, encode
from aprfmt.codecs.values import BLOCK_VALUES, values
from aprfmt.inspection.stats import Stats, blocks, tensor_stats
from aprfmt.io.source import Source
from aprfmt.model import Tensor


def tensor_of(dtype: str, shape: tuple[int, ...], data: bytes) -> Tensor:
    return Tensor("t", dtype, shape, 7, len(data), Source.from_bytes(b"x" * 7 + data, "memory"))


FLOATS = np.random.default_rng(5).normal(0.3, 2.0, 3 * BLOCK_VALUES + 1024).astype("<f4")


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64", "Q8_0", "Q4_0", "AprQ8", "AprQ4"])
def test_stats_equal_numpy(dtype: str) -> None:
    data = FLOATS.astype("<f8").tobytes() if dtype == "F64" else encode(find_dtype(dtype).name, FLOATS)
    tensor = tensor_of(dtype, (FLOATS.size // 256, 256), bytes(data))
    whole = decode(dtype, tensor.raw(), tensor.shape).astype(np.float64)
    found = tensor_stats(tensor).to_json()
    assert found["mean"] == pytest.approx(whole.mean(), rel=1e-9)
    assert found["std"] == pytest.approx(whole.std(), rel=1e-9)
    assert (found["min"], found["max"]) == (whole.min(), whole.max())
    assert (found["nan_count"], found["inf_count"]) == (0, 0)
    assert found["zero_fraction"] == np.mean(whole == 0)


@given(st.lists(st.floats(width=32), max_size=60), st.integers(1, 9))
def test_stats_do_not_depend_on_the_blocks(numbers: list[float], step: int) -> None:
    data = np.array(numbers, "<f4")
    stats = Stats()
    for start in range(0, data.size, step):
        stats.add(data[start : start + step])
    found = stats.to_json()
    finite = data[np.isfinite(data)].astype(np.float64)
    assert found["nan_count"] == np.isnan(data).sum()
    assert found["inf_count"] == np.isinf(data).sum()
    assert found["zero_fraction"] == (float((data == 0).mean()) if data.size else 0.0)
    if not finite.size:
        assert found["mean"] is found["std"] is found["min"] is None
        return
    scale = max(1e-30, float(np.abs(finite).max()))
    assert found["mean"] is not None
    assert found["std"] is not None
    assert math.isclose(found["mean"], finite.mean(), abs_tol=1e-9 * scale)
    assert math.isclose(found["std"], finite.std(), rel_tol=1e-6, abs_tol=1e-7 * scale)
    assert (found["min"], found["max"]) == (finite.min(), finite.max())


@pytest.mark.parametrize("dtype", ["I8", "U8", "I64", "BOOL", "I32"])
def test_integers(dtype: str) -> None:
    row = find_dtype(dtype)
    assert row.numpy is not None
    data = np.array([0, 1, 1, 0], row.numpy).tobytes()
    found = tensor_stats(tensor_of(dtype, (4,), data)).to_json()
    assert (found["mean"], found["min"], found["max"], found["zero_fraction"]) == (0.5, 0, 1, 0.5)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    data = b"" if 0 in shape else np.float32(2).tobytes()
    found = tensor_stats(tensor_of("F32", shape, data)).to_json()
    assert found["mean"] == (None if 0 in shape else 2.0)


def test_row_padded_k_quant_counts_only_real_values() -> None:
    """Rows of 300 values are stored as two blocks of 256 each; the padding is not looked at."""
    block = find_dtype("Q4_K").block_bytes
    data = bytes(np.random.default_rng(2).integers(0, 60, 3 * 2 * block, "u1"))
    tensor = tensor_of("Q4_K", (3, 300), data)
    joined = np.concatenate(list(blocks(tensor)))
    whole = decode("Q4_K", tensor.raw(), (3, 300)).reshape(-1)
    assert joined.size == 900
    assert np.array_equal(joined, whole, equal_nan=True)


@settings(deadline=None)
@given(st.sampled_from(["F32", "Q8_0", "AprQ4", "AprQ8"]), st.integers(1, 5), st.integers(1, 700))
def test_values_come_in_exact_steps(dtype: str, rows: int, step: int) -> None:
    floats = FLOATS[: rows * 160]
    data = bytes(encode(dtype, floats))
    pieces = list(values(dtype, (rows, 160), lambda: [data[:3], data[3:50], data[50:]], step))
    assert all(piece.size == step for piece in pieces[:-1])
    assert np.array_equal(np.concatenate(pieces), decode(dtype, data, (rows, 160)).reshape(-1))


def test_memory_stays_flat(tmp_path: Path) -> None:
    """A tensor of 64 MiB is scanned in a small fraction of that."""
    import tracemalloc

    path = tmp_path / "big.bin"
    with path.open("wb") as stream:
        stream.truncate(64 << 20)
    with Source.open(path) as source:
        tensor = Tensor("t", "F16", (1 << 15, 1 << 10), 0, 64 << 20, source)
        tracemalloc.start()
        found = tensor_stats(tensor).to_json()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert found["zero_fraction"] == 1.0
    assert peak < 16 << 20
