"""Fixtures of the GGUF tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def put(tmp_path: Path) -> Callable[[bytes], Path]:
    """Writes bytes to a file and gives its path."""

    def write(data: bytes) -> Path:
        path = tmp_path / "x.gguf"
        path.write_bytes(data)
        return path

    return write
