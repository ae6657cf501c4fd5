"""A tiny real model and a way to run `apr` in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from demo_model import build

from aprfmt.cli.main import run


@dataclass
class Result:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """Stdout as the one JSON object that it must be."""
        value = json.loads(self.stdout)
        assert isinstance(value, dict)
        return value


Apr = Callable[..., Result]


@pytest.fixture
def apr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Apr:
    """Runs one command line and gives exit code and both streams."""
    for name in ("NO_COLOR", "FORCE_COLOR", "APR_DEBUG", "APR_DEMO_MODEL"):
        monkeypatch.delenv(name, raising=False)

    def call(*words: object) -> Result:
        capsys.readouterr()
        code = run([str(word) for word in words])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    build(path)
    return path


@pytest.fixture(scope="session")
def tiny_apr(tiny_gguf: Path) -> Path:
    from aprfmt.convert.api import import_model

    path = tiny_gguf.with_suffix(".apr")
    import_model(tiny_gguf, path)
    return path
