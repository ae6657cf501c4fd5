"""libggml: found without llama_cpp, trusted by known answers only, called by many threads; the choice of backends."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ggml_cases import BLOCKS, BY_NUMPY, COLS, SLOW, random_blocks, values_of, weights_of

from aprfmt.codecs import DTYPES, backend, ggml
from aprfmt.errors import MissingDependencyError, UsageError

_REAL = next(backend.libraries(), None)
needs_library = pytest.mark.skipif(not any(backend.libraries()), reason=backend.absence())
by_block = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in BLOCKS]
)


def real() -> backend.GgmlLibrary:
    assert _REAL is not None
    return _REAL


@pytest.mark.parametrize("package", backend.PACKAGES)
def test_each_package_has_all_functions_and_stays_unimported(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    code = (
        "import sys; from aprfmt.codecs import DTYPES, ggml, backend\n"
        f"backend.PACKAGES = {{{package!r}: 'it'}}\n"
        "lib, = backend.libraries()\n"
        "print(lib.path.parents[1].name, lib.version != 'unknown (unknown)', repr(backend.absence()),"
        " ggml.encodable('Q4_K'), 'llama_cpp' in sys.modules, 'numpy' in sys.modules)\n"
        f"for name in {[name for name in BLOCKS if name not in SLOW]}:\n"
        "    for check in (ggml.decode_agrees, ggml.encode_agrees):\n"
        "        if not check(lib, DTYPES[name]): print(name, check)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [package, "True", "''", "True", "False", "False"]


@pytest.mark.llama
def test_llama_cpp_can_be_imported_afterwards() -> None:
    """It cannot where a libggml of another version is in the process before its own."""
    for package in backend.PACKAGES:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    code = (
        "import numpy as np; from aprfmt.codecs import ggml\n"
        "ggml.encode('Q4_K', np.ones(256, 'f4'))\nimport llama_cpp\nllama_cpp.llama_backend_init()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def find(monkeypatch: pytest.MonkeyPatch, spec: Any) -> Any:
    """What a search finds when the package is `spec`."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    return backend._find.__wrapped__("libggml")


def test_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find(monkeypatch, None) == "libggml-python is not installed"
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    assert "lacks" in find(monkeypatch, spec)
    monkeypatch.setattr(backend, "_find", lambda package: f"no {package}")
    assert [*backend.libraries()] == []
    assert backend.absence() == "no llama_cpp; no libggml"


@pytest.mark.skipif(sys.platform != "linux", reason="the name of the file is that of Linux")
@pytest.mark.parametrize("folder", ["lib", "lib64"])
def test_files_that_are_no_libggml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str) -> None:
    path = tmp_path / folder / "libggml-base.so"
    path.parent.mkdir()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    path.write_bytes(b"\x7fELF, but no more of it")
    assert "cannot be used" in find(monkeypatch, spec)
    path.unlink()
    shutil.copy(np._core._multiarray_umath.__file__, path)  # type: ignore[attr-defined]
    assert "ggml_type_name" in find(monkeypatch, spec)


