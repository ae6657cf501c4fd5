"""TensorBoard and Weights & Biases: they get what metrics.jsonl gets, and no failure of theirs ends a run."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from train_runs import lines

from aprfmt.cli.main import run as apr
from aprfmt.errors import MissingDependencyError, RefusedError

Distil = Callable[..., dict[str, Any]]


class Wandb(ModuleType):
    """Stands for the package: keeps what it is given."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logs: dict[int, dict[str, float]] = {}
        self.finished = 0
        self.fails_at = fails_at

    def init(self, **given: Any) -> Wandb:
        self.inits.append(given)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("the cloud is gone")
        self.logs.setdefault(step, {}).update(numbers)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_gets_each_step_and_each_evaluation(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    distil(steps=3, total_steps=5, log_every=10, log_to="wandb")
    distil(steps=5, total_steps=5, log_every=10, log_to="wandb", resume=True)
    first, again = wandb.inits
    assert first["id"] == again["id"], "a run that is resumed is the same run"
    assert first["config"]["lr"] == 0.003
    assert (first["name"], first["dir"], first["resume"]) == ("run", str(tmp_path / "run"), "allow")
    assert wandb.finished == 2
    assert [wandb.logs[n]["train/loss"] for n in range(1, 6)] == [line["loss"] for line in lines(tmp_path / "run")]
    held_out = {n: found["held-out/ce"] for n, found in wandb.logs.items() if "held-out/ce" in found}
    assert held_out == {line["step"]: line["ce"] for line in lines(tmp_path / "run", "evaluation")}


def test_what_fails_there_ends_no_run(distil: Distil, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, said = Wandb(fails_at=2), io.StringIO()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert distil(steps=4, log_to="wandb", stream=said)["steps"] == 4
    assert said.getvalue().count("--log-to failed and is now off: ConnectionError: the cloud is gone") == 1
    assert max(wandb.logs) == 1, "it is asked no more"


def test_a_run_that_is_refused_begins_nothing_there(
    distil: Distil, teacher_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    distil("weak", steps=2)
    swapped = {"teacher": str(tmp_path / "weak/model.apr"), "student_init": None, "student": str(teacher_file)}
    with pytest.raises(RefusedError, match="no better than the student"):
        distil(steps=2, log_to="wandb", **swapped)
    assert wandb.inits == []
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokens"]


def test_a_package_that_is_missing_is_told_before_anything_is_written(
    distil: Distil, teacher_file: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingDependencyError, match="--log-to wandb needs wandb"):
        distil(log_to="wandb")
    assert not (tmp_path / "run").exists()
    how = ["--student-init", "layers:1", "--data", str(corpus_file), "--steps", "2", "--device", "cpu"]
    assert apr(["distill", str(teacher_file), *how, "-o", str(tmp_path / "o"), "--log-to", "wandb", "--plan"]) == 6


def test_tensorboard_reads_what_a_run_wrote(distil: Distil, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    distil(steps=3, total_steps=5, log_to="tensorboard")
    distil(steps=5, total_steps=5, log_to="tensorboard", resume=True)
    found = events.EventAccumulator(str(tmp_path / "run/tensorboard"))
    found.Reload()
    steps = {scalar.step: scalar.value for scalar in found.Scalars("train/ce")}
    assert steps == {line["step"]: pytest.approx(line["ce"], rel=1e-6) for line in lines(tmp_path / "run")}
    assert [scalar.step for scalar in found.Scalars("held-out/kl")] == [0, 3, 5]
