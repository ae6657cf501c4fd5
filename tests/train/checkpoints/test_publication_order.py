"""What a training run publishes (tokens, checkpoints, pointers, the model, its page) lasts before it appears."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from publications import WAYS, Order, left_out, on_file_system

import aprfmt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks up descriptors under /proc")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("without", ["", "file", "folder"])
def test_a_run_publishes_nothing_before_it_lasts(
    without: str, way: str, distil: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """With either fsync left out, everything that the run publishes is found to appear too early."""
    order = Order(tmp_path)
    with on_file_system(way), order.watched(), left_out(without):
        distil()
        aprfmt.report(tmp_path / "run", tmp_path / "page.html")
    assert order.shown >= 9
    published = ("tokens", "ckpt-step-000004.apr", "ckpt-step-000004.state", "latest", "model.apr")
    for name in (*published, "page.html") if without == "file" else published[:1] if without else ():
        assert any(name in fault for fault in order.faults), name
    assert bool(order.faults) is bool(without)
