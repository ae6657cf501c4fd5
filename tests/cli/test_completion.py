"""Completion as somebody at a terminal has it: shells that are installed are started, and Tab is pressed once."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONTROLS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()=>][A-Z0-9]?|\x1b\][^\x07]*\x07|.\x08")
SHELLS = {"bash": ("bash", "-i"), "zsh": ("zsh", "-i"), "fish": ("fish", "-i")}


def apr(home: Path, *words: str) -> str:
    env = os.environ | {"HOME": str(home)}
    command = [sys.executable, "-m", "aprfmt", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


class Terminal:
    """A shell at a terminal."""

    def __init__(self, shell: str, home: Path) -> None:
        self.seen = b""
        self.pid, self._fd = pty.fork()
        if not self.pid:
            folder, path = home / "bin", os.environ["PATH"]
            os.chdir(home)
            os.environ |= {"HOME": str(home), "TERM": "xterm", "PATH": f"{folder}:{path}", "XDG_CONFIG_HOME": ""}
            os.execvp(SHELLS[shell][0], SHELLS[shell])

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._fd)

    def sees(self, text: bytes, seconds: float) -> bool:
        """Whether `text` comes within that time."""
        end = time.monotonic() + seconds
        while text not in CONTROLS.sub(b"", self.seen) and time.monotonic() < end:
            if select.select([self._fd], [], [], 0.1)[0]:
                data = os.read(self._fd, 1 << 16)
                self.seen += data
                if b"\x1b[c" in data:  # fish asks what the terminal is
                    os.write(self._fd, b"\x1b[?62;c")
        return text in CONTROLS.sub(b"", self.seen)

    def types(self, keys: bytes) -> None:
        self.seen = b""
        os.write(self._fd, keys)


@pytest.mark.parametrize("shell", [name for name in SHELLS if shutil.which(name)])
def test_the_first_tab_completes(shell: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "apr"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m aprfmt "$@"\n')
    program.chmod(0o755)
    (tmp_path / "model.gguf").touch()
    apr(tmp_path, "--install-completion", shell)
    for keys, wanted in ((b"apr quantize m.gguf q8\t", b"q8_0"), (b"apr inspect mo\t", b"model.gguf")):
        terminal = Terminal(shell, tmp_path)
        try:
            terminal.types(b"echo be''gun\n")
            assert terminal.sees(b"begun", 30)
            terminal.types(keys)
            assert terminal.sees(wanted, 30), terminal.seen
        finally:
            terminal.close()


def test_the_script_of_zsh_answers_where_it_only_defined(tmp_path: Path) -> None:
    script = apr(tmp_path, "--show-completion", "zsh")
    assert '[[ $zsh_eval_context[-1] == loadautofunc ]]; then\n  _apr_completion "$@"\n' in script
    assert script.count("compdef _apr_completion apr") == 1


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_that_of_the_shell_that_is_named(shell: str, tmp_path: Path) -> None:
    own = {"bash": "complete -o", "zsh": "#compdef apr", "fish": "complete --command apr"}
    script = apr(tmp_path, "--show-completion", shell)
    assert [name for name, words in own.items() if words in script] == [shell]


@pytest.mark.parametrize("option", ["--show-completion", "--install-completion"])
def test_a_shell_without_a_script_is_refused_with_those_that_have_one(option: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "aprfmt", option, "tcsh"]
    done = subprocess.run(
        command, env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert done.stderr.startswith(
        f"error: no completion for the shell 'tcsh'\nhint: apr {option} SHELL, one of: bash, zsh"
    )
