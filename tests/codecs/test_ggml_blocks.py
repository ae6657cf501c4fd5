"""Every GGML block type, on every backend: the same bytes, the same values, the same refusals."""

from __future__ import annotations

import ctypes

import gguf
import gguf.quants
import numpy as np
import pytest
from codec_cases import NOT_DECODED, NOT_IN_GGUF_PY
from ggml_cases import (
    BLOCKS,
    BY_LIBRARY,
    BY_NUMPY,
    COLS,
    FOREIGN,
    SLOW,
    VALUES,
    Array,
    random_blocks,
    values_of,
    weights_of,
)

from aprfmt.codecs import DTYPES, backend, ggml
from aprfmt.errors import AprError, MissingDependencyError, RefusedError, UnsupportedError, UsageError

needs_library = pytest.mark.skipif(not any(backend.libraries()), reason=backend.absence())
by_library = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in BY_LIBRARY]
)


def encoded(name: str, values: Array, weights: Array | None = None) -> bytes:
    return ggml.encode(name, values.reshape(-1), values.shape[-1], weights).tobytes()


def by_hand(name: str, values: Array, weights: Array | None) -> bytes:
    """ggml_quantize_chunk, all rows at once."""
    lib, row = next(backend.libraries(), None), DTYPES[name]
    assert lib is not None
    assert row.ggml_id is not None
    out = np.zeros(values.size // row.block * row.block_bytes, dtype="u1")
    address = None if weights is None else weights.ctypes.data
    rows, cols = values.shape
    assert lib.quantize(row.ggml_id, values.ctypes.data, out.ctypes.data, rows, cols, address) == out.size
    return out.tobytes()


def use(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(backend.VARIABLE, name)


def test_every_block_type_is_covered() -> None:
    assert {*BLOCKS, *NOT_DECODED} == {name for name, row in DTYPES.items() if row.kind == "ggml"}
    for name in BLOCKS:
        if name not in NOT_IN_GGUF_PY:
            sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
            assert sizes == (DTYPES[name].block, DTYPES[name].block_bytes)
    for name in NOT_DECODED:
        assert not ggml.decodable(name)
        assert not ggml.encodable(name)
        with pytest.raises(UnsupportedError):
            ggml.decode(name, bytes(DTYPES[name].block_bytes))


@needs_library
@pytest.mark.llama
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", BY_NUMPY)
def test_backends_write_the_same_bytes(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of(kind)
    use(monkeypatch, "numpy")
    ours = attempt(name, values)
    use(monkeypatch, "ggml")
    assert attempt(name, values) == ours
    monkeypatch.delenv(backend.VARIABLE)
    assert attempt(name, values) == ours
    if isinstance(ours, bytes):
        assert by_hand(name, values, None) == ours


def attempt(name: str, values: Array) -> bytes | str:
    try:
        return encoded(name, values)
    except RefusedError as refusal:
        return str(refusal)


@pytest.mark.parametrize("kind", VALUES)
def test_numpy_writes_the_bytes_of_gguf_py(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q8_0 is the only type that both write; where gguf-py is the backend, the test above holds it to llama.cpp."""
    values = values_of(kind)
    use(monkeypatch, "numpy")
    with np.errstate(all="ignore"):
        want = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0).tobytes()
    assert attempt("Q8_0", values) == want


@pytest.mark.turns(of=8, by="name")  # tables of a type are built for seconds
@needs_library
@pytest.mark.llama
@pytest.mark.parametrize("kind", VALUES)
@by_library
def test_library_is_called_as_llama_cpp_calls_it(name: str, kind: str) -> None:
    values = values_of(kind)
    for weights in (None, weights_of("random"), weights_of("sparse")):
        if weights is None and ggml.needs_weights(name):
            with pytest.raises(RefusedError, match="needs an importance matrix") as info:
                encoded(name, values)
            assert "--imatrix" in str(info.value.hint)
            continue
        assert encoded(name, values, weights) == by_hand(name, values, weights)


@needs_library
@pytest.mark.llama
@pytest.mark.parametrize("name", BY_NUMPY)
def test_importance_of_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, weights = values_of("normal"), weights_of("sparse")
    got = encoded(name, values, weights)
    assert got == by_hand(name, values, weights)
    matters = got != encoded(name, values)
    use(monkeypatch, "numpy")
    if matters:
        with pytest.raises(MissingDependencyError, match="APR_BACKEND=numpy"):
            encoded(name, values, weights)
    else:
        assert encoded(name, values, weights) == got


@pytest.mark.parametrize(
    "weights",
    [np.ones(COLS - 1), np.full(COLS, -1.0), np.full(COLS, np.nan), np.full(COLS, np.inf), np.full(COLS, 1e30)],
    ids=["too few", "negative", "NaN", "infinite", "huge"],
)
def test_what_is_no_importance(weights: Array) -> None:
    with pytest.raises(RefusedError, match="importance"):
        encoded("Q8_0", values_of("normal"), weights.astype("f4"))


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("name", BLOCKS)
def test_foreign_values_are_refused(name: str, foreign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of("normal")
    values[3, 77] = FOREIGN[foreign]
    for choice in ("numpy", "ggml"):
        if (choice == "ggml" and not any(backend.libraries())) or (choice == "numpy" and name in BY_LIBRARY):
            continue
        if name in SLOW:
            monkeypatch.setattr(ggml, "encode_agrees", lambda lib, row: True)
        use(monkeypatch, choice)
        with pytest.raises(RefusedError, match=f"value {1000 + 3 * COLS + 77} is {FOREIGN[foreign]},") as found:
            ggml.encode(name, values.reshape(-1), COLS, weights_of("random"), start=1000) if (
                ggml.needs_weights(name)
            ) else ggml.encode(name, values.reshape(-1), COLS, start=1000)
        assert "damaged: apr validate" in str(found.value.hint)


@pytest.mark.parametrize("name", [name for name in BY_NUMPY if name != "NVFP4"])
def test_values_beyond_the_scales_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp itself writes such blocks and then refuses them."""
    values = values_of("normal")
    # MXFP4 would give a block of this size the scale NaN.
    values[2] = 1.5e-38 if name == "MXFP4" else np.resize([1e9, -1e9], COLS)
    for choice in ("numpy", "ggml"):
        if choice == "ggml" and not any(backend.libraries()):
            continue
        use(monkeypatch, choice)
        with pytest.raises(RefusedError, match="exceeds the scale range") as info:
            encoded(name, values)
        assert f"value {2 * COLS}" in str(info.value)


@needs_library
@pytest.mark.llama
@pytest.mark.parametrize("sane", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_backends_read_the_same_values(name: str, sane: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = random_blocks(name, 700, sane=sane)
    use(monkeypatch, "numpy")
    ours = ggml.decode(name, stored)
    use(monkeypatch, "ggml")
    other = ggml.decode(name, stored)
    np.testing.assert_array_equal(ours, other)  # any NaN equals any NaN
    number = ~np.isnan(ours)
    assert np.array_equal(ours[number].view("u4"), other[number].view("u4"))


@pytest.mark.parametrize("choice", ["numpy", "ggml"])
@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in NOT_IN_GGUF_PY])
def test_values_are_those_of_gguf_py(name: str, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if choice == "ggml" and not any(backend.libraries()):
        pytest.skip(backend.absence())
    use(monkeypatch, choice)
    stored = random_blocks(name, 3000, sane=False)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(ggml.decode(name, stored), want.reshape(-1))


@pytest.mark.parametrize("choice", ["numpy", "ggml"])
def test_odd_addresses_and_no_values(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if choice == "ggml" and not any(backend.libraries()):
        pytest.skip(backend.absence())
    use(monkeypatch, choice)
    for name in ("Q4_0", "Q6_K", "IQ1_M", "MXFP4"):
        stored = random_blocks(name, 9, sane=True).tobytes()
        np.testing.assert_array_equal(ggml.decode(name, memoryview(b"x" + stored)[1:]), ggml.decode(name, stored))
        assert ggml.decode(name, b"").size == 0
    values = values_of("normal")
    odd = np.frombuffer(b"x" + values.tobytes(), dtype="u1")[1:].view("f4")
    assert encoded("Q4_0", odd.reshape(values.shape)) == encoded("Q4_0", values)
    assert encoded("Q4_0", values[:0]) == b""
    with pytest.raises(UsageError, match="do not divide"):
        ggml.encode("Q4_0", values.reshape(-1)[:33], 33)


@pytest.mark.parametrize("name", BY_NUMPY)
def test_values_are_not_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "numpy")
    for rows in (1, 3):
        values = -np.abs(values_of("normal")[:rows, : DTYPES[name].block])
        before = values.copy()
        encoded(name, values)
        assert np.array_equal(values, before)


@needs_library
@pytest.mark.llama
@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in ("IQ2_XXS", "IQ2_XS", "IQ1_S")])
def test_finite_scales_as_llama_cpp_sees_them(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    lib, ggml_id = next(backend.libraries(), None), DTYPES[name].ggml_id
    assert lib is not None
    assert ggml_id is not None
    stored = random_blocks(name, 400, sane=False)
    is_valid = ctypes.CDLL(str(lib.path)).ggml_validate_row_data
    is_valid.argtypes, is_valid.restype = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_bool
    want = [is_valid(ggml_id, block.ctypes.data, block.nbytes) for block in stored]
    assert ggml.finite_scales(name, stored).tolist() == want
    if name != "NVFP4":
        assert False in want
        assert "ggml_validate_row_data" in capfd.readouterr().err


def test_rows_of_padding() -> None:
    stored = random_blocks("Q8_0", 6, sane=True)
    rows = ggml.decode("Q8_0", stored).reshape(3, 64)
    assert np.array_equal(ggml.decode("Q8_0", stored, cols=40), rows[:, :40].reshape(-1))


@pytest.mark.parametrize("name", BLOCKS)
def test_without_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "libraries", lambda: iter(()))
    monkeypatch.setattr(backend, "absence", lambda: "it is not there")
    values = values_of("normal")
    assert ggml.encodable(name) == (name in BY_NUMPY)
    assert not ggml.needs_weights(name)
    assert ggml.decode(name, random_blocks(name, 5, sane=True)).size
    if name in BY_NUMPY:
        assert encoded(name, values)
    else:
        with pytest.raises(MissingDependencyError, match="it is not there") as info:
            encoded(name, values)
        assert info.value.exit_code == 6
        assert info.value.hint == "pip install libggml-python"
    use(monkeypatch, "ggml")
    error: type[AprError] = MissingDependencyError
    with pytest.raises(error, match="APR_BACKEND=ggml: it is not there"):
        ggml.decode(name, random_blocks(name, 5, sane=True))