@pytest.mark.turns(of=16)
@by_block
def test_known_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the numpy code, and of the installed library where there is one."""
    row = DTYPES[name]
    assert row.answers is not None
    decoded, encoded = row.answers
    monkeypatch.setenv(backend.VARIABLE, "numpy")
    assert ggml.checksum_values(ggml.decode(name, ggml.stored_pattern(row))) == decoded
    if any(backend.libraries()):
        assert ggml.decode_agrees(real(), row)
        assert ggml.checksum_encoding(real(), row) == encoded
    if name in BY_NUMPY and any(backend.libraries()):
        values = ggml.value_pattern()
        out = np.empty(values.size // row.block * row.block_bytes, dtype="u1")
        assert row.ggml_id is not None
        real().quantize(row.ggml_id, values.ctypes.data, out.ctypes.data, 1, values.size, None)
        assert np.array_equal(ggml.encode(name, values), out)


class Other(backend.GgmlLibrary):
    """A library of another version."""

    def __init__(self, **different: Any) -> None:
        super().__init__(real().path)
        self.version = "9.9 (other)"
        for name, function in different.items():
            setattr(self, name, function)


def other_values(symbol: str) -> Callable[[int, int, int], None]:
    def run(source: int, target: int, n: int) -> None:
        function = real().row(symbol)
        assert function is not None
        function(source, target, n)
        (ctypes.c_float * n).from_address(target)[n - 1] += 1.0

    return run


def other_bytes(ggml_id: int, source: int, target: int, rows: int, cols: int, weights: int | None) -> int:
    written = real().quantize(ggml_id, source, target, rows, cols, weights)
    (ctypes.c_ubyte * written).from_address(target)[written - 3] ^= 1
    return written


DIFFERENT: dict[str, dict[str, Any]] = {
    "other values": {"row": other_values, "quantize": other_bytes},
    "another size": {"geometry": lambda ggml_id: ("q8_0", 32, 36)},
    "another name": {"geometry": lambda ggml_id: ("q9", 32, 34)},
    "no such type": {"row": lambda symbol: None, "has": lambda symbol: False},
}


@needs_library
@pytest.mark.parametrize("kind", DIFFERENT)
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K", "IQ4_XS"])
def test_a_library_that_disagrees_is_not_used(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, values = random_blocks(name, 20, sane=True), values_of("normal").reshape(-1)
    monkeypatch.setenv(backend.VARIABLE, "numpy")
    want = ggml.decode(name, stored)
    monkeypatch.delenv(backend.VARIABLE)
    other = Other(**DIFFERENT[kind])
    monkeypatch.setattr(backend, "libraries", lambda: iter([other]))
    np.testing.assert_array_equal(ggml.decode(name, stored), want)
    if name in BY_NUMPY:
        assert ggml.encode(name, values).size
    else:
        with pytest.raises(MissingDependencyError, match=r"9\.9 \(other\)"):
            ggml.encode(name, values)
    monkeypatch.setenv(backend.VARIABLE, "ggml")
    runs: list[Callable[[], object]] = [lambda: ggml.decode(name, stored), lambda: ggml.encode(name, values)]
    for run in runs:
        with pytest.raises(MissingDependencyError, match=str(real().path)) as info:
            run()
        assert info.value.exit_code == 6


@needs_library
@pytest.mark.parametrize("kind", DIFFERENT)
def test_the_next_library_takes_over_what_the_first_does_otherwise(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of("normal").reshape(-1)
    want = ggml.encode("Q4_K", values)
    monkeypatch.setattr(backend, "libraries", lambda: iter([Other(**DIFFERENT[kind]), real()]))
    assert ggml.encodable("Q4_K")
    assert np.array_equal(ggml.encode("Q4_K", values), want)


@needs_library
def test_a_library_that_writes_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Other()
    monkeypatch.setattr(backend, "libraries", lambda: iter([other]))
    values = values_of("normal").reshape(-1)
    assert ggml.encode("Q4_K", values).size
    monkeypatch.setattr(other, "quantize", lambda *args: 144)
    with pytest.raises(MissingDependencyError, match="144 of"):
        ggml.encode("Q4_K", values)


@needs_library
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q4_0", "Q8_0", "IQ4_XS", "IQ3_XXS"])
def test_many_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that nobody used yet, by eight threads at once, encoding and decoding."""
    values, weights = values_of("normal"), weights_of("random")
    want = ggml.encode(name, values.reshape(-1), COLS, weights)
    back = ggml.decode(name, want)
    other = Other()
    monkeypatch.setattr(backend, "libraries", lambda: iter([other]))
    start = threading.Barrier(8)

    def work(_: int) -> bool:
        start.wait()
        got = ggml.encode(name, values.reshape(-1), COLS, weights)
        return np.array_equal(got, want) and np.array_equal(ggml.decode(name, got), back)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@needs_library
def test_known_answers_are_asked_once() -> None:
    lib, calls = Other(), []

    def check() -> bool:
        time.sleep(0.05)
        calls.append(1)
        return False

    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(lambda _: lib.agrees("x", check), range(16)))
    assert len(calls) == 1
    assert lib.agrees("y", lambda: True)


def test_order_of_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    assert backend.order("torch", "ggml", "numpy") == ("torch", "ggml", "numpy")
    monkeypatch.setenv(backend.VARIABLE, "")
    assert backend.order("ggml") == ("ggml",)
    monkeypatch.setenv(backend.VARIABLE, "numpy")
    assert backend.order("torch", "ggml", "numpy") == ("numpy",)
    assert backend.order("ggml") == ()
    monkeypatch.setenv(backend.VARIABLE, "torch")
    assert backend.order("torch", "numpy") == ("torch",)
    assert backend.order("ggml", "numpy") == ("numpy",)
    monkeypatch.setattr(backend, "has_torch", lambda: False)
    with pytest.raises(MissingDependencyError, match="APR_BACKEND=torch"):
        backend.order("numpy")
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    with pytest.raises(UsageError, match="'cuda'") as info:
        ggml.decode("Q8_0", bytes(34))
    assert "numpy, ggml, torch" in str(info.value.hint)


def test_what_needs_the_library_when_it_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.VARIABLE, "numpy")
    assert not ggml.encodable("Q4_K")
    with pytest.raises(MissingDependencyError, match="APR_BACKEND=numpy disables it"):
        ggml.encode("Q4_K", values_of("normal").reshape(-1))
    monkeypatch.setenv(backend.VARIABLE, "torch")
    monkeypatch.setattr(backend, "has_torch", lambda: True)
    with pytest.raises(MissingDependencyError, match="APR_BACKEND=torch disables it"):
        ggml.encode("Q4_K", values_of("normal").reshape(-1))
