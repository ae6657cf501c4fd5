"""Mixed texts, and vocabulary-only GGUF files for llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from texts import make_texts


@pytest.fixture(scope="session")
def mixed_texts() -> Callable[[int, Sequence[str]], list[str]]:
    """See make_texts."""
    return make_texts


@pytest.fixture
def llama_vocabulary(tmp_path: Path) -> Iterator[Callable[[Sequence[tuple[str, Any, Any]]], Any]]:
    """Writes tokenizer keys into a vocabulary-only GGUF and loads it with llama.cpp."""
    llama_cpp = pytest.importorskip("llama_cpp")
    import gguf

    loaded: list[Any] = []

    def load(keys: Sequence[tuple[str, Any, Any]]) -> Any:
        path = tmp_path / f"vocabulary{len(loaded)}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, kind, value in keys:
            if isinstance(kind, tuple):
                value_type = gguf.GGUFValueType[kind[0]]
                writer.add_key_value(key, value, value_type, sub_type=gguf.GGUFValueType[kind[1]])
            else:
                writer.add_key_value(key, value, gguf.GGUFValueType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        loaded.append(llama_cpp.Llama(str(path), vocab_only=True, verbose=False))
        return loaded[-1]

    yield load
    for model in loaded:
        model.close()
