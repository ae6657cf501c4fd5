"""The panel of a run on a terminal: drawn in place, never often, in any width; lines elsewhere; no run ends by it."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aprtrain.guards import catch_signals
from aprtrain.report.metrics import Recorder, mean_of

Distil = Callable[..., dict[str, Any]]


class Terminal(io.StringIO):
    """A terminal that does what the panel asks of it: `screen` holds its lines."""

    def __init__(self, columns: int = 100, rows: int = 24, encoding: str = "utf-8") -> None:
        super().__init__()
        self.screen = [""]
        self.drawn = 0
        self.raw = ""
        self._at = (0, 0)
        self._size = os.terminal_size((columns, rows))
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return -1

    def write(self, text: str) -> int:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        self.raw += text
        self.drawn += "step " in text
        for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[^\x1b]", text):
            self._put(part)
        return len(text)

    def _put(self, part: str) -> None:
        row, column = self._at
        if part == "\n":
            self._at = row + 1, 0
            self.screen += [""] * (row + 2 - len(self.screen))
        elif part == "\r":
            self._at = row, 0
        elif part[0] == "\x1b" and part.endswith("F"):
            assert int(part[2:-1]) <= row, "the cursor leaves the screen"
            self._at = row - int(part[2:-1]), 0
        elif part == "\x1b[K":
            self.screen[row] = self.screen[row][:column]
        elif part == "\x1b[J":
            self.screen[row:] = [self.screen[row][:column]]
        elif part[0] == "\x1b" and part.endswith("m"):
            pass
        else:
            assert part.isprintable(), f"{part!r} is nothing that this terminal knows"
            assert column < self._size.columns - 1, "a line that wraps cannot be drawn over"
            text = self.screen[row].ljust(column)
            self.screen[row] = text[:column] + part + text[column + 1 :]
            self._at = row, column + 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stands still until it is told to go on."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "get_terminal_size", _size)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def go(seconds: float) -> None:
        now[0] += seconds

    return go


_SIZE = [os.terminal_size((100, 24))]


def _size(number: int) -> os.terminal_size:
    return _SIZE[0]


def values(step: int, **more: Any) -> Any:
    given = {
        "step": step,
        "loss": 10.0 / step,
        "ce": 3.0,
        "kl": 0.1 / step,
        "kl1": 1.0 / step,
        "agreement": 0.5,
        "grad_norm": 1.0,
    }
    rates = {"lr": 1e-3, "tokens_per_s": 85_200.0, "eta_s": 9.0, "seconds": 2.0, "mfu": 0.52, "utilisation": 98}
    return {**given, **rates, "memory_bytes": 3 << 30, **more}


def shown(columns: int, rows: int = 24, **how: Any) -> tuple[Terminal, Recorder]:
    _SIZE[0] = os.terminal_size((columns, rows))
    terminal = Terminal(columns, rows, **how)
    return terminal, Recorder(None, terminal)


def test_steps_without_a_label_are_no_part_of_a_mean() -> None:
    steps = [
        values(n, labels=labels, kl=None, kl1=None, teacher_entropy=None) for n, labels in ((1, 6), (2, 0), (5, 2))
    ]
    mean = mean_of(steps)
    assert mean["loss"] == pytest.approx((6 * 10.0 + 2 * 2.0) / 8)
    assert (mean["kl"], mean["grad_norm"], mean["step"]) == (None, 1.0, 5)
    assert mean_of(steps[1:2])["loss"] == 5.0
    steps[0]["tokens_per_s"], steps[1]["tokens_per_s"] = 100.0, 300.0
    assert mean_of(steps[:2])["tokens_per_s"] == pytest.approx(150.0)  # each took as many tokens


def test_the_panel_stays_in_place_and_lines_stand_above_it(clock: Callable[[float], None]) -> None:
    terminal, recorder = shown(100)
    recorder.log("first words")
    for n in range(1, 21):
        clock(1)
        recorder.step(values(n), total=40)
    clock(1)
    recorder.record("evaluation", {"step": 20, "kl": 0.25, "ce": 2.5})
    recorder.log("words of step 20")
    clock(1)
    recorder.record("checkpoint", {"step": 20, "bytes": 5})
    clock(75)
    recorder.step(values(21), total=40)
    first, second, *panel = terminal.screen
    assert [first, second] == ["first words", "words of step 20"]
    assert len(panel) == 5, "four lines, and the one that the cursor stands on"
    text = "\n".join(panel)
    for words in (
        *("step 21/40", "52.5%", "eta 0:00:38", "█", "loss 0.4762 ", "kl 0.0476 ", "ce 3.0000", "agree 50.0%"),
        *("85.2k tok/s", "mfu 52.0%", "gpu 98%", "3.0 GiB", "lr 1.00e-03", "grad 1"),
        *("held-out at 20: kl 0.2500 ce 2.5000", "checkpoint 20, 0:01:15 ago"),
    ):
        assert words in text
    assert re.search(r"loss \S+ █▄▂▁", text), "the course of the loss"


def test_no_more_than_ten_drawings_a_second(clock: Callable[[float], None]) -> None:
    terminal, recorder = shown(100)
    for n in range(1, 2001):
        clock(0.005)
        recorder.step(values(n), total=2000)
    recorder.record("end", {"step": 2000, "finished": True})
    assert 50 <= terminal.drawn <= 101
    assert "step 2,000/2,000" in terminal.screen[0], "the last state is the one that stays"


@pytest.mark.parametrize(("columns", "rows"), itertools.product((12, 40, 60, 79, 200), (2, 24)))
def test_any_size_of_terminal_will_do(clock: Callable[[float], None], columns: int, rows: int) -> None:
    terminal, recorder = shown(columns, rows)
    for n in range(1, 5):
        clock(1)
        recorder.step(values(n), total=4)
        recorder.record("failed_save", {"step": n, "error": "x"})
    assert terminal.screen[0].startswith("step 4/4")
    assert len(terminal.screen) == min(5, rows)
    assert ("█" in terminal.screen[0]) == (columns >= 60)


def test_colours_only_where_they_are_wanted(clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, recorder = shown(100)
    recorder.step(values(1), total=4)
    assert "\x1b[36m" in terminal.raw
    monkeypatch.setenv("NO_COLOR", "1")
    terminal, recorder = shown(100)
    recorder.step(values(1), total=4)
    assert not re.search(r"\x1b\[[0-9;]*m", terminal.raw)
    assert "step 1/4" in terminal.raw


def test_a_terminal_without_unicode_gets_plain_characters(clock: Callable[[float], None]) -> None:
    terminal, recorder = shown(100, encoding="ISO-8859-1")
    recorder.step(values(2), total=4)
    assert "##" in terminal.raw
    assert terminal.raw.isascii()


def test_the_panel_says_what_goes_on_and_that_it_ends(clock: Callable[[float], None]) -> None:
    terminal, recorder = shown(100)
    recorder.doing("evaluating: 0 of 9 sequences")
    assert terminal.screen[0] == "evaluating: 0 of 9 sequences", "before there is a step"
    clock(1)
    recorder.doing("evaluating: 5 of 9 sequences")
    assert terminal.screen[0] == "evaluating: 5 of 9 sequences"
    recorder.doing("")
    assert "".join(terminal.screen) == ""
    recorder.step(values(1), total=4)
    recorder.notice("SIGINT: stopping after this step")
    recorder.doing("evaluating: 1 of 9 sequences")
    assert terminal.screen[1] == "SIGINT: stopping after this step", "at once, though the panel was drawn just now"
    clock(1)
    recorder.step(values(2), total=4)
    assert terminal.screen[1] == "SIGINT: stopping after this step   evaluating: 1 of 9 sequences"
    recorder.record("end", {"step": 2})
    assert "stopping after" not in "\n".join(terminal.screen)


def test_elsewhere_what_takes_long_is_a_line_now_and_then(clock: Callable[[float], None]) -> None:
    stream = io.StringIO()
    recorder = Recorder(None, stream)
    for n in range(100):
        clock(1)
        recorder.doing(f"{n} of 100 sequences")
    recorder.doing("")
    recorder.notice("stopping after this step")
    assert stream.getvalue().splitlines() == [
        *(f"{n} of 100 sequences" for n in range(19, 100, 20)),
        "stopping after this step",
    ]


def test_a_dumb_terminal_and_a_file_get_lines(clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    for stream in (Terminal(500), io.StringIO()):
        recorder = Recorder(None, stream)
        for n in range(1, 4):
            recorder.step(values(n), total=3, mean=None if n == 2 else values(n))
        text = stream.raw if isinstance(stream, Terminal) else stream.getvalue()
        assert [line[:9] for line in text.splitlines()] == ["step 1/3 ", "step 3/3 "]
        assert "\x1b" not in text


def test_values_that_are_not_finite_are_shown(clock: Callable[[float], None]) -> None:
    terminal, recorder = shown(100)
    recorder.step(values(1), total=4)
    clock(1)
    recorder.step(values(2, loss=float("nan"), kl=float("inf")), total=4)
    assert "loss nan" in "\n".join(terminal.screen)


def test_a_pretraining_shows_no_kl(clock: Callable[[float], None]) -> None:
    terminal, recorder = shown(100)
    gone = {"kl": None, "kl1": None, "agreement": None, "mfu": None, "utilisation": None, "memory_bytes": None}
    recorder.step(values(1, **gone), total=4)
    recorder.record("end", {"step": 1})
    text = "\n".join(terminal.screen)
    assert not re.search("kl|agree|mfu|gpu|GiB", text)
    assert "loss 10.0000" in text


class Gone(Terminal):
    """A terminal whose window was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("kind", [Gone, Terminal])
