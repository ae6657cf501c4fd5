"""A run's memory goes with the run, also without the garbage collector: two runs of one notebook do not add up."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from train_runs import poisoned

from aprfmt.errors import RunError
from aprtrain.models import load_student, load_teacher
from aprtrain.network.decoder import Decoder
from aprtrain.optim.adamw import FlatAdamW

Distil = Callable[..., dict[str, Any]]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, weakref.ref[Any]]]:
    """What a run loads, by name, while nothing collects cycles."""
    found: dict[str, weakref.ref[Any]] = {}

    def student(*args: Any) -> tuple[Decoder, Any]:
        network, optimizer = load_student(*args)
        assert isinstance(optimizer, FlatAdamW)
        parts = {"student": network, "block": network.blocks[0], "parameter": network.embed}
        parts |= {"optimizer": optimizer, "gradient": optimizer.grad, "moments": optimizer.adam.mean[0]}
        found.update({name: weakref.ref(part) for name, part in parts.items()})
        return network, optimizer

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


def test_an_error_that_is_kept_keeps_no_models(
    distil: Distil, held: dict[str, weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A notebook keeps the last error; the next cell tries again with less."""
    monkeypatch.setattr("aprtrain.loop.distill_head", poisoned(3))
    with pytest.raises(RunError, match="not finite") as kept:
        distil("bad")
    assert kept.value.__traceback__ is not None
    assert alive(held) == []
