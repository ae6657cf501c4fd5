"""More models than a command takes, as from a glob: the hint is a loop of the shell that runs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Apr = Callable[..., Any]

LOOPS = {
    "convert a.gguf b.gguf c.gguf": [
        "apr convert a.gguf -o a.apr",
        "apr convert b.gguf -o b.apr",
        "apr convert c.gguf -o c.apr",
    ],
    "convert a.gguf b.gguf --dtype f16 -o out.gguf --threads 2": [
        "apr convert a.gguf --dtype f16 --threads 2 -o a-f16.gguf",
        "apr convert b.gguf --dtype f16 --threads 2 -o b-f16.gguf",
    ],
    "export a.gguf b.gguf c.gguf --format=hf --quantize w4a16": [
        f"apr export {x}.gguf --format=hf --quantize w4a16 -o {x}-w4a16-hf" for x in "abc"
    ],
    "convert x.apr one/ -o there": ["apr convert x.apr -o x.apr.gguf", "apr convert one/ -o one.gguf"],
    "quantize a.gguf b.gguf c.gguf q8_0": [f"apr quantize {x}.gguf q8_0" for x in "abc"],
    "tensors a.gguf b.gguf --limit 3": ["apr tensors a.gguf --limit 3", "apr tensors b.gguf --limit 3"],
    "diff a.gguf b.gguf c.gguf --values": ["apr diff a.gguf b.gguf --values", "apr diff a.gguf c.gguf --values"],
    "lint it's/x.gguf it's/y.gguf": ["apr lint it's/x.gguf", "apr lint it's/y.gguf"],
    "push a.gguf b.gguf org/repo": ["apr push a.gguf org/repo", "apr push b.gguf org/repo"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "one").mkdir()
    (tmp_path / "it's").mkdir()
    for name in ("a.gguf", "b.gguf", "c.gguf", "x.apr", "it's/x.gguf", "it's/y.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", LOOPS)
def test_the_hint_is_a_loop_over_the_models(line: str, folder: Path, apr: Apr) -> None:
    words = line.split()
    done = apr(*words, "--json")
    error = done.json["error"]
    assert done.code == 2
    assert re.fullmatch(f"apr {words[0]} takes (one model|two models), not [23]", error["message"])
    loop = error["hint"].splitlines()[0]
    script = f'apr() {{ echo apr "$@"; }}; {loop}'
    ran = subprocess.run(["sh", "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    assert [typed.replace(" --json", "") for typed in ran.stdout.splitlines()] == LOOPS[line]


_MERGE = "\nto merge importance matrices:\napr imatrix --merge a.gguf"


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        (
            ["a.gguf", "b.gguf", "--data", "t.txt"],
            f"apr imatrix a.gguf --data t.txt -o o.gguf{_MERGE} b.gguf -o o.gguf",
        ),
        (["a.gguf", "b.gguf", "c.gguf"], f"apr imatrix a.gguf --data TEXT -o o.gguf{_MERGE} b.gguf c.gguf -o o.gguf"),
        (["a.imatrix.gguf", "b.dat"], "apr imatrix --merge a.imatrix.gguf b.dat -o o.gguf"),
    ],
)
def test_imatrix_takes_one_model_or_merges_matrices(files: list[str], hint: str, apr: Apr) -> None:
    error = apr("imatrix", *files, "-o", "o.gguf", "--json").json["error"]
    n_files = len([name for name in files if name.endswith((".gguf", ".dat"))])
    assert (error["message"], error["hint"]) == (f"apr imatrix takes one model, not {n_files}", hint)


def test_a_folder_of_models_becomes_a_pattern(folder: Path, apr: Apr) -> None:
    assert "for f in *.gguf; do apr tree" in apr("tree", "a.gguf", "b.gguf", "c.gguf").stderr
    assert """for f in 'it'"'"'s'/*.gguf; do""" in apr("tree", "it's/x.gguf", "it's/y.gguf").stderr
    assert "for f in a.gguf c.gguf; do apr tree" in apr("tree", "a.gguf", "c.gguf").stderr


@pytest.mark.parametrize(
    "line", ["convert a.gguf b.gguf", "quantize a.gguf b.gguf q8_0", "stamp a.gguf b.gguf --license mit"]
)
def test_one_more_file_is_the_output(line: str, folder: Path, apr: Apr) -> None:
    assert "takes one model" not in apr(*line.split(), "--json").json["error"]["message"]