def test_a_terminal_that_goes_away_ends_no_run(distil: Distil, tmp_path: Path, kind: type[Terminal]) -> None:
    stream = kind(200)
    if kind is Terminal:
        stream.close()  # not even isatty() may be called
        stream.isatty = lambda: io.StringIO.isatty(stream)  # type: ignore[method-assign]
    assert distil(steps=3, stream=stream)["steps"] == 3
    assert (tmp_path / "run/metrics.jsonl").read_text().count('"event": "step"') == 3


def test_a_hang_up_ends_no_run() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with catch_signals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop
    assert signal.getsignal(signal.SIGHUP) is before


def test_a_signal_is_told_of_while_a_kernel_keeps_the_handler_waiting() -> None:
    told: list[tuple[float, str]] = []
    with catch_signals(lambda words: told.append((time.monotonic(), words))) as stop:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        hashlib.sha256(bytes(1 << 28))  # no handler runs meanwhile
        late = time.monotonic()
        assert stop.number == signal.SIGINT
        timer.join()
    ((when, words),) = told
    assert when < late
    assert words == "SIGINT: stopping after this step; send it again to quit at once"


def test_a_run_on_a_terminal_shows_its_end(distil: Distil, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    _SIZE[0] = os.terminal_size((120, 30))
    monkeypatch.setattr(os, "get_terminal_size", _size)
    monkeypatch.setattr(Terminal, "_put", lambda self, part: None)
    stream = Terminal(120, 30)
    distil(steps=5, save_every=2, stream=stream)
    assert "evaluating: 0 of" in re.split(r"step \d/5", stream.raw)[0], "the first scores take long"
    last = stream.raw[stream.raw.rindex("step 5/5") :]
    assert "held-out at 5: kl" in last
    assert "checkpoint 5, 0:00:0" in last
