"""A run's memory goes with the run, also without the garbage collector: two runs of one notebook do not add up."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from train_runs import poisoned

from aprfmt.errors import RunError
from aprtrain import budget
from aprtrain.checkpoints.checkpoint import Saver, Snapshot
from aprtrain.loop import Trainer
from aprtrain.models import load_student, load_teacher
from aprtrain.network.decoder import Decoder
from aprtrain.optim.flat import FlatOptimizer

Distil = Callable[..., dict[str, Any]]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, weakref.ref[Any]]]:
    """What a run loads, by name, while nothing collects cycles."""
    found: dict[str, weakref.ref[Any]] = {}

    def student(*args: Any) -> tuple[Decoder, Any, Any]:
        network, optimizer, quantizer = load_student(*args)
        assert isinstance(optimizer, FlatOptimizer)
        parts = {"student": network, "block": network.blocks[0], "parameter": network.embed}
        parts |= {"optimizer": optimizer, "gradient": optimizer.grad, "moments": optimizer.updates.states[0]["mean"]}
        found.update({name: weakref.ref(part) for name, part in parts.items()})
        return network, optimizer, quantizer

    def teacher(*args: Any, **options: Any) -> Any:
        network = load_teacher(*args, **options)
        assert network is not None
        parts = {"teacher": network, "teacher's block": network.decoder.blocks[0]}
        found.update({name: weakref.ref(part) for name, part in parts.items()})
        return network

    monkeypatch.setattr("aprtrain.run.load_student", student)
    monkeypatch.setattr("aprtrain.run.load_teacher", teacher)
    gc.collect()
    gc.disable()
    yield found
    gc.enable()


def alive(held: dict[str, weakref.ref[Any]]) -> list[str]:
    assert len(held) == 8
    return [name for name, part in held.items() if part() is not None]


def tensor_bytes() -> int:
    """Bytes of all storages that the collector knows a tensor of."""
    found = (item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter))
    tensors = [tensor for tensor in found if tensor.layout is torch.strided]  # others have no storage
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("given", [{}, {"compile": "on"}, {"recompute": "block"}])
def test_two_runs_leave_nothing(
    distil: Distil, held: dict[str, weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    given: dict[str, str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Decoder, "compile_blocks", partialmethod(Decoder.compile_blocks, "aot_eager"))
    try:
        distil("one", **given)
        assert alive(held) == []
        before = tensor_bytes()
        distil("two", **given)
        assert alive(held) == []
        assert tensor_bytes() <= before
    finally:
        torch._dynamo.reset()


def test_the_copy_of_the_first_checkpoint_is_gone_at_the_first_step(
    distil: Distil, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[weakref.ref[Any]] = []
    real_trial, real_run = Saver.trial_save, Trainer.run

    def trial_save(self: Saver, snapshot: Snapshot) -> None:
        weights = (weight.data for weight in snapshot.weights.values())
        copies.extend(map(weakref.ref, (*weights, *snapshot.state.values())))
        real_trial(self, snapshot)

    def steps(self: Trainer) -> None:
        assert copies
        assert not [copy for copy in copies if copy() is not None]
        real_run(self)

    monkeypatch.setattr(Saver, "trial_save", trial_save)
    monkeypatch.setattr(Trainer, "run", steps)
    distil(steps=1)


def test_a_run_with_a_gpu_ends_with_its_plan_and_its_peak(
    distil: Distil, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The peak of what came before the first step counts too."""
    peaks = iter([3 << 30])
    monkeypatch.setattr(budget, "peak_bytes", lambda device: next(peaks, 1 << 29))
    stream = io.StringIO()
    distil(stream=stream, steps=1)
    (end,) = train_runs.lines(tmp_path / "run", "end")
    plan = end["memory_plan_bytes"]
    assert (end["memory_peak_bytes"], plan > 400 << 20) == (3 << 30, True)
    assert f"memory: plan {plan / 2**30:.2f} GiB, peak 3.00 GiB" in stream.getvalue()


def test_the_peak_is_reset_on_a_gpu_that_nothing_has_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(f"reset {device}"))
    budget.reset_peak(torch.device("cpu"))
    assert calls == []
    budget.reset_peak(torch.device("cuda:0"))
    assert calls == ["init", "reset cuda:0"]


def test_an_error_that_is_kept_keeps_no_models(
    distil: Distil, held: dict[str, weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A notebook keeps the last error; the next cell tries again with less."""
    monkeypatch.setattr("aprtrain.loop.distill_head", poisoned(3))
    with pytest.raises(RunError, match="not finite") as kept:
        distil("bad")
    assert kept.value.__traceback__ is not None
    assert alive(held) == []
