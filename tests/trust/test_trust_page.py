"""docs/trust.md, as a reader types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo_model import build
from doc_pages import run_page

pytest.importorskip("model_signing.signing")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "trust.md"


def test_the_page_runs(tmp_path: Path) -> None:
    build(tmp_path / "model.gguf")
    assert run_page(PAGE, tmp_path, {}) == 10
