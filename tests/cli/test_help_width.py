"""--help and the first sign of progress on terminals of any width."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest

from aprfmt.cli import output
from aprfmt.cli.output import out, progress_bar, tokens


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 140, 300])
@pytest.mark.parametrize("command", ["run", "convert", "merge", "meta", ""])
def test_help_follows_the_width(apr: Any, monkeypatch: pytest.MonkeyPatch, columns: int, command: str) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = apr(*command.split(), "--help").stdout.splitlines()
    room = min(columns, 140)
    wide = [line for line in lines if len(line) > room]
    # What cannot be broken: examples, and names of options with their placeholders.
    assert not [line for line in wide if not line.strip().startswith(("apr ", "git ", "-"))]
    longest = max(len(line) for line in lines if not line.strip().startswith("apr "))
    assert longest > room * 0.7
    assert longest <= 140


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_work_without_a_bar_is_named_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(output, "_FIRST_S", 0.02)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", screen)
    out.configure(["eval"])
    with progress_bar("evaluating", tokens):
        for _ in range(500):
            if screen.getvalue():
                break
            time.sleep(0.01)
        assert screen.getvalue() == "evaluating …"
        out.progress_line("loading")
        assert screen.getvalue() == "evaluating …\r\x1b[2Kloading\n"
    assert screen.getvalue() == "evaluating …\r\x1b[2Kloading\n", "nothing is left to remove"
    before = screen.getvalue()
    monkeypatch.setattr(output, "_FIRST_S", 60.0)
    with progress_bar("quick"):
        pass
    assert screen.getvalue() == before
