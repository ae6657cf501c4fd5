"""A run's folder: one run at a time, nothing half-written left, and what would go wrong late is told early."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import train_runs
from train_corpora import functions
from train_models import Maker
from train_runs import weights

import aprfmt
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.errors import ExistsError, RefusedError, RunError, StorageError, UsageError
from aprfmt.inspection.run_report import METADATA
from aprfmt.io.pipe import write_file
from aprfmt.io.temporary import temporary_beside
from aprfmt.provenance import provenance
from aprtrain.checkpoints import checkpoint, state
from aprtrain.checkpoints.checkpoint import LATEST, LINEAGE, ModelIdentity, Saver, Snapshot, lock_folder
from aprtrain.evaluate import evaluate
from aprtrain.loss.head import distill_head
from aprtrain.models import make_student
from aprtrain.network.weights import load_decoder, open_network
from aprtrain.run import run

Distil = Callable[..., dict[str, Any]]


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str], bool], error: Exception) -> None:
    """Makes writing raise `error` for the paths of which `fails` says so."""
    honest: Callable[..., None] = write_file

    def write(target: str, *rest: Any) -> None:
        if fails(target):
            raise error
        honest(target, *rest)

    for module in (checkpoint, state):
        monkeypatch.setattr(module, "write_file", write)
    monkeypatch.setattr(checkpoint, "_PAUSE_S", 0.0)


# --- the folder ---


def test_two_runs_do_not_share_a_folder(distil: Distil, tmp_path: Path) -> None:
    with lock_folder(tmp_path / "run"), pytest.raises(ExistsError, match="another run is writing"):
        distil()
    assert distil()["model"]


def test_what_a_killed_run_was_writing_is_removed(distil: Distil, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    names = ("tokens", "ckpt-step-000007.state", "model.apr", "mine")
    tokens, state, model, mine = (Path(temporary_beside(str(folder / name))) for name in names)
    tokens.mkdir()
    (tokens / "train.bin").touch()
    left = (state, model, folder / "trial.apr", folder / "notes.tmp", mine)
    for path in left:
        path.touch()
    distil()
    found = {path.name for path in folder.iterdir()}
    assert {"notes.tmp", mine.name} <= found
    assert not {tokens.name, *(path.name for path in left[:3])} & found


def test_a_failed_save_leaves_no_half_of_a_checkpoint(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, lambda path: "000002.state" in path, StorageError("No space left on device"))
    assert distil(steps=4, save_every=2)["failed_saves"] == 1
    assert [path.name for path in (tmp_path / "run").glob("ckpt-*.apr")] == ["ckpt-step-000004.apr"]


def test_a_checkpoint_that_a_pointer_names_is_not_discarded(tmp_path: Path) -> None:
    for step in (3, 4):
        (tmp_path / f"{checkpoint.step_name(step)}.apr").touch()
        checkpoint.write_pointer(tmp_path, LATEST, 3)
        checkpoint.discard(tmp_path, step)
    assert [path.name for path in tmp_path.glob("*.apr")] == ["ckpt-step-000003.apr"]


def test_a_defect_in_the_thread_that_saves_is_counted(distil: Distil, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, lambda path: "000002.apr" in path, RuntimeError("a defect"))
    said = io.StringIO()
    assert distil(steps=4, save_every=2, stream=said)["failed_saves"] == 1
    assert "THE CHECKPOINT of step 2 WAS NOT SAVED: RuntimeError: a defect" in said.getvalue()


def test_a_checkpoint_is_saved_though_an_older_one_cannot_be_removed(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint, "prune", refused)
    said = io.StringIO()
    summary = distil(steps=4, save_every=2, stream=said)
    assert (summary["failed_saves"], summary["checkpoints"]) == (0, [2, 4])
    assert checkpoint.read_pointer(tmp_path / "run", LATEST) == 4
    assert "old checkpoints could not be removed: [Errno 13] Permission denied" in said.getvalue()


# --- the data of a run ---


def test_other_data_do_not_replace_those_of_the_run(distil: Distil, tmp_path: Path, corpus_file: Path) -> None:
    folder = tmp_path / "run"
    distil(steps=2, total_steps=6)
    tokens = (folder / "tokens/train.bin").read_bytes()
    other = train_runs.write_corpus(tmp_path / "other.jsonl", seed=9)
    with pytest.raises(RefusedError, match="data differ") as caught:
        distil(steps=4, total_steps=6, resume=True, data=other)
    assert f"--data {folder / 'tokens'}" in str(caught.value.hint)
    assert (folder / "tokens/train.bin").read_bytes() == tokens
    assert distil(steps=4, total_steps=6, resume=True, data=folder / "tokens")["steps"] == 4
    assert distil(steps=5, total_steps=6, resume=True)["steps"] == 5


def test_a_run_inside_its_data_does_not_read_itself(distil: Distil, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for i, text in enumerate(functions(200)):
        (data / f"{i}.py").write_text(text)
    distil("data/run", data=data, steps=2, total_steps=4, allow_weaker_teacher=True)
    (data / "run/page.html").write_text("<p>what a run says of itself</p>" * 20)
    assert distil("data/run", data=data, steps=3, total_steps=4, resume=True, allow_weaker_teacher=True)
    with pytest.raises(UsageError, match="both data and output"):
        distil("data", data=data)


# --- before the first step ---


def test_what_is_said_of_a_run_is_what_decides_it(distil: Distil, corpus_file: Path, tmp_path: Path) -> None:
    said = io.StringIO()
    summary = distil(stream=said, warmup_steps=0, clip=0.0)
    assert re.search(r"^  clip +0 +1$", said.getvalue(), re.M), "0 is a value"
    assert not re.search(r"^  resume ", said.getvalue(), re.M)
    said = io.StringIO()
    config = train_runs.options("pretrain", corpus_file, tmp_path / "more", init=summary["model"], steps=1)
    model = run("pretrain", config, stream=said)["model"]
    assert "kd_weight" not in said.getvalue()
    assert model is not None
    with aprfmt.open(model) as opened:
        assert not {"kd_weight", "student_init"} & opened.metadata[LINEAGE]["config"].keys()
    said = io.StringIO()
    distil(stream=said, warmup_steps=0, clip=0.0, steps=5, resume=True, allow_changed=("total_steps",))
    assert "resuming from step 4" in said.getvalue()


def rehearsed(tiny: Maker, folder: Path, how: str) -> list[str]:
    """What the trial save of a student of SmolLM3 tells, of which every fourth layer is not rotated."""
    told: list[str] = []
    with open_network(tiny("smollm3").folder) as teacher:
        student = make_student(teacher, how)
        decoder = load_decoder(student)
        assert teacher.model is not None
        identity = ModelIdentity(student.hparams, student.tokenizer, provenance.read(teacher.model))
        saver = Saver(folder, identity, 3, told.append)
        saver.trial_save(
            Snapshot(0, train_runs.snapshot(decoder.hf_tensors(), "bf16"), {}, {"master": torch.zeros(9)}, {})
        )
    assert list(folder.iterdir()) == []
    return told


def test_a_student_that_no_gguf_can_hold_is_told_of_before_the_first_step(tmp_path: Path, smollm2_gguf: Path) -> None:
    pytest.importorskip("transformers")
    tiny = Maker(tmp_path / "models")
    (tmp_path / "run").mkdir()
    assert rehearsed(tiny, tmp_path / "run", "layers:0,1") == []
    told = rehearsed(tiny, tmp_path / "run", "layers:0,3")
    assert len(told) == 1
    assert "cannot convert this student to GGUF: no_rope_layers" in told[0]


def test_a_disk_that_will_be_full_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    saver = Saver(tmp_path, ModelIdentity(Hyperparams(), None, provenance.Provenance({}, None)), 3, told.append)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 30))
    saver._check_space(1 << 30)
    assert told == []
    saver._check_space(2 << 30)
    assert "take 10.0 GiB, the disk has 5.0 GiB free" in told[0]


# --- the end ---


def test_a_failed_evaluation_does_not_lose_the_weights(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def failing_late(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise RunError("no score")
        return evaluate(*args, **options)

    monkeypatch.setattr("aprtrain.run.evaluate", failing_late)
    with pytest.raises(RunError, match="no score"):
        distil(steps=4)
    assert checkpoint.read_pointer(tmp_path / "run", LATEST) == 4
    assert weights(tmp_path / "run/ckpt-step-000004.apr")


def test_a_run_that_a_defect_ends_is_no_running_one(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("aprtrain.loop.distill_head", defect)
    with pytest.raises(ZeroDivisionError):
        distil()
    assert json.loads((tmp_path / "run" / METADATA).read_text())["status"] == "failed"
    (error,) = train_runs.lines(tmp_path / "run", "error")
    assert error["message"] == "ZeroDivisionError: a defect"


class Interrupting(io.StringIO):
    """Sends this process SIGTERM when it reads `words`."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words

    def write(self, text: str) -> int:
        if text.startswith(self.words):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


