"""On a GPU: a run names its kernels, and says which optional one it does not use and why."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import train_runs

from aprtrain import features
from aprtrain.kernels import gated
from aprtrain.network import attention

pytestmark = pytest.mark.cuda

Distil = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def untried() -> Iterator[None]:
    """Kernels are tried again, before and after."""
    tried = (features.importable, gated.products_agree, attention._flash4_agrees, attention._cudnn_agrees)
    for found in tried:
        found.cache_clear()
    yield
    for found in tried:
        found.cache_clear()


def log_of(distil: Distil, **given: Any) -> str:
    stream = io.StringIO()
    distil(stream=stream, device="cuda", deterministic=False, **given)
    return stream.getvalue()


def test_quack_that_cannot_be_imported_is_named_with_the_exception(
    distil: Distil, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(features, "find_spec", lambda name: object())
    module = features.TABLE["quack"].module
    monkeypatch.setitem(sys.modules, module.partition(".")[0], ModuleType("quack"))
    monkeypatch.setitem(sys.modules, module, None)
    log = log_of(distil)
    reason = (
        f"ModuleNotFoundError: import of {module} halted; None in sys.modules"
        if torch.cuda.get_device_capability()[0] == 9
        else "it needs a Hopper GPU"
    )
    assert f"quack is not used: {reason}" in log
    assert "gated torch" in log
    assert "torch.compile is not used" not in log
    (start,) = train_runs.lines(tmp_path / "run", "start")
    assert any(
        miss["feature"] == "quack" and miss["reason"].startswith(reason) for miss in start["kernels"]["not_used"]
    )


def test_a_run_begins_with_its_kernels(distil: Distil, tmp_path: Path) -> None:
    log = log_of(distil)
    line = next(line for line in log.splitlines() if line.startswith("kernels: "))
    assert "loss Triton, AdamW Triton, compile inductor, fp8 off (not requested), dtype bf16" in line
    (start,) = train_runs.lines(tmp_path / "run", "start")
    missed = {miss["feature"] for miss in start["kernels"]["not_used"]}
    assert "quack" in line or "quack" in missed
    assert "FlashAttention 4" in line or "flash4" in missed  # it may suit the teacher alone


def test_a_run_ends_with_its_plan_and_its_peak(distil: Distil, tmp_path: Path) -> None:
    log = log_of(distil)
    (end,) = train_runs.lines(tmp_path / "run", "end")
    assert end["memory_plan_bytes"] > end["memory_peak_bytes"] > 0
    assert f"memory: plan {end['memory_plan_bytes'] / 2**30:.2f} GiB, peak " in log


def test_a_reproducible_run_says_what_it_leaves_out(distil: Distil) -> None:
    stream = io.StringIO()
    distil(stream=stream, device="cuda", deterministic=True)
    assert "FlashAttention 4 is not used: it is not deterministic (--deterministic)" in stream.getvalue()
