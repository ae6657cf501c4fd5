"""What a run goes on from: every byte of it is checked, and a damaged checkpoint gives way to the one before it."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from flips import draw, flip, flipped
from train_runs import lines, weights
from train_worlds import Threads, together

import aprfmt
from aprfmt.cli.main import run as apr
from aprfmt.errors import AprError, ChecksumError, CorruptError, RefusedError, RunError, StorageError, UsageError
from aprfmt.inspection.run_page import html
from aprfmt.inspection.run_report import summarise
from aprfmt.texts.shards import open_corpus, read_header
from aprtrain import resume
from aprtrain.checkpoints.checkpoint import BEST, LATEST, read_pointer
from aprtrain.checkpoints.state import State, open_state, save_state
from aprtrain.config_sources import build
from aprtrain.resume import find_checkpoint, model_file, state_file
from aprtrain.run import run
from aprtrain.world import ReportedByFirst, World

Distil = Callable[..., dict[str, Any]]

FLIPS = int(os.environ.get("APR_FLIPS", "90"))
"""Bits that are tried one at a time; APR_FLIPS=3000 takes some minutes."""

ALONE = World(torch.device("cpu"))
MORE: dict[str, Any] = {"steps": 8, "total_steps": 8, "save_every": 2}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path, teacher_file: Path) -> Path:
    """The folder of a run of six steps of eight, with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    how = {"teacher": str(teacher_file), "student_init": "layers:0,", "lr": 3e-3, "repeat": True}
    config = train_runs.options("distill", corpus_file, folder, **{**how, **MORE, "steps": 6})
    run("distill", config, stream=None)
    return folder


@pytest.fixture(scope="module")
def reference(begun: Path, tmp_path_factory: pytest.TempPathFactory, corpus_file: Path, teacher_file: Path) -> Any:
    """Weights after the last two steps, of a run that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    shutil.copytree(begun, folder)
    how = {"teacher": str(teacher_file), "student_init": "layers:0,", "lr": 3e-3, "repeat": True, "resume": True}
    run("distill", train_runs.options("distill", corpus_file, folder, **{**how, **MORE}), stream=None)
    return weights(folder / "model.apr")


@pytest.fixture
def run_folder(begun: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage, where `distil` looks for it."""
    shutil.copytree(begun, tmp_path / "run")
    return tmp_path / "run"


def in_the_middle(path: Path) -> int:
    return 4 * path.stat().st_size + 6


