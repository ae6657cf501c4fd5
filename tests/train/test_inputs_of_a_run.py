"""A run writes and removes many files: no input lies in its folder, and no link leads from one to the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from aprfmt.cli.main import run
from aprfmt.io.sink import check_no_inputs_inside

WORDS = {
    "--teacher": "t.apr", "--student": "s.apr", "--data": "d.txt", "--eval-data": "e.txt", "--teacher-logprobs": "files"
}  # fmt: skip


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inputs beside the folder of a run, of which nothing is ever parsed."""
    monkeypatch.chdir(tmp_path)
    for name in (*(n for n in WORDS.values() if "." in n), "files/a", "run/model.apr", "run/tokens/x", "s/a", "s/b"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(name)
    return tmp_path


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def given(**changed: str) -> list[str]:
    words = {**WORDS, **{f"--{key.replace('_', '-')}": value for key, value in changed.items()}}
    words.pop("--teacher-logprobs" if "teacher_logprobs" not in changed else "--teacher")
    return [word for item in words.items() for word in item]


def linked(name: str, place: str, **changed: str) -> Callable[[], list[str]]:
    def words() -> list[str]:
        os.symlink(os.path.abspath(name), place)
        return given(**changed)

    return words


def hard(name: str, place: str, **changed: str) -> Callable[[], list[str]]:
    def words() -> list[str]:
        os.link(name, place)
        return given(**changed)

    return words


CASES: dict[str, Callable[[], list[str]]] = {
    "the student": lambda: given(student="run/model.apr"),
    "the teacher": lambda: given(teacher="run/model.apr"),
    "the teacher's files": lambda: given(teacher_logprobs="run/tokens"),
    "a file of data": lambda: given(data="run/tokens/x"),
    "data with a weight": lambda: [*given(data="d.txt:1"), "--data", "run/tokens/x:2"],
    "what is evaluated": lambda: given(eval_data="run/../run/tokens/x"),
    "a link to the student": linked("s.apr", "run/latest.apr"),
    "a link to a folder of data": linked("s", "run/out", data="s/a"),
    "a link into the data": linked("s/b", "run/metrics.jsonl", data="s"),
    "a name of the student": hard("s.apr", "run/metrics.jsonl"),
    "a name of a file of data": hard("s/b", "run/metrics.jsonl", data="s"),
    "through a link": linked("run", "link", student="link/model.apr"),
    "a student with a link": linked("run/model.apr", "s/model.apr", student="s"),
}


@pytest.mark.parametrize("name", CASES)
def test_no_input_lies_in_the_output(name: str, at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = CASES[name]()
    before = contents(at)
    assert run(["distill", *words, "-o", "run", "--resume", "--steps", "1", "--device", "cpu"]) == 5
    said = capsys.readouterr().err
    assert "the output folder contains the input" in said
    assert "choose another output with -o" in said
    assert contents(at) == before


def test_a_folder_of_data_may_hold_the_run(at: Path) -> None:
    os.symlink(at / "run" / "tokens", at / "run" / "latest")  # as trackers make them
    os.symlink(at / "nowhere", at / "run" / "broken")
    check_no_inputs_inside("run", [".", "s.apr", "s", "nosuch", "hf://org/name"])
    check_no_inputs_inside("nosuch", ["s.apr"])
