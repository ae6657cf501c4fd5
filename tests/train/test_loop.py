"""The loop: it learns, repeats and resumes bit by bit, survives failing disks, and every option has an effect."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import train_runs
from train_faults import CONFIG
from train_runs import lines, weights

import aprfmt
from aprfmt.cli.training import _summary_text
from aprfmt.errors import ExistsError, MissingDependencyError, RefusedError, RunError, StorageError, UsageError
from aprfmt.inspection.run_report import METADATA, summarise
from aprfmt.io.pipe import write_file
from aprfmt.texts.encoding import Encoder
from aprfmt.texts.sequences import IGNORED, Windows
from aprfmt.texts.shards import open_corpus
from aprtrain import loop
from aprtrain.checkpoints import checkpoint, state
from aprtrain.checkpoints.checkpoint import BEST, LATEST, LINEAGE
from aprtrain.data import batches
from aprtrain.evaluate import evaluate
from aprtrain.guards import since_best
from aprtrain.loss.head import HeadOut, distill_head
from aprtrain.network.weights import load_decoder, open_network

Distil = Callable[..., dict[str, Any]]


def test_a_student_learns_from_its_teacher(distil: Distil, tmp_path: Path) -> None:
    summary = distil(steps=40, save_every=20)
    assert summary["last"]["kl"] <= 0.75 * summary["first"]["kl"]
    assert summary["last"]["ce"] < summary["first"]["ce"]
    assert summary["checkpoints"] == [20, 40]
    with aprfmt.open(summary["model"]) as model:
        lineage = model.metadata[LINEAGE]
        assert lineage["step"] == 40
        assert lineage["config_digest"] == summary["digest"]
        assert lineage["scores"] == summary["last"]
        assert model.tokenizer is not None
        assert model.metadata["license"] == "mit"
        assert model.metadata["data_source"] == "corpus.jsonl"
        assert lineage["data_sources"] == [{"name": "corpus.jsonl"}]
        assert lineage["hardware"] == "1 x cpu"
    assert str(tmp_path) not in json.dumps(lineage), "a checkpoint must not name folders of this machine"


def test_a_checkpoint_names_no_folder_of_this_machine(distil: Distil, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 320}))
    other = train_runs.write_corpus(tmp_path / "other.jsonl", documents=20, seed=5)
    summary = distil(steps=1, student_init=str(tmp_path / "config.json"), eval_data=str(other), held_out=None)
    with aprfmt.open(summary["model"]) as model:
        assert model.metadata[LINEAGE]["student"]["made"] == "config.json"
        assert str(tmp_path) not in json.dumps(dict(model.metadata), default=str)


def test_the_saved_model_is_the_one_that_was_evaluated(distil: Distil, tmp_path: Path) -> None:
    summary = distil(steps=20)
    with open_network(summary["model"]) as network:
        assert network.tokenizer is not None
        corpus = open_corpus(tmp_path / "run/tokens", Encoder(network.tokenizer).digest)
        held_out = Windows(corpus.held_out, 32, corpus.separator)
        scores = evaluate(load_decoder(network), held_out, rows=2, max_windows=train_runs.SIZES["eval_tokens"] // 32)
    assert scores.ce == pytest.approx(summary["last"]["ce"], rel=1e-5)
    assert scores.ce != pytest.approx(summary["first"]["ce"], rel=1e-2)


def test_deterministic_runs_repeat_and_resume_bit_by_bit(distil: Distil, tmp_path: Path) -> None:
    distil("whole", steps=40, save_every=0)
    distil("again", steps=40, save_every=0)
    distil("parts", steps=20, total_steps=40, save_every=0)
    distil("parts", steps=40, total_steps=40, save_every=0, resume=True)
    assert weights(tmp_path / "whole/model.apr") == weights(tmp_path / "again/model.apr")
    assert weights(tmp_path / "whole/model.apr") == weights(tmp_path / "parts/model.apr")
    (one, one_facts), (two, two_facts) = (
        train_runs.load_state(tmp_path / name / "ckpt-step-000040.state") for name in ("whole", "parts")
    )
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert one_facts["cursor"] == two_facts["cursor"]
    names = ("step", "loss", "ce", "kl", "grad_norm", "lr")
    a, b = ([[line[name] for name in names] for line in lines(tmp_path / to)] for to in ("whole", "parts"))
    assert a == b
    assert [line[0] for line in a] == list(range(1, 41))


def test_positions_that_do_not_count_take_no_logits(distil: Distil, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, seen = Windows.rows, list[int]()

    def masked(self: Windows, ids: list[int]) -> Any:
        found = rows(self, ids)
        found.labels_NT[:, ::2] = IGNORED
        return found

    def head(x_ND: torch.Tensor, *args: Any, **options: Any) -> HeadOut:
        seen.append(len(x_ND))
        return distill_head(x_ND, *args, **options)

    monkeypatch.setattr(Windows, "rows", masked)
    monkeypatch.setattr(Windows, "n_labels", lambda self, ids: int((self.rows(ids).labels_NT != IGNORED).sum()))
    monkeypatch.setattr(loop, "distill_head", head)
    few = distil("few", steps=3)
    taken, seen[:] = sum(seen), []
    monkeypatch.setattr(batches, "_NEARLY_ALL", 0.0)
    all_of_them = distil("all", steps=3)
    assert taken < 0.55 * sum(seen)
    for name in ("ce", "kl"):
        assert few["last"][name] == pytest.approx(all_of_them["last"][name], rel=1e-5)


def test_it_ends_when_nothing_gets_better(distil: Distil, tmp_path: Path) -> None:
    summary = distil(steps=40, eval_every=2, patience=2, lr=1e-12, save_every=0)
    assert summary["steps"] == 4
    assert summary["early"] == "2 evaluations in a row without improvement"
    assert "interrupted" not in summary
    assert summary["checkpoints"] == [4]
    assert json.loads((tmp_path / "run" / METADATA).read_text())["status"] == "done"
    with aprfmt.open(summary["model"]) as model:
        assert model.metadata[LINEAGE]["scores"]["step"] == 4


def test_a_gain_within_rounding_is_none(distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()

    def scored(*args: Any, **options: Any) -> Any:
        return replace(evaluate(*args, **options), ce=2.0, kl=1.0 - 1e-8 * next(count))

    monkeypatch.setattr("aprtrain.run.evaluate", scored)
    assert distil(steps=12, eval_every=2, save_every=2, patience=2)["steps"] == 4
    assert (tmp_path / "run" / BEST).is_file()
    assert json.loads((tmp_path / "run" / BEST).read_text())["step"] == 2
    assert [score["best"] for score in lines(tmp_path / "run", "evaluation")] == [1.0, 1.0 - 1e-8, 1.0 - 2e-8]


@pytest.mark.parametrize(("weight", "name"), [(0.0, "ce"), (0.5, "kl")])
def test_the_best_is_of_what_is_trained(distil: Distil, tmp_path: Path, weight: float, name: str) -> None:
    distil(steps=1, kd_weight=weight)
    assert all(score["best"] == score[name] for score in lines(tmp_path / "run", "evaluation"))


@pytest.mark.parametrize(
    ("scores", "since"),
    [([], 0), ([2.0], 0), ([2.0, 1.999], 0), ([2.0, 1.9999], 1), ([2.0] + [1.9999, 1.99975] * 2, 2)],
)
def test_the_best_score_moves_by_gains_that_count(scores: list[float], since: int) -> None:
    assert since_best(scores) == since


def test_it_goes_on_while_it_gets_better(distil: Distil) -> None:
    summary = distil(steps=20, eval_every=5, patience=1)
    assert summary["steps"] == 20
    assert "early" not in summary


def test_it_ends_where_the_loss_is_low_enough(distil: Distil) -> None:
    whole = distil("whole", steps=20, eval_every=5)
    middle = (whole["first"]["ce"] + whole["last"]["ce"]) / 2
    summary = distil("early", steps=20, eval_every=5, target_val_loss=middle)
    assert summary["early"] == f"the held-out cross entropy is at most {middle:g}"
    assert summary["steps"] < 20
    assert summary["last"]["ce"] <= middle


def test_a_run_that_ended_early_goes_on_only_if_it_may(distil: Distil, tmp_path: Path) -> None:
    how: dict[str, Any] = {"total_steps": 40, "eval_every": 2, "save_every": 4, "lr": 1e-12}
    first = distil(steps=40, patience=2, **how)
    assert first["steps"] == 4
    (tmp_path / "run/model.apr").unlink()  # as if it had been killed behind its last checkpoint
    again = distil(steps=40, patience=2, resume=True, **how)
    assert (again["steps"], again["early"], again["last"]) == (4, first["early"], first["last"])
    assert (tmp_path / "run/model.apr").is_file()
    assert distil(steps=40, patience=3, resume=True, **how)["steps"] == 6
    assert "early" not in distil(steps=8, resume=True, **how)


def test_to_end_early_takes_evaluations(distil: Distil) -> None:
    with pytest.raises(UsageError, match="--patience and --target-val-loss need evaluations"):
        distil(steps=4, eval_every=0, save_every=0, patience=1)
    by_passes: dict[str, Any] = {"eval_every": 0, "save_every": 0, "save_epochs": 1, "repeat": False, "epochs": 3}
    ended = distil(steps=None, patience=1, lr=1e-12, **by_passes)
    assert ended["early"] == "1 evaluation without improvement"
    assert [found < ended["config"]["steps"] for found in ended["checkpoints"]] == [True]


def test_metrics_after_the_resumed_step_are_dropped(distil: Distil, tmp_path: Path) -> None:
    distil(steps=4, total_steps=8)
    path = tmp_path / "run/metrics.jsonl"
    path.write_text(path.read_text() + '{"event": "step", "step": 5, "loss": 0}\n{"event": "st')
    distil(steps=6, total_steps=8, resume=True)
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert found[4]["loss"] > 0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"lr": 1e-3}, "--lr was 0.003, is 0.001"),
        ({"seed": 7}, "seed"),
        ({"total_steps": 9}, "--total-steps was 8, is 9"),
        ({"kd_weight": 0.5}, "kd"),
    ],
)
def test_another_configuration_does_not_resume_unless_it_may(distil: Distil, change: dict[str, Any], word: str) -> None:
    distil(steps=2, total_steps=8, warmup_steps=1)
    again: dict[str, Any] = {"steps": 3, "total_steps": 8, "warmup_steps": 1, "resume": True} | change
    with pytest.raises(RefusedError, match=word):
        distil(**again)
    assert distil(**again, allow_changed=tuple(change))["steps"] == 3


def test_another_teacher_student_or_corpus_does_not_resume(distil: Distil, tmp_path: Path, teacher_file: Path) -> None:
    distil(steps=2, total_steps=4)
    again: dict[str, Any] = {"steps": 4, "total_steps": 4, "resume": True}
    other = train_runs.write_corpus(tmp_path / "other.jsonl", seed=9)
    with pytest.raises(RefusedError, match="data"):
        distil(**again, data=other)
    aprfmt.import_model(teacher_file, tmp_path / "bf16.apr", dtype="bf16")
    with pytest.raises(RefusedError, match="teacher"):
        distil(**again, teacher=str(tmp_path / "bf16.apr"))
    with pytest.raises(RefusedError, match="--student-init was"):
        distil(**again, student_init="layers:1,")
    with pytest.raises(RefusedError, match="initial weights"):
        distil(**again, student_init="layers:1,", allow_changed=("student_init",))
    with pytest.raises(UsageError, match="already completed 2 steps"):
        distil(steps=2, total_steps=4, resume=True)


def test_a_folder_with_a_run_is_not_written_over_and_an_empty_one_not_resumed(distil: Distil, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no checkpoint"):
        distil(resume=True)
    distil(steps=1)
    before = weights(tmp_path / "run/model.apr")
    with pytest.raises(ExistsError, match="already contains a run"):
        distil(steps=2)
    assert weights(tmp_path / "run/model.apr") == before
    (tmp_path / "file").touch()
    with pytest.raises(ExistsError):
        distil("file")


# --- failures on the way ---


def test_a_nan_stops_the_run_and_the_weights_before_it_are_saved(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distil("good", steps=2, total_steps=6, save_every=0)
    monkeypatch.setattr(loop, "distill_head", train_runs.poisoned(5))  # the third step
    with pytest.raises(RunError, match="step 3 is not finite") as caught:
        distil("bad", steps=6, total_steps=6, save_every=0)
    assert caught.value.exit_code == 8
    assert checkpoint.read_pointer(tmp_path / "bad", LATEST) == 3
    assert not (tmp_path / "bad/model.apr").exists()
    assert weights(tmp_path / "bad/ckpt-step-000003.apr") == weights(tmp_path / "good/model.apr")
    assert lines(tmp_path / "bad")[-1]["loss"] is None
    assert json.loads((tmp_path / "bad" / METADATA).read_text())["status"] == "failed"


def test_a_full_gpu_is_told_with_what_takes_less(distil: Distil, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> HeadOut:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop, "distill_head", full)
    with pytest.raises(RunError, match="the GPU is out of memory") as caught:
        distil()
    assert "--micro-tokens" in str(caught.value.hint)


def test_a_loss_that_is_not_finite_changes_no_weight(
    distil: Distil, tmp_path: Path, teacher_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = distill_head

    def no_value(*args: Any, **options: Any) -> HeadOut:
        out = honest(*args, **options)
        return out._replace(loss=out.loss + (out.loss.detach() * float("nan")))  # the gradient stays as it was

    monkeypatch.setattr(loop, "distill_head", no_value)
    with pytest.raises(RunError, match="step 1 is not finite"):
        distil("bad", steps=2, total_steps=2)
    first = weights(teacher_file)  # the student was its first layer
    assert all(first[name] == data for name, data in weights(tmp_path / "bad/ckpt-step-000001.apr").items())


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str], bool]) -> None:
    """Makes writing fail, as on a full disk, for the paths of which `fails` says so."""
    honest: Callable[..., None] = write_file

    def write(target: str, *rest: Any) -> None:
        if fails(target):
            raise StorageError("No space left on device", path=target)
        honest(target, *rest)

    for module in (checkpoint, state):
        monkeypatch.setattr(module, "write_file", write)
    monkeypatch.setattr(checkpoint, "_PAUSE_S", 0.0)


def test_a_failed_periodic_save_is_told_and_counted_and_the_training_goes_on(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, lambda path: "ckpt-step-000002" in path)
    said = io.StringIO()
    summary = distil(steps=6, save_every=2, stream=said)
    assert (summary["failed_saves"], summary["checkpoints"], summary["steps"]) == (1, [4, 6], 6)
    assert said.getvalue().count("saving failed") == 3
    assert "THE CHECKPOINT of step 2 WAS NOT SAVED" in said.getvalue()
    assert json.loads((tmp_path / "run" / METADATA).read_text())["failed_saves"] == 1


def test_latest_moves_when_model_and_state_are_there(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, lambda path: path.endswith("ckpt-step-000004.state"))
        assert distil(steps=4, total_steps=8, save_every=2)["failed_saves"] == 1
    assert checkpoint.read_pointer(tmp_path / "run", LATEST) == 2
    assert distil(steps=5, total_steps=8, save_every=0, resume=True)["steps"] == 5
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_a_save_that_works_at_the_second_try_does_not_count(distil: Distil, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def once(path: str) -> bool:
        tries.extend([path] if "ckpt" in path else [])
        return tries == [path]

    failing(monkeypatch, once)
    summary = distil(steps=4, save_every=2)
    assert (summary["failed_saves"], summary["checkpoints"]) == (0, [2, 4])


def test_a_folder_that_takes_no_model_is_noticed_before_the_first_step(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, lambda path: path.endswith(".apr"))
    with pytest.raises(StorageError) as caught:
        distil()
    assert caught.value.exit_code == 7
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokens"]


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_failed_final_save_ends_with_exit_7_and_leaves_what_was_there(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everywhere: bool
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    failing(monkeypatch, lambda path: path.endswith("/model.apr") and (everywhere or "elsewhere" not in path))
    with pytest.raises(StorageError) as caught:
        distil(steps=4, save_every=2)
    assert caught.value.exit_code == 7
    rescued = list((tmp_path / "elsewhere").rglob("model.apr"))
    assert len(rescued) == (0 if everywhere else 1)
    for path in rescued:
        assert str(path) in str(caught.value.hint)
        assert weights(path) == weights(tmp_path / "run/ckpt-step-000004.apr")
    assert checkpoint.read_pointer(tmp_path / "run", LATEST) == 4


@pytest.mark.parametrize("older", [False, True])
def test_a_model_that_could_not_be_written_at_the_end_is_written_by_resuming(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    """Also where `model.apr` is of an earlier end; afterwards the run is finished and cannot be resumed."""
    model, given = tmp_path / "run/model.apr", {"total_steps": 4, "save_every": 2}
    if older:
        distil(steps=2, **given)
    with monkeypatch.context() as full:
        full.setenv("TMPDIR", str(tmp_path))
        failing(full, lambda path: path.endswith("/model.apr"))
        with pytest.raises(StorageError, match="could not be saved") as caught:
            distil(steps=4, resume=older, **given)
    assert "--resume" in str(caught.value.hint)
    assert model.exists() is older
    before = (tmp_path / "run/ckpt-step-000004.state").stat()
    summary = distil(steps=4, resume=True, **given)
    assert (summary["steps"], summary["model"]) == (4, str(model))
    assert weights(model) == weights(tmp_path / "run/ckpt-step-000004.apr")
    after = (tmp_path / "run/ckpt-step-000004.state").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with pytest.raises(UsageError, match="already completed 4 steps"):
        distil(steps=4, resume=True, **given)


class Interrupting(io.StringIO):
    """Sends this process a signal when it is told of step 3."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        if text.startswith("step 3/"):
            os.kill(os.getpid(), self.number)
        return super().write(text)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(distil: Distil, tmp_path: Path, number: int) -> None:
    handler = signal.signal(number, lambda *_: None)  # what a signal that nobody catches would find
    try:
        summary = distil(steps=6, save_every=0, stream=Interrupting(number))
    finally:
        signal.signal(number, handler)
    assert (summary.get("interrupted"), summary["steps"], summary["model"]) == (number, 3, None)
    assert checkpoint.read_pointer(tmp_path / "run", LATEST) == 3


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[int]]]:
    """Sends SIGINT before the third batch of an evaluation, given by its number; returns the batches of each."""
    handler = signal.signal(signal.SIGINT, lambda *_: None)

    def at(number: int) -> list[int]:
        batches: list[int] = []

        def observed(*args: Any, progress: Callable[[int, int], None], **options: Any) -> Any:
            batches.append(0)

            def count(done: int, of: int) -> None:
                progress(done, of)
                if (len(batches), batches[-1]) == (number + 1, 2):
                    os.kill(os.getpid(), signal.SIGINT)
                else:
                    batches[-1] += 1

            return evaluate(*args, progress=count, **options)

        monkeypatch.setattr("aprtrain.run.evaluate", observed)
        return batches

    yield at
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(("evaluation", "step", "scored"), [(0, 0, [0, 2, 4]), (1, 2, [0, 4]), (2, 4, [0, 2, 4])])
def test_a_signal_stops_an_evaluation_between_two_batches(
    distil: Distil, tmp_path: Path, interrupt: Callable[[int], list[int]], evaluation: int, step: int, scored: list[int]
) -> None:
    """The first, one between two steps, and the last. The resumed run has the same weights."""
    given = {"steps": 4, "save_every": 2}
    whole = distil("whole", **given)
    batches = interrupt(evaluation)
    summary = distil(**given)
    assert batches == [*[8] * evaluation, 2]
    assert (summary["interrupted"], summary["steps"], summary["model"]) == (signal.SIGINT, step, None)
    assert checkpoint.read_pointer(tmp_path / "run", LATEST) == step
    assert json.loads((tmp_path / "run" / METADATA).read_text())["status"] == "interrupted"

    resumed = distil(resume=True, **given)
    assert "interrupted" not in resumed
    assert [score["step"] for score in lines(tmp_path / "run", "evaluation")] == scored
    assert weights(Path(resumed["model"])) == weights(Path(whole["model"]))


