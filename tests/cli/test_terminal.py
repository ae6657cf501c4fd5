"""A terminal of its own: widths, bars and words that people type first."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import plain_models
import pytest

import aprfmt
from aprfmt.cli.output import out
from aprfmt.cli.qa import _tell as tell
from aprfmt.running.qa import GateResult

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


@pytest.mark.turns(of=8)
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


@pytest.mark.turns(of=8)
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


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> dict[tuple[str, ...], str]:
    """Command lines that print tables, and what they print into a file."""
    folder = tmp_path_factory.mktemp("tables")
    (folder / "m.gguf").symlink_to(smollm2_gguf)
    model, plan = str(folder / "m.gguf"), str(folder / "x.apr")
    lines = (
        ("tensors", model),
        ("tensors", model, "--filter", "blk.1*", "--stats"),
        ("tensors", model, "--filter", "blk.1.", "--hash"),
        ("inspect", model, "--weights"),
        ("import", model, "-o", plan, "--plan"),
        ("validate", model),
        ("architectures",),
        ("quantize", "--list"),
    )
    program = [sys.executable, "-m", "aprfmt"]
    return {
        words: subprocess.run([*program, *words], capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout
        for words in lines
    }


@pytest.mark.turns(of=8)
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_tables_fit_and_say_what_they_leave_out(tables: dict[tuple[str, ...], str], columns: int) -> None:
    for words, full in tables.items():
        _, lines, _ = run_in_terminal(words, columns)
        shown = [line for line in map(visible, lines) if "tables0" not in line]
        assert max(map(len, shown)) <= columns, words
        assert sum(len(line.split()) == 1 for line in shown) < len(shown) / 2, "lines of a letter or a word"
        left_out = [line.partition("columns: ")[2] for line in shown if f"hidden at {columns} columns: " in line]
        assert bool(left_out) <= (max(map(len, full.splitlines())) > columns)
        assert all(re.search(rf"\b{name}\b", full) for line in left_out for name in line.split(", "))
        assert bool(left_out) or words[0] != "tensors" or columns > 60, "what is dropped is told"


def test_long_names_keep_what_tells_them_apart(smollm2_gguf: Path, tmp_path: Path) -> None:
    other = tmp_path / "o.gguf"
    aprfmt.quantize_model(smollm2_gguf, other, "q4_0", allow_requantize=True)
    _, lines, _ = run_in_terminal(["diff", str(smollm2_gguf), str(other), "--values", "--top", "4"], 60)
    names = [line.split()[0] for line in map(visible, lines) if "_proj" in line]
    assert len(set(names)) == 4
    assert all(re.match(r"(…|model.layers.)\d+\.", name) for name in names), names


def test_names_of_a_plan_are_whole_and_layers_cut_in_a_narrow_terminal(smollm2_gguf: Path, tmp_path: Path) -> None:
    other = [word for i in range(0, 10, 2) for word in ("--tensor-type", rf"blk\.{i}\.attn_q=f16")]
    words = ["quantize", str(smollm2_gguf), "q8_0", "-o", str(tmp_path / "x.gguf"), "--allow-requantize", *other]
    for columns, said in ((60, "0, 2, …, 8"), (120, "0, 2, 4, 6, 8")):
        _, lines, _ = run_in_terminal([*words, "--plan"], columns)
        rows = [visible(line) for line in lines if "blk.*.attn_q.weight" in line]
        assert [said in row for row in rows] == [True, False]


def test_the_lines_of_a_gate_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gate = GateResult("rope-order", "pass", True, "", "perplexity 25.8, rows of Q and K permuted 151.9", -1.5, 0.25, 1)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    out.configure(["qa"])
    tell(gate)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("pass  rope-order      perplexity 25.8")
    assert len(lines) == 2
    assert not lines[1][:22].strip()
    assert lines[1].endswith("  [-1.5, limit 0.25]")
    assert max(map(len, lines)) <= 60
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    tell(gate)
    assert capsys.readouterr().out == f"pass  rope-order      {gate.message}  [-1.5, limit 0.25]\n"


def test_a_plan_ends_with_its_summary(model: Path, tmp_path: Path) -> None:
    _, lines, _ = run_in_terminal(["import", str(model), "-o", str(tmp_path / "x.apr"), "--plan"], 80)
    words = [visible(line).split()[0] for line in lines if visible(line).strip()]
    assert words.index("plan") > words.index("tensor")
    assert words[-1] == "memory"


def test_a_split_says_which_files_it_wrote(model: Path, tmp_path: Path) -> None:
    words = ["shard", str(model), "-o", str(tmp_path / "parts"), "--shard-size", "200kB"]
    _, lines, _ = run_in_terminal(words, 200)
    told = next(line for line in map(visible, lines) if line.strip().startswith("files"))
    for path in (tmp_path / "parts").glob("*.apr"):
        assert path.name in told


def test_an_output_without_suffix_says_what_it_becomes(model: Path, tmp_path: Path) -> None:
    _, lines, _ = run_in_terminal(["export", str(model), "-o", str(tmp_path / "name"), "--plan"], 200)
    assert "name has no suffix: writing a Hugging Face folder" in " ".join(map(visible, lines))
    code, lines, _ = run_in_terminal(["quantize", str(model), "q8_0", "-o", str(tmp_path / "name")], 200)
    assert code == 2
    assert "no suffix" in " ".join(lines)


@pytest.mark.parametrize("piped", ["stdout", "stderr"])
def test_a_pipe_gets_neither_bars_nor_colours(smollm2_gguf: Path, tmp_path: Path, piped: str) -> None:
    words = ["import", str(smollm2_gguf), "-o", str(tmp_path / "m.apr"), "--threads", "1", "--hash", "--no-fsync"]
    _, lines, told = run_in_terminal(words, 80, piped=piped)
    assert "\x1b" not in told
    assert "\r" not in told
    assert any("%" in line for line in lines) == (piped == "stdout"), "the bar is on stderr"


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_a_screen_of_tmux(model: Path, tmp_path: Path) -> None:
    server = ["tmux", "-S", str(tmp_path / "s"), "-f", "/dev/null"]
    words = f"{sys.executable} -m aprfmt inspect {model}; {sys.executable} -m aprfmt tensors {model}; echo e''nd; cat"
    try:
        subprocess.run([*server, "new-session", "-d", "-x", "60", "-y", "200", words], env=ENVIRONMENT, check=True)
        until = time.monotonic() + 30
        screen = ""
        while "end" not in screen and time.monotonic() < until:
            time.sleep(0.1)
            screen = subprocess.run([*server, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout
    finally:
        subprocess.run([*server, "kill-server"], check=False, stderr=subprocess.DEVNULL)
    lines = screen.split("end")[0].splitlines()
    assert any(line.startswith("  format ") for line in lines)
    assert any(line.startswith("name ") and line.rstrip().endswith(("size", "offset")) for line in lines)
    assert "\x1b" not in screen


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
