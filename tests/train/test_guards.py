"""What stops a run that could only waste time: each defect of the reference's history, tried."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import demo_model
import numpy as np
import pytest
import torch
import train_runs
from train_children import forked
from train_corpora import SHAPE, student_alone

import aprfmt
from aprfmt.errors import AprError, MissingDependencyError, RefusedError, RunError, UsageError
from aprfmt.types import Numbers
from aprtrain import budget, guards
from aprtrain.checkpoints.checkpoint import LINEAGE
from aprtrain.config import Config
from aprtrain.data.batches import Batch
from aprtrain.guards import UtilizationMonitor, Watchdog
from aprtrain.loop import Trainer
from aprtrain.memory import MemoryRow, memory_plan, total
from aprtrain.network.attention import SCORED
from aprtrain.run import run
from aprtrain.world import World, device_of, join_world

Distil = Callable[..., dict[str, Any]]


@pytest.fixture
def random_teacher(tmp_path: Path) -> Path:
    demo_model.build(tmp_path / "random.gguf")
    return tmp_path / "random.gguf"


def copy_of(source: Path, target: Path, change: Callable[[str, Any], Any] = lambda name, values: values) -> Path:
    """An `.apr` with the same metadata and `change`d tensors."""
    with aprfmt.open(source) as model:
        tensors = {name: change(name, tensor.numpy().copy()) for name, tensor in model.tensors.items()}
        aprfmt.save_file(tensors, target, dict(model.metadata))
    return target


# --- teacher and student ---


def test_windows_longer_than_the_models_were_made_for_are_refused(distil: Distil) -> None:
    sizes = {"seq_len": 512, "tokens_per_step": 512, "micro_tokens": 512}
    with pytest.raises(RefusedError, match="512 exceeds the context length 256 of the teacher") as caught:
        distil(**sizes)
    assert "--seq-len 256" in str(caught.value.hint)


def test_the_teacher_as_its_own_student_is_refused(distil: Distil, teacher_file: Path, tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(RefusedError, match="same dimensions"):
        distil(student=str(teacher_file), student_init=None)
    with pytest.raises(RefusedError, match="same weights"):
        distil("b", student=str(teacher_file), student_init=None, allow_same_arch=True)
    with pytest.raises(RefusedError, match="same weights"):
        distil("c", student_init="layers:2", allow_same_arch=True)
    assert time.monotonic() - begin < 5
    assert not list(tmp_path.rglob("*.state"))


def test_a_requantized_copy_of_the_teacher_is_refused(distil: Distil, teacher_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.apr"
    aprfmt.import_model(teacher_file, copy, dtype="f16")
    with pytest.raises(RefusedError, match="same dimensions"):
        distil(student=str(copy), student_init=None)
    with pytest.raises(RefusedError, match="already equal the teacher's"):
        distil("b", student=str(copy), student_init=None, allow_same_arch=True)


def test_a_student_of_the_same_size_is_taken_with_consent_and_the_consent_recorded(
    distil: Distil, random_teacher: Path
) -> None:
    summary = distil(student=str(random_teacher), student_init=None, allow_same_arch=True)
    with aprfmt.open(summary["model"]) as model:
        assert model.metadata[LINEAGE]["overrides"] == ["allow_same_arch"]


def test_a_teacher_of_random_weights_is_refused(distil: Distil, random_teacher: Path) -> None:
    with pytest.raises(RefusedError, match="predicts the held-out data badly"):
        distil(teacher=str(random_teacher))
    assert distil("b", teacher=str(random_teacher), allow_weaker_teacher=True, steps=1)["steps"] == 1


def test_a_teacher_with_damaged_layers_is_refused(distil: Distil, teacher_file: Path, tmp_path: Path) -> None:
    def zeroed(name: str, values: Any) -> Any:
        return values * 0 if ".layers.1." in name else values

    def noisy(name: str, values: Any) -> Any:
        return values * -3 if ".layers.1." in name and "proj" in name else values

    def poisoned(name: str, values: Any) -> Any:
        values.reshape(-1)[0] = float("nan") if "up_proj" in name else values.reshape(-1)[0]
        return values

    for change, word in ((zeroed, "zero"), (noisy, "held-out data"), (poisoned, "NaN")):
        copy = copy_of(teacher_file, tmp_path / f"{change.__name__}.apr", change)
        with pytest.raises(AprError, match=word) as caught:
            distil(change.__name__, teacher=str(copy))
        assert caught.value.exit_code in (4, 5)


def test_a_layer_of_zeros_is_refused_before_the_data_are_read(
    distil: Distil, teacher_file: Path, tmp_path: Path
) -> None:
    def unwritten(name: str, values: Any) -> Any:
        return np.zeros_like(values) if "layers.1.mlp.up" in name else values

    zero = copy_of(teacher_file, tmp_path / "z.apr", unwritten)
    with pytest.raises(RefusedError, match="zero") as caught:
        distil(teacher=str(zero), data=tmp_path / "absent.jsonl")
    assert caught.value.tensor == "model.layers.1.mlp.up_proj.weight"


def test_swapped_models_are_noticed(distil: Distil, teacher_file: Path, tmp_path: Path) -> None:
    small = Path(distil("small", steps=3, lr=1e-4)["model"])
    with pytest.raises(RefusedError, match="no better than the student"):
        distil("swapped", teacher=str(small), student=str(teacher_file), student_init=None)


@pytest.mark.parametrize(
    ("scores", "allow_weaker", "words"),
    [
        ({}, False, None),
        ({"teacher_ce": 9.0}, True, None),
        ({"teacher_ce": 3.5, "ce": 9.0}, False, r"ln\(V\)/2 = 3.45"),
        ({"teacher_ce": 2.0}, False, "no better than the student"),
        ({"teacher_ce": math.nan}, False, "not finite"),
        ({"teacher_ce": math.inf}, True, "not finite"),
        ({"kl": 5e-4}, True, "already equal the teacher's"),
        ({"kl": math.nan}, False, "already equal the teacher's"),
        ({"dropped_mass": 2e-3}, True, "assigns 0.20% of its probability"),
    ],
)
def test_the_guards_words_and_bounds(scores: Numbers, allow_weaker: bool, words: str | None) -> None:
    kind = RunError if "dropped_mass" in scores else RefusedError
    usual: Numbers = {"dropped_mass": None, "kl": 2e-3, "teacher_ce": 1.0, "ce": 2.0}
    with nullcontext() if words is None else pytest.raises(kind, match=words):
        guards.check_scores(usual | scores, 1000, allow_weaker=allow_weaker)


def test_training_leaves_the_teacher_as_it_was(distil: Distil, teacher_file: Path) -> None:
    before = train_runs.weights(teacher_file)
    distil(steps=3)
    assert train_runs.weights(teacher_file) == before


# --- files ---


@pytest.mark.parametrize("side", ["teacher", "student"])
@pytest.mark.parametrize(
    ("fault", "exits"),
    [
        ("absent", {3}), ("empty", {3, 4}), ("magic", {3, 4}), ("cut", {4}), ("cut footer", {4}), ("bit", {4}),
        ("no dims", {4, 5}), ("no tensors", {5}),
    ],
)  # fmt: skip
def test_bad_model_files_are_refused_at_once(
    distil: Distil, teacher_file: Path, tmp_path: Path, side: str, fault: str, exits: set[int]
) -> None:
    path = tmp_path / "bad.apr"
    data = copy_of(teacher_file, tmp_path / "other.apr", lambda name, values: values * 1.5).read_bytes()
    with aprfmt.open(teacher_file) as model:
        metadata = dict(model.metadata)
        tensors = {name: tensor.numpy() for name, tensor in model.tensors.items()}
    if fault == "no dims":
        kept = {k: v for k, v in metadata.items() if not k.startswith(("hidden", "num_", "aprfmt.hparams"))}
        aprfmt.save_file(tensors, path, kept)
    elif fault == "no tensors":
        aprfmt.save_file({}, path, metadata)
    elif fault != "absent":
        changed = data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]
        path.write_bytes({
            "empty": b"", "magic": b"what" + data[4:], "cut": data[: len(data) // 2],
            "cut footer": changed[:-4], "bit": changed,
        }[fault])  # fmt: skip
    begin = time.monotonic()
    with pytest.raises(AprError) as caught:
        distil(**{side: str(path)}, **({"student_init": None} if side == "student" else {}), allow_same_arch=True)
    assert caught.value.exit_code in exits
    assert time.monotonic() - begin < 5
    assert not (tmp_path / "run/latest").exists()


def test_data_that_are_missing_or_teach_nothing_are_refused(distil: Distil, tmp_path: Path) -> None:
    constant = tmp_path / "constant.jsonl"
    constant.write_text("".join(json.dumps({"text": "aaaa" * (50 + i)}) + "\n" for i in range(50)))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    absent = tmp_path / "absent.jsonl"
    for data, exits, word in ((absent, 3, "no such"), (constant, 5, "nearly constant"), (empty, 5, "no training")):
        begin = time.monotonic()
        with pytest.raises(AprError, match=word) as caught:
            distil(data=data)
        assert caught.value.exit_code == exits, data
        assert time.monotonic() - begin < 5


# --- device ---


def test_a_device_that_is_not_there_is_an_error_and_not_another_device(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Config().device == "cuda"
    with pytest.raises(MissingDependencyError) as caught:
        distil(device="cuda")
    assert caught.value.exit_code == 6
    assert "--device cpu" in str(caught.value.hint)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(MissingDependencyError, match="no device cuda:2"):
        device_of("cuda:2")
    for word in ("auto", "gpu", "mps", ""):
        with pytest.raises(UsageError):
            device_of(word)


def test_processes_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="share cuda:1"), join_world("cuda:1"):
        pass


def test_a_tensor_on_another_device_is_noticed() -> None:
    with pytest.raises(RunError) as caught:
        guards.check_resident([("w", torch.zeros(1, device="meta"))], torch.device("cpu"))
    assert caught.value.tensor == "w"


def test_a_batch_that_processes_cannot_share_is_refused(corpus_file: Path, teacher_file: Path, tmp_path: Path) -> None:
    from aprfmt.texts.sequences import Windows
    from aprtrain.models import open_pair
    from aprtrain.report.metrics import Recorder
    from aprtrain.resume import Saved
    from aprtrain.run import _batches, _corpus

    config = train_runs.options(
        "distill", corpus_file, tmp_path, teacher=str(teacher_file), student_init="layers:1", steps=2
    )
    world = World(torch.device("cpu"))
    with open_pair("distill", config) as pair:
        corpus = _corpus(config, world, tmp_path, Saved(), pair, Recorder(None, None))
        windows = Windows(corpus.train, config.seq_len, corpus.separator)
    with pytest.raises(UsageError, match="3 processes") as caught:
        _batches(config, corpus, windows, World(torch.device("cpu"), 0, 3), Recorder(None, None), 0)
    assert "96" in str(caught.value.hint)


# --- time ---


def test_a_step_that_hangs_is_ended_at_its_deadline() -> None:
    stalls: list[RunError] = []
    watchdog = Watchdog(0.2, stalls.append)
    with watchdog.step():
        time.sleep(0.4)
    assert len(stalls) == 1
    assert stalls[0].exit_code == 8
    assert "first step" in stalls[0].message
    watchdog = Watchdog(0.2, stalls.append)
    time.sleep(0.3)  # between steps anything may take its time
    for _ in range(3):
        with watchdog.step():
            pass
    time.sleep(0.3)
    assert watchdog.limit_s == 120
    assert len(stalls) == 1
    for least_s, limit in ((3.0, 3.0), (0.0, math.inf)):
        watchdog = Watchdog(0.2, stalls.append, least_s=least_s)
        for _ in range(3):
            with watchdog.step():
                pass
        assert watchdog.limit_s == limit


def test_a_step_that_fails_is_no_longer_watched() -> None:
    stalls: list[RunError] = []
    watchdog = Watchdog(0.2, stalls.append)
    with pytest.raises(KeyError), watchdog.step():
        raise KeyError
    time.sleep(0.4)
    assert stalls == []


def test_a_stall_in_a_run_ends_the_process_with_exit_8(
    distil: Distil, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from aprtrain.loop import Trainer

    monkeypatch.setattr(Trainer, "_launch", lambda *_: time.sleep(60))
    begin = time.monotonic()
    with forked(lambda: distil(deadline=0.5)) as child:
        assert child.wait() == 8
    assert time.monotonic() - begin < 10
    said = capfd.readouterr().err
    assert "first step of this run takes more than" in said
    assert "_step" in said, "the stacks are shown"


# --- utilisation and memory ---


@pytest.fixture
def fast_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_WINDOW", 5)
    monkeypatch.setattr(guards, "_INTERVAL_S", 0.01)


def watched(percent: int, warnings: list[str], least: float = 5.0) -> UtilizationMonitor:
    found = UtilizationMonitor(lambda: percent, warnings.append, least=least)
    found.wanted.set()
    with found:
        deadline = time.monotonic() + 5
        while len(found._samples) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
    return found


@pytest.mark.usefixtures("fast_samples")
def test_an_idle_gpu_stops_the_run_and_a_slow_one_warns_once() -> None:
    warnings: list[str] = []
    watched(90, warnings).check()
    assert warnings == []
    slow = watched(30, warnings)
    slow.check()
    slow.check()
    assert len(warnings) == 1
    assert slow.latest == 30
    with pytest.raises(RunError, match="idle: 2 %") as caught:
        watched(2, warnings).check()
    assert caught.value.exit_code == 8
    assert "--min-utilization 0" in str(caught.value.hint)
    watched(2, warnings, least=0).check()


@pytest.mark.usefixtures("fast_samples")
def test_samples_of_pauses_and_of_a_mute_device_do_not_count() -> None:
    resting = UtilizationMonitor(lambda: 0, lambda text: None)
    mute = UtilizationMonitor(lambda: -1, lambda text: None)
    mute.wanted.set()
    with resting, mute:
        time.sleep(0.1)
    resting.check()
    mute.check()
    assert resting.latest is mute.latest is None


def test_a_gpu_that_rests_while_kernels_are_compiled_is_not_idle(
    distil: Distil, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, wanted = Trainer._launch, list[bool]()
    watch = UtilizationMonitor(lambda: 0, lambda text: None)

    def launch(self: Trainer, micro_batches: list[Batch]) -> Any:
        wanted.append(watch.wanted.is_set())
        return honest(self, micro_batches)

    monkeypatch.setattr(Trainer, "_watch_device", lambda self, stack: setattr(self, "_utilisation", watch))
    monkeypatch.setattr(Trainer, "_launch", launch)
    distil(steps=3)
    assert wanted == [False, True, True]


def test_more_memory_than_planned_and_a_plan_beyond_the_device_are_errors() -> None:
    rows = [MemoryRow("teacher", 3 << 30), MemoryRow("student", 1 << 30)]
    budget.check_peak(rows, int(4.5 * 2**30))
    with pytest.raises(RunError, match="but 4"):
        budget.check_peak(rows, int(4.7 * 2**30))
    budget.check_fits(rows, 4 << 30)
    with pytest.raises(RefusedError) as caught:
        budget.check_fits([*rows, MemoryRow("more", 1)], 4 << 30)
    assert "largest part is teacher" in str(caught.value.hint)


def test_softcapped_scores_are_planned_and_grow_with_the_length() -> None:
    def planned(seq_len: int, cap: float) -> int:
        pair = student_alone(replace(SHAPE, attn_softcap=cap))
        config = Config(seq_len=seq_len, micro_tokens=8192)
        return total(memory_plan(config, pair, torch.device("cuda")))

    added = [planned(seq_len, 50.0) - planned(seq_len, 0.0) for seq_len in (256, SCORED, 2048, 8192)]
    assert added[1] == added[2] == added[3] == 2 * added[0] == 24 * 8192 * SCORED * SHAPE.n_heads


def test_run_refuses_in_the_order_that_costs_least(tmp_path: Path, corpus_file: Path) -> None:
    config = train_runs.options(
        "distill", corpus_file, tmp_path / "o", teacher="absent.apr", student_init="layers:1", steps=1
    )
    with pytest.raises(AprError) as caught:
        run("distill", config, stream=None)
    assert caught.value.exit_code == 3