def edit(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> None:
    """Writes a state again with other facts or tensors, and checksums that fit."""
    tensors, facts = train_runs.load_state(path)
    change(facts, tensors)
    save_state(tensors, facts, path)


# --- single bits ---


def test_no_bit_of_a_checkpoint_or_of_the_tokens_turns_over_unnoticed(begun: Path) -> None:
    header = read_header(begun / "tokens")
    assert header is not None
    names = [LATEST, BEST, *(path.name for path in begun.glob("ckpt-*"))]
    files = [begun / name for name in names] + sorted((begun / "tokens").iterdir())
    assert len(files) == 2 + 6 + 5

    def is_noticed(path: Path) -> bool:
        step = int(path.stem[-6:]) if path.name.startswith("ckpt") else None
        try:
            saved = find_checkpoint(begun, True if step in (None, 6) else step, ALONE)
            open_corpus(begun / "tokens", header["tokenizer"])
        except CorruptError:
            return True
        except RefusedError as error:  # of another tokenizer, says a header that is damaged
            pytest.fail(f"{path}: {error}")
        return bool(saved.damaged or saved.notes)

    assert not is_noticed(begun / LATEST)
    for path, bit in draw(files, FLIPS):
        with flipped(path, bit):
            assert is_noticed(path), f"bit {bit} of {path.name}"
    assert not is_noticed(begun / LATEST)


def test_a_digit_of_a_fact_does_not_change_unnoticed(run_folder: Path) -> None:
    """One that any value may have: a score."""
    path = state_file(run_folder, 6)
    data = path.read_bytes()
    at = data.index(b'\\"ce\\":') + 10
    assert data[at : at + 1].isdigit()
    path.write_bytes(data[:at] + (b"3" if data[at : at + 1] != b"3" else b"2") + data[at + 1 :])
    with pytest.raises(ChecksumError, match="checksum mismatch of its metadata"):
        find_checkpoint(run_folder, 6, ALONE)


@pytest.mark.parametrize(
    "name",
    ["ckpt-step-000006.apr", "ckpt-step-000006.state", "latest", "best", "tokens/train.bin", "tokens/tokens.json"],
)
def test_a_run_that_goes_on_after_damage_ends_with_the_same_weights(
    name: str, run_folder: Path, distil: Distil, reference: dict[str, bytes]
) -> None:
    flip(run_folder / name, in_the_middle(run_folder / name))
    said = io.StringIO()
    distil(**MORE, resume=True, stream=said)
    assert "damaged" in said.getvalue()
    assert weights(run_folder / "model.apr") == reference
    assert read_pointer(run_folder, LATEST) == 8
    assert read_pointer(run_folder, BEST) is not None


# --- which checkpoint ---


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(
    run_folder: Path, distil: Distil, reference: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (4, 6):
        flip(state_file(run_folder, step), in_the_middle(state_file(run_folder, step)))
    said = io.StringIO()
    summary = distil(**MORE, resume=True, stream=said)
    assert "checkpoint 6 is damaged (the tensor's checksum is wrong in ckpt-step-000006.state" in said.getvalue()
    assert "resuming from 2" in said.getvalue()
    assert [row["step"] for row in summary["damaged"]] == [6, 4]
    assert "checksum" in summary["damaged"][0]["reason"]
    assert weights(run_folder / "model.apr") == reference
    assert [line["step"] for line in lines(run_folder)] == list(range(1, 9))
    body = summarise(run_folder)
    assert [(row["checkpoint"], row["step"]) for row in body["damaged"]] == [(6, 2), (4, 2)]
    assert "Checkpoint 6 is damaged (" in html(body)
    assert apr(["report", str(run_folder)]) == 0
    assert re.search(
        r"damaged checkpoint 6 is damaged \([^)]*\): resumed from 2", " ".join(capsys.readouterr().out.split())
    )


def test_where_every_checkpoint_is_damaged_nothing_goes_on(run_folder: Path, distil: Distil) -> None:
    for step in (2, 4, 6):
        flip(model_file(run_folder, step), in_the_middle(model_file(run_folder, step)))
    before = {path.name: path.read_bytes() for path in run_folder.glob("*") if path.is_file()}
    with pytest.raises(CorruptError) as caught:
        distil(**MORE, resume=True)
    assert caught.value.exit_code == 4
    assert caught.value.path == str(model_file(run_folder, 6))
    assert "4, 2" in str(caught.value.hint)
    assert {path.name: path.read_bytes() for path in run_folder.glob("*") if path.is_file()} == before


def test_a_step_may_be_named(run_folder: Path, distil: Distil, reference: dict[str, bytes]) -> None:
    said = io.StringIO()
    assert distil(**{**MORE, "steps": 5}, resume=4, stream=said)["checkpoints"] == [5]
    assert "checkpoints after step 4 (6) are discarded" in said.getvalue()
    assert {int(path.stem[-6:]) for path in run_folder.glob("ckpt-*")} == {2, 4, 5}
    assert (read_pointer(run_folder, LATEST), read_pointer(run_folder, BEST)) == (5, 5)
    distil(**MORE, resume=True)
    assert weights(run_folder / "model.apr") == reference


def test_a_step_without_a_checkpoint_is_told_which_there_are(run_folder: Path, distil: Distil) -> None:
    with pytest.raises(RefusedError, match="no checkpoint of step 5") as caught:
        distil(**MORE, resume=5)
    assert "2, 4, 6" in str(caught.value.hint)


def test_a_damaged_step_that_is_named_is_an_error(run_folder: Path, distil: Distil) -> None:
    flip(state_file(run_folder, 4), in_the_middle(state_file(run_folder, 4)))
    with pytest.raises(CorruptError) as caught:
        distil(**MORE, resume=4)
    assert (caught.value.exit_code, caught.value.path) == (4, str(state_file(run_folder, 4)))
    assert caught.value.tensor is not None


def test_checkpoints_that_were_left_behind_are_no_fallback(run_folder: Path, distil: Distil) -> None:
    """Step 4 is of the line that ended with 6, and the run went on from 2."""
    distil(**{**MORE, "steps": 5, "save_every": 0}, resume=2)
    assert {int(path.stem[-6:]) for path in run_folder.glob("ckpt-*")} == {2, 5}
    flip(state_file(run_folder, 5), in_the_middle(state_file(run_folder, 5)))
    assert find_checkpoint(run_folder, True, ALONE).step == 2


def test_latest_is_where_the_run_went_on_before_it_saves(
    run_folder: Path, distil: Distil, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("aprtrain.run.run_loop", killed)
    with pytest.raises(KeyboardInterrupt):
        distil(**MORE, resume=4)
    assert read_pointer(run_folder, LATEST) == 4
    saved = find_checkpoint(run_folder, True, ALONE)
    assert (saved.step, saved.left) == (4, (6,))


def test_without_latest_the_newest_that_is_whole_is_taken(run_folder: Path) -> None:
    (run_folder / LATEST).unlink()
    assert find_checkpoint(run_folder, True, ALONE).step == 6
    (run_folder / LATEST).write_text("{}")
    saved = find_checkpoint(run_folder, True, ALONE)
    assert saved.step == 6
    assert "latest is damaged" in "".join(saved.lines())


@pytest.mark.parametrize("suffix", ["apr", "state"])
def test_half_a_checkpoint_is_a_damaged_one(run_folder: Path, suffix: str) -> None:
    (run_folder / f"ckpt-step-000006.{suffix}").unlink()
    saved = find_checkpoint(run_folder, True, ALONE)
    assert saved.step == 4
    assert saved.damaged[0].step == 6
    assert f"ckpt-step-000006.{suffix}" in saved.damaged[0].reason


def test_two_checkpoints_are_the_fewest_that_are_kept() -> None:
    with pytest.raises(UsageError, match=r"^--keep must be at least 2, not 1$"):
        build("pretrain", {"init": "m", "data": "d", "output": "o", "steps": 2, "keep": 1})


# --- the command line ---


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--resume"], True), (["--resume", "4"], 4), (["--resume=4"], 4), (["--resume", "0"], 0),
        (["--no-resume"], False), (["--resume", "--no-resume"], False), ([], False),
    ],
)  # fmt: skip
def test_the_switch_may_have_a_step(
    words: list[str], value: object, teacher_file: Path, corpus_file: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for step in (0, 4):
        checkpoint = resume.state_file(tmp_path / "o", step)
        checkpoint.parent.mkdir(exist_ok=True)
        checkpoint.touch()
    start = ["distill", *words, str(teacher_file), "--student-init", "layers:1", "--data", str(corpus_file)]
    sizes = ["--seq-len", "32", "--tokens-per-step", "64", "--micro-tokens", "32", "--device", "cpu"]
    assert apr([*start, "-o", str(tmp_path / "o"), "--steps", "4", *sizes, "--plan", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["config"]["resume"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("word", ["--resume=soon", "--resume=-1", "--resume=1.5"])
def test_a_step_that_is_none_is_a_usage_error(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert apr(["pretrain", "--init", "m", "--data", "d", "-o", "o", "--steps", "4", word]) == 2
    assert "resume must be the step of a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("300", 300)])
def test_a_file_of_options_may_name_a_step(text: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f"resume = {text}\n")
    found = build("pretrain", {"init": "m", "data": "d", "output": "o", "steps": 2}, file)[0].resume
    assert found == value
    assert type(found) is type(value)


# --- facts ---


def _without(name: str) -> Callable[[dict[str, Any]], object]:
    def change(facts: dict[str, Any]) -> None:
        *folders, last = name.split(".")
        for key in folders:
            facts = facts[key]
        del facts[last]

    return change


def _with(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    def change(facts: dict[str, Any]) -> None:
        *folders, last = name.split(".")
        for key in folders:
            facts = facts[key]
        facts[last] = value

    return change


NAMES = (
    "cursor", "digest", "config", "origin", "progress", "progress.step", "progress.tokens", "progress.best",
    "progress.evaluations", "origin.teacher", "origin.student", "origin.data", "origin.config_digest", "config.lr",
)  # fmt: skip
_MISSING = object()
RIGHT: dict[str, list[object]] = {"progress.best": [-1, 1.5], "origin.data": ["x"], "config.lr": [1.5]}
WRONG: list[object] = ["x", -1, 1.5, True, [1], [{"step": "x"}], [{}], {"print": 1}, {"a": 1}]


@pytest.mark.turns
@pytest.mark.parametrize("name", NAMES)
def test_a_fact_that_is_missing_or_of_a_wrong_type_is_named(run_folder: Path, name: str) -> None:
    path = state_file(run_folder, 6)
    whole = path.read_bytes()
    for value in (_MISSING, *WRONG):
        if value in RIGHT.get(name, []):
            continue
        path.write_bytes(whole)
        change = _without(name) if value is _MISSING else _with(name, value)
        edit(path, lambda facts, tensors, change=change: change(facts))  # type: ignore[misc]
        with pytest.raises(CorruptError) as caught:
            find_checkpoint(run_folder, 6, ALONE)
        assert caught.value.path == str(path), value
        assert name in str(caught.value), value
    path.write_bytes(whole)
    assert find_checkpoint(run_folder, 6, ALONE).step == 6


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_with("progress.step", 5), "progress.step"),
        (_with("progress.tokens", 1), "progress.tokens"),
        (_with("config.lr", 1.0), "digest"),
        (_with("config.lr", "fast"), "config.lr"),
        (_with("config.repeat", 1), "config.repeat"),
        (_with("digest", "0"), "digest"),
        (_with("progress.more", 1), "progress.more"),
    ],
)
def test_facts_that_contradict_each_other_are_named(
    run_folder: Path, change: Callable[[dict[str, Any]], object], word: str
) -> None:
    edit(state_file(run_folder, 6), lambda facts, tensors: change(facts))
    with pytest.raises(CorruptError, match=word):
        find_checkpoint(run_folder, 6, ALONE)


UP = "layers.0.mlp.up"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda t, up: t.pop("rng"), "rng"),
        (lambda t, up: t.update(rng=t["rng"][:-1]), "rng"),
        (lambda t, up: t.pop("step"), "step"),
        (lambda t, up: t.update(step=torch.tensor(7.0)), "step"),
        (lambda t, up: t.update(step=torch.tensor(1.5)), "step"),
        (lambda t, up: t.pop(f"mean.{up}"), "mean."),
        (lambda t, up: t.update({f"mean.{up}": t[f"mean.{up}"][:-1]}), "mean."),
        (lambda t, up: t.update({f"square.{up}": t[f"square.{up}"].to(torch.int64)}), "square."),
        (lambda t, up: t.update({"other": torch.zeros(1)}), "other"),
        (lambda t, up: t.update({"mean.other": torch.zeros(1)}), "mean.other"),
    ],
)
def test_tensors_that_do_not_belong_together_are_named(
    run_folder: Path, change: Callable[..., object], name: str
) -> None:
    path = state_file(run_folder, 6)
    up = next(key for key in train_runs.load_state(path)[0] if key.startswith("master.")).removeprefix("master.")
    edit(path, lambda facts, tensors: change(tensors, up))
    with pytest.raises(CorruptError) as caught:
        find_checkpoint(run_folder, 6, ALONE)
    assert caught.value.path == str(path)
    assert str(caught.value.tensor).startswith(name)


def test_a_state_of_another_network_is_damage_and_no_defect(run_folder: Path, distil: Distil) -> None:
    def widen(facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        name = next(key for key in tensors if key.startswith("master.")).removeprefix("master.")
        for kind in ("master", "mean", "square"):
            tensors[f"{kind}.{name}"] = torch.cat([tensors[f"{kind}.{name}"]] * 2)

    edit(state_file(run_folder, 6), widen)
    with pytest.raises(CorruptError, match="a different network") as caught:
        distil(**MORE, resume=6)
    assert caught.value.tensor is not None


def test_a_model_of_other_dims_beside_the_state_is_named(run_folder: Path, distil: Distil) -> None:
    path = model_file(run_folder, 6)
    with aprfmt.open(path) as model:
        tensors = {name: tensor.numpy().copy() for name, tensor in model.tensors.items()}
        metadata = dict(model.metadata) | {"vocab_size": 7}
    aprfmt.save_file(tensors, path, metadata, force=True)
    with pytest.raises(CorruptError, match="vocab_size is 7") as caught:
        distil(**MORE, resume=6)
    assert caught.value.path == str(path)


def test_a_model_of_another_step_is_no_part_of_a_checkpoint(run_folder: Path) -> None:
    shutil.copy(model_file(run_folder, 4), model_file(run_folder, 6))
    saved = find_checkpoint(run_folder, True, ALONE)
    assert saved.step == 4
    assert "step is 4" in saved.damaged[0].reason


# --- values ---


@pytest.mark.parametrize("kind", ["master", "mean", "square"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_exit_8_with_the_tensors_name(
    run_folder: Path, distil: Distil, kind: str, value: float
) -> None:
    path = state_file(run_folder, 6)
    name = [key for key in train_runs.load_state(path)[0] if key.startswith(f"{kind}.")][-1]
    edit(path, lambda facts, tensors: tensors[name].view(-1)[-1:].fill_(value))
    with pytest.raises(RunError, match="not finite") as caught:
        distil(**MORE, resume=True)
    assert (caught.value.exit_code, caught.value.tensor, caught.value.path) == (8, name, str(path))
    assert "4, 2" in str(caught.value.hint)


def test_a_flipped_bit_of_an_exponent_is_noticed_where_it_is_loaded_too(run_folder: Path) -> None:
    """Between the check and the loading: each tensor is compared with its checksum whenever it is read."""
    path = state_file(run_folder, 6)
    with open_state(path) as state:
        flip(path, 8 * path.stat().st_size - 8 * 3)
        with pytest.raises(AprError, match="checksum"):
            dict(state)


# --- several processes ---


def both(work: Callable[[World], Any]) -> list[Any]:
    return Threads(2).run(work)


def test_all_processes_choose_the_checkpoint_that_is_whole_for_each(run_folder: Path) -> None:
    """The damaged tensors are such that each of the processes finds one of them alone."""
    path = state_file(run_folder, 6)
    with open_state(path) as state:
        spans = {name: (t.offset, t.n_bytes) for name, t in state._tensors.items()}
    names = [name for name, (_, n_bytes) in spans.items() if n_bytes]
    for name in names[:4]:
        with flipped(path, 8 * spans[name][0] + 5):
            found = both(lambda world: find_checkpoint(run_folder, True, world))
        assert [saved.step for saved in found] == [4, 4]
        assert found[0].damaged == found[1].damaged
        assert name in found[0].damaged[0].reason
    assert [saved.step for saved in both(lambda world: find_checkpoint(run_folder, True, world))] == [6, 6]


@pytest.mark.parametrize("fault", ["damage", "not finite", "no facts"])
def test_all_processes_end_with_the_same_error_and_one_tells_it(run_folder: Path, fault: str) -> None:
    path = state_file(run_folder, 6)
    if fault == "damage":
        flip(path, in_the_middle(path))
    elif fault == "not finite":
        edit(path, lambda facts, tensors: tensors[list(tensors)[1]].view(-1)[:1].fill_(float("nan")))
    else:
        edit(path, lambda facts, tensors: facts.pop("cursor"))

    def failing(world: World) -> AprError:
        with pytest.raises(AprError) as caught:
            find_checkpoint(run_folder, 6, world)
        return caught.value

    first, second = both(failing)
    assert (type(first), str(first), first.exit_code) == (type(second), str(second), second.exit_code)
    assert first.exit_code == (8 if fault == "not finite" else 4)
    assert not isinstance(first.__cause__, ReportedByFirst)
    assert isinstance(second.__cause__, ReportedByFirst)


def test_what_one_process_alone_cannot_read_ends_all(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = resume._check
    rank = threading.local()

    def unreadable(state: State, name: str) -> None:
        if rank.number == 1 and name.startswith("mean."):
            raise StorageError("Input/output error", path=state.path)
        honest(state, name)

    monkeypatch.setattr(resume, "_check", unreadable)

    def failing(world: World) -> AprError:
        rank.number = world.rank
        with pytest.raises(AprError) as caught:
            find_checkpoint(run_folder, True, world)
        return caught.value

    first, second = both(failing)
    assert isinstance(first, StorageError)
    assert (str(first), first.hint) == (str(second), second.hint)
    assert "in process 1" in str(first.hint)
    assert isinstance(second.__cause__, ReportedByFirst)


def test_two_processes_go_on_from_the_older_checkpoint(
    run_folder: Path, corpus_file: Path, teacher_file: Path, tmp_path: Path
) -> None:
    how = {"teacher": str(teacher_file), "student_init": "layers:0,", "lr": 3e-3, "repeat": True, "resume": True}
    config = train_runs.options("distill", corpus_file, run_folder, **{**how, **MORE})
    flip(state_file(run_folder, 6), in_the_middle(state_file(run_folder, 6)))

    def work(rank: int) -> None:
        summary = run("distill", config, stream=None)
        assert summary["steps"] == 8
        assert [row["step"] for row in summary["damaged"]] == [6]

    together(work)
    assert read_pointer(run_folder, LATEST) == 8
    assert [row["checkpoint"] for row in summarise(run_folder)["damaged"]] == [6]