@pytest.fixture
def sigterm() -> Any:
    """A signal that nobody else catches does no harm."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
def test_a_run_may_end_before_its_first_step(distil: Distil) -> None:
    summary = distil(stream=Interrupting("held-out, step 0"))
    assert (summary["interrupted"], summary["steps"], summary["tokens_per_s"]) == (signal.SIGTERM, 0, None)


@pytest.mark.usefixtures("sigterm")
def test_a_smoke_run_that_is_ended_early_projects_nothing(distil: Distil, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args, **options)

    monkeypatch.setattr("aprtrain.run.evaluate", ended)
    summary = distil(smoke=3, stream=io.StringIO())
    assert (summary["steps"], "projected_steps" in summary) == (0, False)


@pytest.mark.usefixtures("sigterm")
def test_a_signal_whose_checkpoint_fails_is_exit_7(distil: Distil, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, lambda path: "ckpt-step" in path, StorageError("No space left on device"))
    with pytest.raises(StorageError, match="last checkpoint could not be saved") as caught:
        distil(steps=9, stream=Interrupting("step 3/"))
    assert caught.value.exit_code == 7


def test_the_save_after_a_nan_may_take_its_time(
    corpus_file: Path, teacher_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest_write, stalls = Saver._write, list[RunError]()

    def slow(self: Saver, snapshot: Snapshot) -> None:
        time.sleep(1.5)
        honest_write(self, snapshot)

    def poisoned(*args: Any, **options: Any) -> Any:
        out = distill_head(*args, **options)
        return out._replace(loss=out.loss * float("nan"))

    monkeypatch.setattr("aprtrain.loop.distill_head", poisoned)
    monkeypatch.setattr(Saver, "_write", slow)
    config = train_runs.options(
        "distill", corpus_file, tmp_path / "run", teacher=str(teacher_file), student_init="layers:1", steps=2,
        repeat=True, deadline=1.0,
    )  # fmt: skip
    with pytest.raises(RunError, match="step 1 is not finite"):
        run("distill", config, stream=None, on_stall=stalls.append)
    assert stalls == []
    assert checkpoint.read_pointer(tmp_path / "run", LATEST) == 1
    assert METADATA in {path.name for path in (tmp_path / "run").iterdir()}