def test_a_signal_stops_the_evaluation_of_a_smoke_run(distil: Distil, interrupt: Callable[[int], list[int]]) -> None:
    batches = interrupt(0)
    summary = distil(steps=500, smoke=7)
    assert (summary["interrupted"], summary["steps"], batches) == (signal.SIGINT, 0, [2])


# --- smoke, files, progress ---


def test_smoke_does_so_many_steps_projects_and_writes_nothing(distil: Distil, tmp_path: Path) -> None:
    said = io.StringIO()
    summary = distil(steps=500, smoke=7, stream=said)
    assert (summary["steps"], summary["model"], summary["projected_steps"]) == (7, None, 500)
    rate = summary["projected_seconds"] / 500
    assert rate * 128 == pytest.approx(128 * 128 / summary["tokens_per_s"])
    assert "500 steps would take" in said.getvalue()
    assert not (tmp_path / "run").exists()


def test_the_latest_k_and_the_best_checkpoints_stay(distil: Distil, tmp_path: Path) -> None:
    distil(steps=10, save_every=2, keep=2, lr=0.0001, warmup_steps=10)
    found = sorted(path.name for path in (tmp_path / "run").glob("ckpt-*.apr"))
    best = checkpoint.read_pointer(tmp_path / "run", BEST)
    assert best is not None
    assert set(found) == {f"{checkpoint.step_name(s)}.apr" for s in (8, 10, best)}


