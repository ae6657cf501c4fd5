"""Here llama.cpp's processes start as they do for users."""

import pytest
from warm_workers import WarmWorkers

from aprfmt.io import child


@pytest.fixture(autouse=True)
def cold_workers(warm_workers: WarmWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts a Python process for each worker."""
    monkeypatch.setattr(child, "_start", warm_workers.cold)
