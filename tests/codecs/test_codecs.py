"""Every dtype against the table: golden bytes, sizes, round trips, other implementations."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from codec_cases import CASES, GGML_ONLY, NOT_DECODED, Case
from ggml_cases import SLOW

from aprfmt.codecs import DTYPES, backend
from aprfmt.codecs.recode import can_encode, decode, decode_torch, encode, recode, recode_jobs, stored_bytes
from aprfmt.errors import AprError, CorruptError, MissingDependencyError, UnsupportedError, UsageError
from aprfmt.io.pipe import run_jobs

BY_NAME = {case.dtype: case for case in CASES}
ENCODABLE = [name for name in DTYPES if can_encode(name) and name not in SLOW]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.dtype)


def random_bytes(name: str, n_blocks: int, seed: int = 7) -> bytes:
    """Blocks of random bytes."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, n_blocks * DTYPES[name].block_bytes, dtype=np.uint8).tobytes()


def test_every_dtype_is_covered() -> None:
    assert {case.dtype for case in CASES} | {*GGML_ONLY, *NOT_DECODED} == set(DTYPES)
    assert {case.dtype for case in CASES if case.error is not None} <= set(ENCODABLE)


@by_case
def test_golden_values(case: Case) -> None:
    got = decode(case.dtype, case.data, case.true_shape)
    assert got.dtype == case.result
    assert got.shape == case.true_shape
    np.testing.assert_array_equal(got.reshape(-1), np.array(case.values, dtype=case.result))
    assert np.array_equal(np.signbit(got.real), np.signbit(np.array(case.values, dtype=case.result).real))


@by_case
def test_golden_bytes(case: Case) -> None:
    if case.encodes:
        assert encode(case.dtype, np.array(case.values, dtype=case.result)) == case.data


@by_case
def test_size_rule(case: Case) -> None:
    assert stored_bytes(case.dtype, case.true_shape) == len(case.data)
    for wrong in (case.data[:-1], case.data + b"\0", b""):
        with pytest.raises(CorruptError, match=r"bytes are stored") as info:
            decode(case.dtype, wrong, case.true_shape, tensor="t")
        assert info.value.tensor == "t"


@pytest.mark.parametrize("name", sorted(set(DTYPES) - set(NOT_DECODED)))
@pytest.mark.parametrize("shape", [(0,), (0, 256), (3, 0)])
def test_empty_tensors(name: str, shape: tuple[int, ...]) -> None:
    assert decode(name, b"", shape).shape == shape
    assert decode_torch(name, b"", shape).shape == shape
    if name in ENCODABLE:
        assert encode(name, np.zeros(shape, dtype=np.float32)) == b""


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_scalar_tensors(name: str) -> None:
    row = DTYPES[name]
    if row.kind == "plain" or row.kind == "aprq":
        assert decode(name, bytes(row.n_bytes(())), ()).shape == ()
    else:
        with pytest.raises(AprError):
            decode(name, bytes(row.block_bytes), ())


@pytest.mark.parametrize("name", [case.dtype for case in CASES if case.error is not None])
@pytest.mark.parametrize("n", [256, 4096, 1 << 17])
def test_round_trip_error(name: str, n: int) -> None:
    error = BY_NAME[name].error
    assert error is not None
    values = (np.random.default_rng(n).standard_normal(n) * 3).astype(np.float32)
    back = decode(name, encode(name, values), (n,)).astype(np.float32)
    top = np.abs(values.reshape(-1, 32)).max(axis=1, keepdims=True)
    if name in ("Q4_1", "Q5_1"):  # the scale spans the block's range
        top = np.ptp(values.reshape(-1, 32), axis=1, keepdims=True)
    if name == "AprQ8":
        top = np.abs(values).max()
    if DTYPES[name].kind == "plain":
        top = np.abs(values).reshape(-1, 32)
    assert (np.abs(back - values).reshape(-1, 32) <= error * top + 1e-30).all()
    again = encode(name, back.reshape(n))
    if name not in ("Q4_1", "Q5_1"):
        np.testing.assert_allclose(decode(name, again, (n,)), back, atol=float(np.max(top)) * 1e-3)


@pytest.mark.parametrize("name", ENCODABLE)
def test_zero_block(name: str) -> None:
    zeros = decode(name, encode(name, np.zeros(256, dtype=np.float32)), (256,))
    assert not zeros.any()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_every_pattern_as_torch_reads_it(name: str) -> None:
    row = DTYPES[name]
    n = 256 if row.block_bytes == 1 else 65536
    if row.block_bytes <= 2:
        data = np.arange(n, dtype=f"<u{row.block_bytes}").tobytes()
    else:
        data = random_bytes(name, n)
    got = decode_torch(name, data, (n,))
    want = decode(name, data, (n,))
    assert got.element_size() == row.block_bytes
    with np.errstate(invalid="ignore"):  # signalling NaNs are among the patterns
        wide = want.astype(np.float64)
    np.testing.assert_array_equal(got.to(torch.float64).numpy(), wide)


@by_case
def test_torch_owns_its_memory(case: Case) -> None:
    data = bytearray(case.data)
    got = decode_torch(case.dtype, memoryview(data).toreadonly(), case.true_shape)
    data[:] = bytes(len(data))
    want = np.array(case.values, dtype=case.result)
    kind = torch.complex128 if case.dtype == "C64" else torch.float64
    np.testing.assert_array_equal(got.to(kind).numpy(), want.astype(np.complex128 if case.dtype == "C64" else float))


