"""Panics of libraries in Rust, and a llama.cpp that lacks memory, end in an exit code and a message."""

from __future__ import annotations

import pytest

from aprfmt.cli import main
from aprfmt.errors import OutOfMemoryError
from aprfmt.llama import client

Panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


@pytest.mark.parametrize(
    ("text", "code"),
    [("The global thread pool has not been initialized: ThreadPoolBuildError", 7), ("Onig: Regex search error", 4)],
)
def test_a_panic(text: str, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def panic(arguments: list[str]) -> int:
        raise Panic(text)

    monkeypatch.setattr(main, "_dispatch", panic)
    assert main.run(["vocab"]) == code
    assert text in capfd.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "std::bad_alloc",
        "GGML_ASSERT(ctx->mem_buffer != NULL) failed",
        "OpenBLAS error: Memory allocation",
        "MemoryError: ",
    ],
)
def test_llama_cpp_lacks_memory_under_a_limit(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = client.Llama.__new__(client.Llama)
    llama._name = "m.gguf"
    llama._check_memory(text)
    monkeypatch.setattr(client, "memory_limit", lambda: 128 << 20)
    with pytest.raises(OutOfMemoryError, match="128 MiB"):
        llama._check_memory(text)