def test_progress_is_told_by_default_and_metrics_have_every_key(distil: Distil, tmp_path: Path) -> None:
    said = io.StringIO()
    distil(steps=12, log_every=10, stream=said)
    text = said.getvalue()
    assert "step 1/12 " in text
    assert "step 10/12 " in text
    assert "step 11/12 " not in text
    assert re.search(r"\n +lr +0\.003 ", text), "options that differ from their defaults are printed"
    keys = {"step", "loss", "ce", "kl", "kl1", "agreement", "teacher_entropy", "grad_norm", "lr", "tokens"}
    keys |= {
        "seconds",
        "tokens_per_s",
        "eta_s",
        "student_tflops",
        "teacher_tflops",
        "mfu",
        "utilisation",
        "memory_bytes",
    }
    for line in lines(tmp_path / "run"):
        assert keys <= line.keys()
    (start,) = lines(tmp_path / "run", "start")
    assert start["config"]["lr"] == 0.003
    assert [line["step"] for line in lines(tmp_path / "run", "evaluation")] == [0, 12]
    described = json.loads((tmp_path / "run" / METADATA).read_text())
    assert (described["status"], described["steps"], described["resolved"]["seed"]) == ("done", 12, 42)


def test_one_command_starts_and_continues_a_run(distil: Distil, tmp_path: Path) -> None:
    """`--resume auto`: what a scheduler types again and again."""
    first = distil(steps=4, total_steps=8, resume="auto", save_every=2)
    second = distil(steps=8, total_steps=8, resume="auto", save_every=2)
    assert (first["steps"], second["steps"]) == (4, 8)
    assert [line["step"] for line in lines(tmp_path / "run", "begin")] == [0, 4]
    for path in (tmp_path / "run").glob("ckpt-*"):
        path.unlink()
    (tmp_path / "run/latest").unlink()
    with pytest.raises(ExistsError, match="already contains a run"):
        distil(steps=8, total_steps=8, resume="auto")


