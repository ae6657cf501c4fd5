"""Vectors of the older containers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def vectors_dir(fixtures_dir: Path) -> Path:
    return fixtures_dir / "vectors"


@pytest.fixture(scope="session")
def records(vectors_dir: Path) -> dict[str, dict[str, Any]]:
    """Manifest records, golden and malformed, by file name without folder and suffix."""
    manifest = json.loads((vectors_dir / "manifest.json").read_text())
    return {Path(record["file"]).stem: record for record in manifest["golden"] + manifest["malformed"]}


@pytest.fixture(scope="session")
def vector(vectors_dir: Path, records: dict[str, dict[str, Any]]) -> Callable[[str], Path]:
    """Path of a vector by name."""
    return lambda name: vectors_dir / str(records[name]["file"])


@pytest.fixture
def put(tmp_path: Path) -> Callable[[bytes], Path]:
    """Writes bytes to a fresh file and gives its path."""

    def write(data: bytes) -> Path:
        path = tmp_path / "model.apr"
        path.write_bytes(data)
        return path

    return write
