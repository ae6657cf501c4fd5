"""The frame: exit codes, the JSON envelope, signals, streams, start-up cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aprfmt.cli import failures
from aprfmt.cli.group import COMMANDS

Apr = Callable[..., Any]
HEAVY = ("torch", "numpy", "transformers", "gguf", "typer", "click", "tokenizers")


def spawn(*words: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "aprfmt", *words], capture_output=True, env=os.environ | env, check=False
    )


def test_version_imports_nothing_heavy() -> None:
    code = (
        "import sys, atexit\n"
        f"atexit.register(lambda: sys.stderr.write(','.join(m for m in {HEAVY} if m in sys.modules)))\n"
        "sys.argv = ['apr', '--version']\n"
        "from aprfmt.cli.main import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("apr ")
    assert done.stderr == ""


def test_inspecting_imports_nothing_heavy(tiny_gguf: Path) -> None:
    heavy = ("torch", "numpy", "transformers", "gguf", "tokenizers", "rich")
    code = (
        "import sys\nfrom aprfmt.cli.main import run\n"
        f"assert run(['inspect', {str(tiny_gguf)!r}, '--json']) == 0\n"
        f"sys.stderr.write(','.join(m for m in {heavy} if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_version_json() -> None:
    done = spawn("--version", "--json")
    body = json.loads(done.stdout)
    assert body["schema"] == "apr.version/1"
    assert body["ok"] is True
    assert set(body) == {"schema", "ok", "name", "version", "python"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(apr: Apr, name: str) -> None:
    done = apr(name, "--help")
    assert done.code == 0
    assert f"apr {name}" in done.stdout.split("Options:")[0].split("Usage:")[1].partition("\n")[2]
    assert "\\[" not in done.stdout
    assert "--json" in done.stdout


def test_help_lists_every_command_without_importing_any(apr: Apr) -> None:
    done = apr("--help")
    assert done.code == 0
    assert all(row.help[:40] in done.stdout for row in COMMANDS.values())


@pytest.mark.parametrize(
    "words",
    [
        ("inspect",),
        ("nope",),
        ("inspect", "x", "--nope"),
        ("tensors", "x", "--limit", "many"),
        ("import", "x"),
        (),
    ],
)
def test_usage_errors(apr: Apr, words: tuple[str, ...]) -> None:
    done = apr(*words, "--json")
    assert done.code == 2
    assert done.json["schema"] == "apr.error/1"
    assert done.json["ok"] is False
    assert set(done.json["error"]) == {"code", "message", "path", "tensor", "offset", "hint"}
    assert done.json["error"]["code"] == "usage"


def test_errors_as_text_go_to_stderr(apr: Apr, tmp_path: Path) -> None:
    done = apr("inspect", tmp_path / "none.apr")
    assert (done.code, done.stdout) == (3, "")
    assert done.stderr.startswith("error: ")
    assert "none.apr" in done.stderr


@pytest.mark.parametrize(
    ("data", "code"), [(b"", 3), (b"hello world", 3), (b"APR\0" + b"\xff" * 99, 4), (b"GGUF", 4)]
)
def test_bad_files(apr: Apr, tmp_path: Path, data: bytes, code: int) -> None:
    path = tmp_path / "junk.apr"
    path.write_bytes(data)
    done = apr("inspect", path, "--json")
    assert done.code == code
    assert done.json["error"]["path"] == str(path)


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (PermissionError(13, "Permission denied", "/x"), 7, "storage"),
        (FileNotFoundError(2, "No such file", "/x"), 3, "not-found"),
        (OSError(28, "No space left on device", "/x"), 7, "storage"),
        (MemoryError(), 7, "memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (failures.Terminated(15), 143, "terminated"),
        (ZeroDivisionError("oops"), 70, "internal"),
        (RecursionError("deep"), 70, "internal"),
    ],
)
def test_outcomes(
    apr: Apr, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, word: str
) -> None:
    def boom(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr("aprfmt.cli.main._dispatch", boom)
    done = apr("inspect", "x", "--json")
    assert done.code == code
    assert done.json["error"]["code"] == word
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(apr: Apr, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(arguments: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("aprfmt.cli.main._dispatch", boom)
    monkeypatch.setenv("APR_DEBUG", "1")
    assert "Traceback" in apr("inspect", "x").stderr


def test_a_failing_diff_is_trouble(apr: Apr, tmp_path: Path) -> None:
    done = apr("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert done.code == 2
    assert done.json["error"]["code"] == "not-found"


def test_closed_pipe_is_quiet(tiny_gguf: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = [sys.executable, "-m", "aprfmt", "tensors", str(tiny_gguf)]
    done = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert done.stderr == b""
    assert done.returncode == 141


def test_full_disk_behind_stdout_is_a_failure(tiny_gguf: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with open("/dev/full", "wb") as full:
        words = [sys.executable, "-m", "aprfmt", "tensors", str(tiny_gguf)]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 7
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_leave_nothing_behind(tmp_path: Path, number: int, code: int) -> None:
    script = (
        "import sys, time\n"
        "from aprfmt.cli import main\n"
        "from aprfmt.io.sink import AtomicFile\n"
        "def work(arguments):\n"
        f"    with AtomicFile({str(tmp_path / 'out.bin')!r}) as sink:\n"
        "        sink.write(b'half')\n"
        "        print('started', flush=True)\n"
        "        time.sleep(30)\n"
        "main._dispatch = work\n"
        "main.main(['import', 'x'])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    time.sleep(0.05)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == code
    assert b"Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_completion_script_and_words() -> None:
    env = {"COMP_WORDS": "apr inspect --q", "COMP_CWORD": "2", "_APR_COMPLETE": "complete_bash"}
    assert spawn(**env).stdout.split() == [b"--quality", b"--quiet"]
    env = {"COMP_WORDS": "apr ins", "COMP_CWORD": "1", "_APR_COMPLETE": "complete_bash"}
    assert spawn(**env).stdout.split() == [b"inspect"]
