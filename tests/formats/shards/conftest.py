"""A tiny real model in the forms that are cut into files."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo_model import build

import aprfmt

SHARD_BYTES = 60_000


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama-architecture GGUF with a tokenizer, 194 KB, 20 tensors."""
    path = tmp_path_factory.mktemp("shards") / "tiny.gguf"
    build(path)
    return path


@pytest.fixture(scope="session")
def tiny_apr(tiny_gguf: Path) -> Path:
    """The same imported: with the record of its source file."""
    path = tiny_gguf.with_suffix(".apr")
    aprfmt.import_model(tiny_gguf, path)
    return path


@pytest.fixture(scope="session")
def tiny_q8(tiny_gguf: Path) -> Path:
    """The same with matrices of a dtype that the container stores as rows of bytes."""
    path = tiny_gguf.with_name("q8.apr")
    aprfmt.import_model(tiny_gguf, path, dtype="q8_0")
    return path


@pytest.fixture
def shards(tiny_apr: Path, tmp_path: Path) -> Path:
    """The folder of `tiny_apr` cut into four shards."""
    folder = tmp_path / "shards"
    aprfmt.convert_model(tiny_apr, folder, format="apr-shards", shard_size=SHARD_BYTES)
    return folder
