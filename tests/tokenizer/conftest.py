"""Mixed texts, and vocabulary-only GGUF files for llama.cpp."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from llama_peer import LlamaPeer, Vocabulary
from texts import make_texts


@pytest.fixture(scope="session")
def mixed_texts() -> Callable[[int, Sequence[str]], list[str]]:
    """See make_texts."""
    return make_texts


@pytest.fixture
def llama_vocabulary(tmp_path: Path, llama_cpp: LlamaPeer) -> Callable[[Sequence[tuple[str, Any, Any]]], Vocabulary]:
    """Writes tokenizer keys into a vocabulary-only GGUF and loads it with llama.cpp."""
    import gguf

    count = itertools.count()

    def load(keys: Sequence[tuple[str, Any, Any]]) -> Vocabulary:
        path = tmp_path / f"vocabulary{next(count)}.gguf"
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
        return llama_cpp.vocabulary(path)

    return load
