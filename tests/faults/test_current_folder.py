"""What lies in the current folder is never imported: by a command, or by a process that it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from plain_models import write_folder

_PLANTED = ("torch/__init__", "jinja2", "json", "pickle", "zipfile", "xllamacpp/__init__", "llama_cpp/__init__")
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder of modules that leave a file behind when they are imported."""
    folder, marker = tmp_path / "trap", tmp_path / "marker"
    for name in _PLANTED:
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(marker)!r}, 'a').write({name!r})")
    return folder


def words(trap: Path, command: str) -> list[str]:
    """The arguments of a command that needs a process of ours, with its material beside the trap."""
    beside = trap.parent
    if command == "inspect":
        torch.save({"w": torch.ones(2)}, beside / "m.bin")
        return ["inspect", str(beside / "m.bin")]
    if command == "data":
        model = write_folder(beside / "model")
        settings = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": _TEMPLATE}))
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        (beside / "talk.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
        return ["data", str(beside / "talk.jsonl"), "--model", str(model)]
    if command == "run":
        from demo_model import build

        build(beside / "m.gguf")
        return ["run", str(beside / "m.gguf"), "--raw", "The capital", "-n", "2"]
    return [command]


def started(trap: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    places = [entry for entry in sys.path if os.path.isabs(entry) and os.path.isdir(entry)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    environment.pop("PYTHONSAFEPATH", None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=trap, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.turns
@pytest.mark.parametrize("start", ["script", "module"])
@pytest.mark.parametrize("command", ["doctor", "inspect", "data", pytest.param("run", marks=pytest.mark.llama)])
def test_nothing_of_it_is_imported(command: str, start: str, trap: Path) -> None:
    if command == "run" and not find_spec("xllamacpp"):
        pytest.skip("needs xllamacpp")
    arguments = ["-m", "aprfmt"]
    if start == "script":  # as pip writes it
        (trap / "aprfmt").mkdir()
        (trap / "aprfmt/__init__.py").write_text((trap / "json.py").read_text())
        (trap.parent / "bin").mkdir()
        (trap.parent / "bin/apr").write_text("from aprfmt.cli.main import main\nmain()\n")
        arguments = [str(trap.parent / "bin/apr")]
    done = started(trap, [*arguments, *words(trap, command), "--json"])
    assert not (trap.parent / "marker").exists(), (trap.parent / "marker").read_text()
    assert (done.returncode, done.stderr) == (0, "") or command == "doctor", done.stderr
    body = json.loads(done.stdout)
    assert body["ok"]
    if command == "doctor":
        assert not any(row["id"] == "gpu" and row["status"] == "fail" for row in body["findings"])


def test_a_session_in_the_folder(trap: Path) -> None:
    """A notebook or `python -c` searches the current folder; the processes that it starts do not."""
    code = (
        "import sys; sys.path.remove(''); import json, re, jinja2, pickle, aprfmt.tokenizer.chat as c; "
        "sys.path.insert(0, ''); print(c.ChatTemplate('{{ 1 + 1 }}').render([]))"
    )
    done = started(trap, ["-c", code])
    assert (done.stdout, done.stderr) == ("2\n", "")
    assert not (trap.parent / "marker").exists()
