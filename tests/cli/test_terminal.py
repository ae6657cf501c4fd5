"""A terminal of its own: widths, bars and words that people type first."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

import plain_models
import pytest

import aprfmt

ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}


def run_in_terminal(
    words: Sequence[str], columns: int, *, piped: str = "", **environment: str
) -> tuple[int, list[str], str]:
    """(exit code, what the terminal got, by line, frames of a bar too; what the stream `piped` got)."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    streams = {name: subprocess.PIPE if name == piped else side for name in ("stdout", "stderr")}
    process = subprocess.Popen(
        [sys.executable, "-m", "aprfmt", *words],
        stdin=side,
        env=ENVIRONMENT | {"TERM": "xterm"} | environment,
        text=True,
        **streams,  # type: ignore[call-overload]
    )
    os.close(side)
    told = bytearray()
    try:
        while block := os.read(main, 1 << 16):
            told += block
    except OSError:  # nobody has the other side open any more
        pass
    os.close(main)
    out, error = process.communicate(timeout=60)
    return process.returncode, told.decode().replace("\r", "\n").split("\n"), (out or "") + (error or "")


def visible(line: str) -> str:
    """A line without its colours."""
    for start in ("\x1b[K", "\x1b[2K", "\x1b[0m", *(f"\x1b[{n}m" for n in range(1, 40))):
        line = line.replace(start, "")
    return line


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of every kind of line."""
    folder = tmp_path_factory.mktemp("terminal")
    aprfmt.convert_model(plain_models.write_folder(folder / "hf"), folder / "m.gguf")
    return folder / "m.gguf"


@pytest.mark.parametrize(
    ("columns", "environment"),
    [
        *((columns, {}) for columns in (60, 80, 200)),
        *((60, each) for each in ({"PYTHONUNBUFFERED": "1"}, {"NO_COLOR": "1"}, {"TERM": "dumb"})),
    ],
    ids=str,
)
def test_lines_fit_the_terminal(model: Path, columns: int, environment: dict[str, str]) -> None:
    for words in (["inspect", str(model)], ["validate", str(model)], ["lint", str(model)]):
        code, lines, _ = run_in_terminal(words, columns, **environment)
        assert code in (0, 1), lines
        # A path has no place where it could be broken.
        long = [line for line in map(visible, lines) if len(line) > columns and str(model) not in line]
        assert not long
        colours = re.findall(r"\x1b\[\d+m", "".join(lines))
        assert bool(colours) == ({*environment} <= {"PYTHONUNBUFFERED"})
        assert environment.get("TERM") != "dumb" or "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("columns", "unbuffered", "piped"),
    [(50, "", ""), (60, "", ""), (120, "", ""), (60, "1", ""), (60, "1", "stdout"), (50, "", "stdout")],
)
def test_the_bar_fits_and_keeps_rate_and_time(
    smollm2_gguf: Path, tmp_path: Path, columns: int, unbuffered: str, piped: str
) -> None:
    words = ["import", str(smollm2_gguf), "-o", str(tmp_path / "m.apr"), "--threads", "1", "--hash", "--no-fsync"]
    code, lines, _ = run_in_terminal(words, columns, piped=piped, PYTHONUNBUFFERED=unbuffered)
    assert code == 0
    bars = [line for line in map(visible, lines) if "/s " in line and "%" in line]
    assert bars
    assert max(map(len, bars)) < columns
    assert all("B/" in bar and ("ms" in bar or " s" in bar) for bar in bars)
    assert any("█" in bar or "░" in bar for bar in bars) == (columns >= 60)


def test_what_is_piped_has_eighty_columns(model: Path) -> None:
    _, lines, piped = run_in_terminal(["inspect", str(model)], 200, piped="stdout")
    assert not "".join(lines).strip()
    assert "\x1b" not in piped
    assert max(len(line) for line in piped.splitlines() if str(model) not in line) <= 80


@pytest.mark.parametrize(
    ("words", "like"),
    [
        (["-V"], ["--version"]),
        (["version"], ["--version"]),
        (["version", "--json"], ["--version", "--json"]),
        (["help"], ["--help"]),
        (["help", "inspect"], ["inspect", "--help"]),
        (["info", "FILE"], ["inspect", "FILE"]),
        (["show", "FILE", "--json"], ["inspect", "FILE", "--json"]),
        (["--json", "show", "FILE"], ["--json", "inspect", "FILE"]),
    ],
    ids=" ".join,
)
def test_words_of_other_programs(model: Path, words: list[str], like: list[str]) -> None:
    def output(given: list[str]) -> tuple[int, str]:
        command = [sys.executable, "-m", "aprfmt", *(str(model) if word == "FILE" else word for word in given)]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=60)
        return done.returncode, done.stdout

    assert output(words) == output(like)
    assert output(words)[0] == 0
