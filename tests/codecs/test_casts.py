"""Casts between floats: every code on every backend against torch, the rule for NaN, overflow counts, odd buffers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from aprfmt.codecs import plain
from aprfmt.codecs.backend import libraries
from aprfmt.errors import MissingDependencyError, UsageError

CODES = np.arange(65536, dtype="<u2")
TORCH = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
TOP = {"F16": 0x7C00, "BF16": 0x7F80}
END = {"F16": 65520.0, "BF16": 2.0**128 - 2.0**119, "F8_E4M3": 464.00001, "F8_E5M2": 61440.0}
"""Half a step above the largest value, the least that rounds beyond it; E4M3 rounds the tie down."""


@pytest.fixture(params=["numpy", "ggml", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "ggml" and not any(libraries()):
        pytest.skip("no libggml")
    monkeypatch.setenv("APR_BACKEND", request.param)
    return str(request.param)


@pytest.fixture(autouse=True)
def fresh_choice() -> Iterator[None]:
    plain._chosen.cache_clear()
    yield
    plain._chosen.cache_clear()


def grid() -> np.ndarray:
    """Every sign and exponent, with mantissas around each rounding point and some at random."""
    edges = {0, 0x7FFFFF} | {(1 << i) + d for i in range(1, 23) for d in (-1, 0, 1)}
    edges |= {0x3 << i for i in range(21)} | {(0x5 << i) - 1 for i in range(20)} | {(0x7 << i) + 1 for i in range(20)}
    mantissas = np.array(sorted(m & 0x7FFFFF for m in edges), dtype="<u4")
    mantissas = np.concatenate([mantissas, np.random.default_rng(2).integers(0, 1 << 23, 300, dtype="<u4")])
    heads = np.arange(512, dtype="<u4") << np.uint32(23)
    return np.asarray(heads[:, None] | mantissas).reshape(-1).view("<f4")


def by_torch(source: str, target: str, raw: np.ndarray) -> np.ndarray:
    """Stored elements of `source` as those of `target`, NaNs by the rule of codecs.plain."""
    tensor = torch.from_numpy(raw.view(f"<i{raw.itemsize}").copy()).view(TORCH[source])
    out = tensor.to(TORCH[target])
    kind = f"<u{out.element_size()}"
    if not raw.size:
        return np.empty(0, kind)
    codes = out.view(torch.uint8).numpy().copy().view(kind)
    nans = tensor.to(torch.float64).isnan().numpy()
    if target in ("F16", "BF16", "F32"):
        codes[nans] = nan_codes(source, target, raw)[nans]
    return codes


def nan_codes(source: str, target: str, raw: np.ndarray) -> np.ndarray:
    """What a NaN of each code becomes: sign and top mantissa bits kept, the quiet bit set."""
    if source == "F16":
        codes = raw.view("<u2").astype("<u4")
        bits = (codes & 0x8000) << 16 | 0x7FC00000 | (codes & 0x3FF) << 13
    elif source == "BF16":
        bits = raw.view("<u2").astype("<u4") << 16
    else:
        bits = raw.astype("<f4").view("<u4")
    if target == "F32":
        return bits
    if target == "BF16":
        return (bits >> 16 | 0x40).astype("<u2")
    return (bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x3FF).astype("<u2")


def cast(source: str, target: str, raw: np.ndarray) -> tuple[np.ndarray, int]:
    counts: list[int] = []
    out = plain.cast(source, target, raw.tobytes(), counts.append)
    long_way = plain.encode(target, plain.decode(source, raw.tobytes()))
    assert out.tobytes() == long_way.tobytes()
    return out.view(f"<u{out.itemsize}"), sum(counts)


@pytest.mark.parametrize("target", ["F32", "F64", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("source", ["F16", "BF16"])
def test_every_16_bit_code(source: str, target: str, backend: str) -> None:
    got, _ = cast(source, target, CODES)
    if target == "F64":
        finite = TOP[source] > CODES & 0x7FFF
        assert np.array_equal(got[finite], by_torch(source, target, CODES)[finite])
        assert np.isnan(got.view("<f8")[TOP[source] < CODES & 0x7FFF]).all()
    elif source != target:
        assert np.array_equal(got, by_torch(source, target, CODES))


@pytest.mark.parametrize("target", ["F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_float32_of_every_kind(target: str, backend: str) -> None:
    values = grid()
    got, lost = cast("F32", target, values)
    want = by_torch("F32", target, values)
    assert np.array_equal(got, want)
    with np.errstate(invalid="ignore"):
        too_large = np.abs(values.astype("<f8")) >= END[target]
    if target != "F8_E4M3":
        too_large &= np.isfinite(values)
    assert lost == np.count_nonzero(too_large) > 0


@pytest.mark.parametrize("target", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("seed", range(4))
def test_random_float32_in_8_bits(target: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(300_000) * 10.0 ** rng.integers(-8, 6)).astype("<f4")
    any_bits = rng.integers(0, 1 << 32, 300_000, dtype="<u4").view("<f4")
    for raw in (values, any_bits):
        assert np.array_equal(cast("F32", target, raw)[0], by_torch("F32", target, raw))


@pytest.mark.parametrize(("target", "codes"), [
    ("F8_E4M3", {448.0: 0x7E, 432.0: 0x7E, 431.99: 0x7D, -480.0: 0xFE, np.inf: 0x7E, 2.0**-10: 0, 1.5 * 2.0**-9: 2}),
    ("F8_E5M2", {57344.0: 0x7B, 61440.0: 0x7C, 61439.996: 0x7B, -1e30: 0xFC, 2.0**-17: 0, 1.5 * 2.0**-16: 2}),
])  # fmt: skip
def test_8_bits_at_their_ends(target: str, codes: dict[float, int]) -> None:
    """Ties, the first value beyond the largest, the smallest."""
    values = np.array(list(codes), dtype="<f4")
    assert plain.encode(target, values).tolist() == list(codes.values())


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_8_bits_are_their_own_inverse(dtype: str) -> None:
    codes = np.arange(256, dtype="<u1")
    values = plain.decode(dtype, codes)
    kept = ~np.isnan(values)
    for wide in (values, values.astype("<f2"), values.astype("<f8")):
        assert np.array_equal(plain.encode(dtype, wide)[kept], codes[kept])


def test_float64(backend: str) -> None:
    tie = 1 + 2.0**-11 + 2.0**-40  # rounded to float32 first it would be a tie and go down
    values = np.array([tie, -np.inf, np.nan, 1e39, 7e4, 1e-320, -0.0])
    counts: list[int] = []
    assert plain.encode("F16", values, counts.append).tolist() == [
        0x3C01, 0xFC00, 0x7E00, 0x7C00, 0x7C00, 0, 0x8000
    ]  # fmt: skip
    assert sum(counts) == 2
    counts.clear()
    assert plain.encode("BF16", values, counts.append).tolist() == [
        0x3F80, 0xFF80, 0x7FC0, 0x7F80, 0x4789, 0, 0x8000
    ]  # fmt: skip
    assert sum(counts) == 1


@pytest.mark.parametrize("n", [0, 1, 3, 15, 16, 17, 65535, 65536, 65537, 140001])
@pytest.mark.parametrize(("source", "target"), [("BF16", "F16"), ("F16", "F32"), ("F32", "BF16"), ("F32", "F8_E4M3")])
def test_lengths_and_buffers(source: str, target: str, n: int, backend: str) -> None:
    """No multiple of a vector, beyond one block; unaligned, read-only and strided all the same."""
    rng = np.random.default_rng(n)
    kind = "<f4" if source == "F32" else "<u2"
    values = rng.standard_normal(n).astype("<f4")
    raw = values if source == "F32" else plain.encode(source, values).view("<u2")
    want = by_torch(source, target, raw)
    shifted = bytes(1) + raw.tobytes()
    got = plain.cast(source, target, memoryview(shifted)[1:])
    assert np.array_equal(got.view(want.dtype), want)
    wide = np.zeros((n, 2), dtype=kind)
    wide[:, 1] = raw
    strided = wide[:, 1]
    if source != "BF16":
        strided = strided.view("<f2") if source == "F16" else strided
        assert np.array_equal(plain.encode(target, strided).view(want.dtype), want)


def test_threads_do_not_meet(backend: str) -> None:
    raw = plain.encode("BF16", np.random.default_rng(3).standard_normal(200_000).astype("<f4"))
    want = by_torch("BF16", "F16", raw).tobytes()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: plain.cast("BF16", "F16", raw).tobytes(), range(16)))
    assert set(results) == {want}


def test_a_library_that_rounds_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As builds for AVX512-BF16 do it: denormals become zero."""

    def flushing(values: np.ndarray, out: np.ndarray) -> None:
        plain._NUMPY["F32", "BF16"](values, out)
        out[out & 0x7F80 == 0] &= 0x8000

    monkeypatch.setattr(plain, "_ggml", lambda src, dst: flushing)
    monkeypatch.setenv("APR_BACKEND", "ggml")
    if not any(libraries()):
        pytest.skip("no libggml")
    assert plain._kernel("F32", "BF16") is plain._NUMPY["F32", "BF16"]
    assert plain.encode("BF16", np.array([1e-40], "<f4")).tolist() == [1]


@pytest.mark.skipif(not any(libraries()), reason="no libggml")
def test_the_library_is_used_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APR_BACKEND", "ggml")
    for pair, reference in plain._NUMPY.items():
        assert plain._kernel(*pair) is not reference, pair


def test_forced_backends_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APR_BACKEND", "cuda")
    with pytest.raises(UsageError, match="cuda"):
        plain.encode("F16", np.zeros(3, "<f4"))
    monkeypatch.setenv("APR_BACKEND", "ggml")
    monkeypatch.setattr("aprfmt.codecs.backend.libraries", lambda: iter(()))
    with pytest.raises(MissingDependencyError, match="APR_BACKEND"):
        plain.encode("F16", np.zeros(3, "<f4"))