def test_plain_dtypes_are_not_copied() -> None:
    data = bytearray(struct.pack("<4f", 1, 2, 3, 4))
    array = decode("F32", data, (2, 2))
    data[:4] = struct.pack("<f", 9.0)
    assert array[0, 0] == 9.0


def test_unaligned_bytes() -> None:
    data = memoryview(b"x" + struct.pack("<3f", 1, 2, 3))[1:]
    assert decode("F32", data, (3,)).tolist() == [1, 2, 3]
    assert b"".join(recode("F32", "F16", (3,), lambda: [data])) == struct.pack("<3e", 1, 2, 3)


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


@pytest.mark.turns
@pytest.mark.parametrize("target", ENCODABLE)
@pytest.mark.parametrize(
    "source", ["F32", "F64", "F16", "BF16", "I8", "BOOL", "F8_E4M3", "AprQ4", "AprQ8", "Q4_1", "Q6_K"]
)
def test_streams_equal_whole_tensors(source: str, target: str) -> None:
    shape = (9, 256)
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    data = (
        encode(source, values)
        if can_encode(source)
        else random_bytes(source, stored_bytes(source, shape) // DTYPES[source].block_bytes)
    )
    if source in ("Q6_K", "F8_E4M3"):  # sane scales, no NaN
        data = bytes(b & 0x3F for b in data)
    decoded = decode(source, data, shape)
    want = data if source == target else encode(target, decoded)
    for size in (1, 7, 1000, 1 << 20):
        assert b"".join(recode(source, target, shape, lambda size=size: pieces(data, size))) == want  # type: ignore[misc]


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_padded_rows(name: str) -> None:
    """Rows that blocks do not divide are padded one by one; the padding is not part of the tensor."""
    row = DTYPES[name]
    rows, cols = 5, row.block + row.block // 2
    data = bytes(b & 0x3F for b in random_bytes(name, rows * 2))
    full = decode(name, data, (rows, 2 * row.block))
    assert stored_bytes(name, (rows, cols)) == len(data)
    np.testing.assert_array_equal(decode(name, data, (rows, cols)), full[:, :cols])
    streamed = b"".join(recode(name, "F32", (rows, cols), lambda: pieces(data, 77)))
    np.testing.assert_array_equal(np.frombuffer(streamed, "<f4").reshape(rows, cols), full[:, :cols])
    with pytest.raises(UsageError, match="do not divide"):
        recode("F32", "Q8_0", (rows, 33), lambda: [])


def test_bytes_of_the_wrong_length_are_refused() -> None:
    for data in (b"", bytes(15), bytes(17), bytes(400)):
        with pytest.raises(CorruptError, match="of 16 bytes"):
            list(recode("F32", "F16", (4,), lambda data=data: [data]))  # type: ignore[misc]
    with pytest.raises(CorruptError):
        list(recode("AprQ8", "F32", (4,), lambda: [b"\0\0"]))


def test_what_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "libraries", lambda: iter(()))
    with pytest.raises(MissingDependencyError, match=r"llama\.cpp") as info:
        recode("F32", "Q4_K", (256,), lambda: [])
    assert info.value.hint
    with pytest.raises(UsageError, match="I8"):
        encode("I8", np.zeros(4, dtype=np.float32))
    with pytest.raises(UsageError, match="complex"):
        recode("C64", "F32", (1,), lambda: [bytes(8)])
    for name in NOT_DECODED:
        with pytest.raises(UnsupportedError) as unsupported:
            decode(name, bytes(DTYPES[name].block_bytes), (DTYPES[name].block,), tensor="w")
        assert unsupported.value.tensor == "w"


def test_memory_does_not_grow_with_the_tensor() -> None:
    import tracemalloc

    n = 1 << 25
    piece = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32).tobytes()

    def read() -> Iterator[bytes]:
        for _ in range(n * 4 // len(piece)):
            yield piece

    for target in ("F16", "AprQ8"):
        tracemalloc.start()
        total = sum(memoryview(chunk).nbytes for chunk in recode("F32", target, (n // 256, 256), read))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert total == stored_bytes(target, (n // 256, 256))
        assert peak < 12 << 20


def test_imports_stay_cheap() -> None:
    code = (
        "import sys, aprfmt.codecs.recode, aprfmt.arch.names, aprfmt.arch.links;"
        "print([m for m in ('numpy', 'gguf', 'torch', 'transformers') if m in sys.modules])"
    )
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.llama
@pytest.mark.skipif(not any(backend.libraries()), reason="no libggml")
def test_weights_of_outer_dims_repeat() -> None:
    values = np.random.default_rng(0).standard_normal((2, 3, 4, 256)).astype("<f4")
    weights = np.random.default_rng(1).random(3 * 256).astype("<f4") + 0.1

    def bytes_of(array: Any) -> bytes:
        items = recode_jobs("F32", "Q4_0", array.shape, lambda unit: [array.tobytes()], None, weights)
        return b"".join(map(bytes, run_jobs(items)))

    assert bytes_of(values) == bytes_of(values[0]) + bytes_of(values[1])
    assert bytes_of(values[0]) != encode("Q4_0", values[0])
