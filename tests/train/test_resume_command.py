"""`apr resume RUN`, `apr runs FOLDER`: a killed run goes on from any folder, and is told from one that is alive."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train_children import forked
from train_runs import lines, options, same_model

from aprfmt.cli.main import run as apr
from aprfmt.errors import AprError, CorruptError, RefusedError, UnknownFormatError, UsageError
from aprfmt.inspection.run_report import METADATA
from aprfmt.inspection.runs import runs
from aprtrain.loop import Trainer
from aprtrain.recorded import recorded_config
from aprtrain.run import run

Distil = Callable[..., dict[str, Any]]


def test_a_killed_run_goes_on_from_another_folder(
    distil: Distil, teacher_file: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    how: dict[str, Any] = {"steps": 6, "save_every": 2, "eval_every": 2, "student_init": "layers:0,", "lr": 3e-3}
    distil(to="whole", **how)
    here, other = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    other.mkdir()
    for source, name in ((corpus_file, "c.jsonl"), (teacher_file, "t.apr")):
        (here / name).symlink_to(source)
    monkeypatch.chdir(here)
    config = options("distill", Path("c.jsonl"), Path("run"), teacher="t.apr", repeat=True, **how)
    after = Trainer._after_step

    def die_after_three(trainer: Trainer) -> None:
        after(trainer)
        if trainer.progress.step == 3:
            assert trainer.saver is not None
            trainer.saver.wait()
            state = runs(here).runs[0].state
            os.kill(os.getpid(), signal.SIGKILL if state == "running" else signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_after_step", die_after_three)
    with forked(lambda: run("distill", config, stream=None)) as child:
        assert child.wait() == -signal.SIGKILL, "while it trained it was listed as running"
    monkeypatch.setattr(Trainer, "_after_step", after)
    (row,) = runs(tmp_path / "here").runs
    assert (row.name, row.state, row.steps, row.total_steps) == ("run", "killed", 3, 6)
    monkeypatch.chdir(other)
    assert apr(["resume", str(here / "run")]) == 0
    assert "resuming from step 2" in (said := capsys.readouterr()).err
    assert f"model            {here / 'run' / 'model.apr'}" in said.out
    for label, words in (("as HF folder", "hf --format hf"), ("as GGUF", "model.gguf")):
        line = f"apr export {here / 'run' / 'model.apr'} -o {here / 'run'}/{words}"
        assert f"{label:<15}  {line}\n" in said.out
        assert apr(line.split()[1:]) == 0
    assert same_model(here / "run" / "model.apr", tmp_path / "whole" / "model.apr")
    (here / "run" / "model.apr").unlink()  # as of a run whose disk was full at its end
    assert apr(["resume", str(here / "run")]) == 0
    assert same_model(here / "run" / "model.apr", tmp_path / "whole" / "model.apr")
    assert [line["step"] for line in lines(here / "run")] == [1, 2, 3, 4, 5, 6]
    capsys.readouterr()
    assert apr(["runs", str(tmp_path)]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "state", "steps", "tokens", "loss", "loss", "of", "CE", "KL", "tok/s", "age"]
    assert all(" 0.8 KL + 0.2 CE  " in row for row in rows)
    assert [row.split()[:3] for row in rows] == [["here/run", "done", "6/6"], ["whole", "done", "6/6"]]


def both(capsys: pytest.CaptureFixture[str]) -> str:
    return "".join(capsys.readouterr())


def test_what_moved_since_the_run_is_named_with_what_to_type(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    distil(steps=1)
    folder = tmp_path / "run"
    path = folder / METADATA
    record = json.loads(path.read_text())
    data = record["resolved"]["data"]
    record["resolved"]["data"] = [str(tmp_path / "gone.jsonl")]
    path.write_text(json.dumps(record))
    assert apr(["resume", str(folder), "--steps", "2"]) == 0
    assert f"{tmp_path / 'gone.jsonl'} is not there: continuing with the tokens that the run stored" in both(capsys)
    (tmp_path / "gone.jsonl").write_text('{"text": "other words"}\n' * 9)
    path.write_text(json.dumps(record))
    assert apr(["resume", str(folder), "--steps", "3"]) == 0
    assert "the data changed since the run was started: continuing with the tokens" in both(capsys)
    assert apr(["resume", str(folder), "--data", str(tmp_path / "gone.jsonl")]) == 5
    assert f"hint: apr resume {folder} --data {folder / 'tokens'}" in both(capsys)
    record["resolved"] |= {"data": data, "teacher": "gone.gguf"}
    path.write_text(json.dumps(record))
    assert apr(["resume", str(folder)]) == 3
    said = capsys.readouterr().err
    assert f"gone.gguf: an input of the run is not there (the run was started in {record['cwd']})" in said
    assert f"apr resume {folder} in the folder that has gone.gguf" in said


def test_fewer_steps_than_an_unfinished_run_has_made_are_named(
    distil: Distil, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    distil(steps=3, total_steps=4)
    folder, line = tmp_path / "run", "beyond --steps 2: writing the final model without further steps"
    (folder / "model.apr").unlink()
    assert apr(["resume", str(folder), "--steps", "2"]) == 0
    assert f"the run is at step 3, {line}" in both(capsys)
    assert (folder / "model.apr").is_file()
    (folder / "model.apr").unlink()
    assert apr(["resume", str(folder), "--steps", "3"]) == 0
    assert "beyond" not in both(capsys)


def test_a_run_grows_and_its_schedule_with_it(distil: Distil, tmp_path: Path) -> None:
    distil(steps=2, total_steps=4)
    command, config, said = recorded_config(tmp_path / "run", 4)
    assert (command, config.steps, config.total_steps, config.resume, said) == ("distill", 4, 4, True, [])
    _, config, said = recorded_config(tmp_path / "run", 8)
    assert (config.total_steps, config.allow_changed) == (8, ("total_steps",))
    assert said == ["the learning rate schedule now ends at step 8; it ended at 4"]
    assert run("distill", config, stream=None)["steps"] == 8
    with pytest.raises(UsageError, match="already completed 8 steps"):
        run("distill", recorded_config(tmp_path / "run")[1], stream=None)
    with pytest.raises(UsageError, match="at least 1"):
        recorded_config(tmp_path / "run", 0)


def _damaged(folder: Path, **changed: object) -> Path:
    folder.mkdir(exist_ok=True)
    good = {"command": "pretrain", "resolved": {"steps": 4}}
    (folder / METADATA).write_text(json.dumps({**good, **changed}))
    return folder


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text("{}\n")
    folders: list[tuple[Path, type[AprError], str]] = [
        (tmp_path, UnknownFormatError, "not the folder of a training run"),
        (tmp_path / "begun", RefusedError, "before it saved a checkpoint"),
        (_damaged(tmp_path / "a", command="rm"), CorruptError, "no command or no options"),
        (_damaged(tmp_path / "b", resolved=[]), CorruptError, "no command or no options"),
        (_damaged(tmp_path / "c", resolved={"steps": "many"}), CorruptError, "option steps is 'many'"),
    ]
    for folder, kind, words in folders:
        with pytest.raises(kind, match=words):
            recorded_config(folder)
    for text in ("{", "[" * 100_000, "[]"):
        (tmp_path / "a" / METADATA).write_text(text)
        with pytest.raises(CorruptError, match=r"not (JSON|a JSON object)"):
            recorded_config(tmp_path / "a")
    assert recorded_config(_damaged(tmp_path / "d", unknown=1))[1].steps == 4


def test_paths_that_were_relative_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = tmp_path / "start"
    for name in ("m", "a.jsonl", "config.json", "p.jsonl"):
        (start / name).mkdir(parents=True)
    given = {"student": "m", "teacher": "org/repo", "student_init": "config.json", "data": ["a.jsonl:2", "b:1"]}
    given |= {"prompts": "p.jsonl"}
    folder = _damaged(tmp_path / "run", resolved=given, cwd=str(start), command="distill")
    config = recorded_config(folder)[1]
    assert (config.student, config.student_init) == (f"{start}/m", f"{start}/config.json")
    assert config.prompts == f"{start}/p.jsonl"
    assert config.teacher == "org/repo", "an address of the hub is none of a file"
    assert config.data == (f"{start}/a.jsonl:2", "b:1")
    monkeypatch.chdir(start)
    assert recorded_config(folder)[1].student == "m"
    assert recorded_config(folder, data="other")[1].data == ("other",)


def test_runs_are_found_below_a_folder_and_odd_ones_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a/b/one", ".hidden/two", "a/b/one/inside", "1/2/3/4/5/deep"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text('{"event": "step", "step": 3, "tokens": 9, "loss": 1.5}\n')
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "metrics.jsonl").write_text("9" * 5000)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    found = runs(tmp_path)
    assert [(row.name, row.steps, row.loss) for row in found.runs if row.name != "odd"] == [("a/b/one", 3, 1.5)]
    assert apr(["runs", str(tmp_path / "a" / "b" / "one"), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["state"], row["kl"]) for row in body["runs"]] == [("one", "killed", None)]
    assert apr(["runs", str(tmp_path / "absent")]) == 3
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    assert apr(["runs", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == f"no training run in {tmp_path / 'empty'}\n"