def test_a_line_that_stands_for_several_steps_gives_their_means(distil: Distil, tmp_path: Path) -> None:
    said = io.StringIO()
    short = train_runs.write_corpus(tmp_path / "short.jsonl", words=6)  # so that sequences have gaps
    distil(data=short, steps=12, log_every=10, stream=said)
    steps = lines(tmp_path / "run")
    assert [line["step"] for line in steps] == list(range(1, 13)), "the file has every step"
    assert len({line["labels"] for line in steps}) > 1
    assert [line["tokens"] for line in steps] == [*accumulate(line["labels"] for line in steps)]
    (told,) = [line for line in said.getvalue().splitlines() if line.startswith("step 10/")]
    for name, key in (("loss", "loss"), ("ce", "ce"), ("kl", "kl1")):
        seen = steps[1:10]  # the first step has a line of its own
        mean = sum(line[key] * line["labels"] for line in seen) / sum(line["labels"] for line in seen)
        assert f"{name} {mean:.4f}" in told
    assert f"lr {steps[9]['lr']:.2e}" in told


def test_a_run_that_is_stopped_says_what_it_reached(distil: Distil, tmp_path: Path) -> None:
    """Before its first line: each step is in the file, and the summary has their means."""

    class Stopping(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("step 1/"):
                os.kill(os.getpid(), signal.SIGTERM)
            return super().write(text)

    said = Stopping()
    summary = distil(steps=50, log_every=10, eval_every=0, stream=said)
    steps = lines(tmp_path / "run")
    assert [line["step"] for line in steps] == list(range(1, summary["steps"] + 1))
    assert summary["interrupted"] == signal.SIGTERM
    unsaid = steps[1:] or steps
    assert summary["train"]["ce"] == pytest.approx(sum(line["ce"] for line in unsaid) / len(unsaid))
    body = summarise(tmp_path / "run")
    assert body["loss"] == pytest.approx(summary["train"]["loss"]), "what apr runs shows is what the run printed"
    assert "SIGTERM: stopping after this step" in said.getvalue()
    text = [*_summary_text(cast(Any, {"command": "distill"} | summary))]
    assert any(f", {body['tokens_per_s']:,.0f} tokens/s" in line for line in text)
    assert any("stopped at" in line and f"step {summary['steps']} of 50" in line for line in text)
    assert not any(line.startswith("after") for line in text), "what was scored before is not a result"
    config = {"config": {**summary["config"], "save_dtype": "bf16"}}
    text = [*_summary_text(cast(Any, {"command": "distill"} | summary | {"model": "run/model.apr"} | config))]
    assert any("stored as" in line and "BF16, rounded from float32" in line for line in text)


def test_data_that_do_not_last_need_a_word(distil: Distil) -> None:
    with pytest.raises(RefusedError, match="epochs") as caught:
        distil(steps=5000, repeat=False)
    assert "--repeat" in str(caught.value.hint)
    large = {"tokens_per_step": 1024, "micro_tokens": 1024}
    assert distil(steps=None, epochs=1, repeat=False, **large)["steps"] == 19


def test_checkpoints_of_epochs_stay(distil: Distil, tmp_path: Path) -> None:
    """19 steps of 32 windows are a pass over 605: the checkpoint is of the step in which it ends."""
    how: dict[str, Any] = {"steps": None, "repeat": False, "tokens_per_step": 1024, "micro_tokens": 1024, "keep": 2}
    summary = distil(epochs=3, save_epochs=1, save_every=5, **how)
    windows = -(-(open_tokens(tmp_path / "run") - 1) // 32)
    ends = [-(-windows * n // 32) for n in (1, 2, 3)]
    assert set(ends) <= {*summary["checkpoints"]}
    left = {int(path.stem[-6:]) for path in (tmp_path / "run").glob("ckpt-*.apr")}
    best = checkpoint.read_pointer(tmp_path / "run", BEST)
    assert left == {*ends, *summary["checkpoints"][-2:], best}
    assert distil("two", epochs=3, save_epochs=2, save_every=0, **how)["checkpoints"] == ends[1:]


def open_tokens(folder: Path) -> int:
    return int(json.loads((folder / "tokens/tokens.json").read_text())["parts"]["train"]["tokens"])


@pytest.mark.llama
def test_the_model_is_examined_at_the_end(distil: Distil, tmp_path: Path) -> None:
    said = io.StringIO()
    summary = distil(steps=2, qa=True, stream=said)
    found = summary["qa"]
    assert found["model"] == summary["model"]
    assert {gate["id"]: gate["status"] for gate in found["gates"]}["loads"] == "pass"
    assert not found["passed"], "two steps make no model that writes"
    assert lines(tmp_path / "run", "qa") == [{"event": "qa", "passed": False}]
    failed = ", ".join(gate["id"] for gate in found["gates"] if gate["status"] == "fail")
    assert failed
    assert any(
        "apr qa" in line and f"not passed: {failed}\n" in f"{line}\n" for line in _summary_text(cast(Any, summary))
    )


def test_llama_cpp_that_is_missing_is_told_before_the_first_step(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aprfmt.llama.client.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="llama"):
        distil(steps=2, qa=True)
    assert not (tmp_path / "run").exists()


def test_a_quantized_teacher_teaches_from_its_blocks(distil: Distil, teacher_file: Path, tmp_path: Path) -> None:
    aprfmt.export_model(teacher_file, tmp_path / "t.gguf", dtype="q8_0")
    given: dict[str, Any] = {"teacher": str(tmp_path / "t.gguf"), "steps": 6}
    blocks, decoded = distil("blocks", **given), distil("decoded", **given, teacher_residency="bf16")
    assert blocks["config"]["teacher_residency"] == "q4k", "of itself: the file is Q8_0"
    assert blocks["last"]["kl"] < blocks["first"]["kl"]
    assert blocks["last"]["kl"] == pytest.approx(decoded["last"]["kl"], rel=0.05)
