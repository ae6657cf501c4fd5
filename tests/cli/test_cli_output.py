"""The output object: modes, colour, escapes, tables, sizes, the bar."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.cli import output
from aprfmt.cli.output import Console, out, plain, printable, progress_bar, shorten, table
from aprfmt.errors import CorruptError
from aprfmt.text import format_figure


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[io.StringIO, io.StringIO]]:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def use(kind: type[io.StringIO]) -> tuple[io.StringIO, io.StringIO]:
        pair = kind(), kind()
        monkeypatch.setattr(sys, "stdout", pair[0])
        monkeypatch.setattr(sys, "stderr", pair[1])
        return pair

    return use


ERROR = CorruptError("bad", path="f", tensor="t", offset=9, hint="try x")


@pytest.mark.parametrize("mode", ["human", "json", "quiet"])
def test_modes(streams: Callable[..., Any], mode: str) -> None:
    stdout, stderr = streams(io.StringIO)
    out = Console()
    out.configure(["inspect", "f", *({"human": [], "json": ["--json"], "quiet": ["-q"]}[mode])])
    out.warning("careful")
    out.hint("do this")
    out.result({"n": 1}, ["line"])
    expected = {"human": "line\n", "json": '{"schema": "apr.inspect/1", "ok": true, "n": 1}\n', "quiet": ""}
    assert stdout.getvalue() == expected[mode]
    assert stderr.getvalue() == ("warning: careful\nhint: do this\n" if mode == "human" else "")


@pytest.mark.parametrize("mode", ["human", "json", "quiet"])
def test_failure_in_every_mode(streams: Callable[..., Any], mode: str) -> None:
    stdout, stderr = streams(io.StringIO)
    out = Console()
    out.configure(["--json"] if mode == "json" else ["-q"] if mode == "quiet" else [])
    out.failure(ERROR)
    if mode == "json":
        assert json.loads(stdout.getvalue())["error"] == {
            "code": "corrupt", "message": "bad", "path": "f", "tensor": "t", "offset": 9, "hint": "try x",
        }  # fmt: skip
        return
    assert stdout.getvalue() == ""
    text = "error: f: bad (tensor 't', byte 9)\n"
    assert stderr.getvalue() == (text + "hint: try x\n" if mode == "human" else text)


def test_one_object_even_when_a_failure_follows_the_answer(streams: Callable[..., Any]) -> None:
    stdout, _ = streams(io.StringIO)
    out = Console()
    out.configure(["inspect", "--json"])
    out.result({})
    out.failure(ERROR)
    assert json.loads(stdout.getvalue())["ok"] is True


def test_words_after_a_double_dash_are_no_options(streams: Callable[..., Any]) -> None:
    streams(io.StringIO)
    out = Console()
    out.configure(["inspect", "--", "--json"])
    assert out.mode == "human"


def test_colour_rules(streams: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    out = Console()
    stdout, _ = streams(io.StringIO)
    assert out.style("x", "red") == "x"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert out.style("x", "red") == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert out.style("x", "red") == "x"
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.delenv("NO_COLOR")
    streams(Terminal)
    assert out.style("x", "red") != "x"
    assert not out.colour(stdout)  # decided per stream


@pytest.mark.parametrize("mode", ["human", "quiet"])
def test_streamed_text_cannot_drive_the_terminal(streams: Callable[..., Any], mode: str) -> None:
    text = "a\tb\nü\u200c\u3000 \x1b[31m\x07\r\u202e\x9b\udc80"
    expected = "a\tb\nü\u200c\u3000 \\x1b[31m\\x07\\r\\u202e\\x9b\\udc80"
    for kind in (Terminal, io.StringIO):
        stdout, _ = streams(kind)
        out = Console()
        out.configure(["run", *(["-q"] if mode == "quiet" else [])])
        out.stream(text)
        assert stdout.getvalue() == expected


def test_lines_keep_our_styles_and_no_other_escape(streams: Callable[..., Any]) -> None:
    stdout, _ = streams(Terminal)
    out = Console()
    out.configure(["inspect"])
    styled = out.style("name", "red")
    assert styled != "name"
    hostile = "\x1b]0;title\x07 \x1b[8m \x1b[2J \u202e"
    escaped = "\\x1b]0;title\\x07 \\x1b[8m \\x1b[2J \\u202e"
    out.result({}, [f"{styled} {hostile}", "\ttwo"])
    out.line(hostile)
    assert stdout.getvalue() == f"{styled} {escaped}\n\ttwo\n{escaped}\n"


def test_hostile_names_cannot_drive_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\u202e\udc80") == "a\\x1b[2Jb\\r\\u202e\\udc80"
    assert printable("Ġhé漢") == "Ġhé漢"


@given(
    st.recursive(
        st.none() | st.floats() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_json_is_always_strict(value: Any) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    json.loads(json.dumps(plain(value), allow_nan=False), parse_constant=refuse)


@given(st.text(st.characters(codec=None)))
def test_printable_is_printable(text: str) -> None:
    assert printable(text).isprintable()


@given(st.text(), st.integers(1, 60))
def test_shorten_keeps_both_ends(text: str, columns: int) -> None:
    short = shorten(text, columns)
    assert len(short) <= max(columns, 1)
    if len(text) <= columns:
        assert short == text


def test_table_aligns() -> None:
    lines = table(["name", "size"], [["a", "1"], ["bbbb", "222"]], right="size", indent=0)
    assert lines == ["name  size", "a        1", "bbbb   222"]


def test_table_fits_a_terminal(streams: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    streams(Terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(output, "width", lambda stream=None: 40)
    lines = table(["name", "size"], [["n" * 90, "1 KiB"]], right="size")
    assert all(len(line) <= 40 for line in lines)
    assert lines[1].endswith("1 KiB")


def test_no_bar_without_a_terminal(streams: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.out, "mode", "human")
    streams(io.StringIO)
    with progress_bar("x") as progress:
        assert progress is None


@pytest.mark.parametrize("mode", ["json", "quiet"])
def test_no_bar_when_quiet(streams: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(output.out, "mode", mode)
    streams(Terminal)
    with progress_bar("x") as progress:
        assert progress is None


def test_bar(streams: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.out, "mode", "human")
    stdout, stderr = streams(Terminal)
    clock = iter([100.0, 101.0, 101.01, 102.0])
    monkeypatch.setattr("aprfmt.cli.output.time.monotonic", lambda: next(clock))
    with progress_bar("importing") as progress:
        assert progress is not None
        advance = progress(4 << 20)
        advance(1 << 20, "a")
        advance(1 << 20, "b")  # too soon after the last one: not drawn
        advance(1 << 20, "c")
    text = stderr.getvalue()
    assert stdout.getvalue() == ""
    assert text.count("\r") == 3
    assert " 25% 1.00 MiB/4.00 MiB 1.00 MiB/s 3.00 s" in text
    assert " 75% 3.00 MiB/4.00 MiB 1.50 MiB/s 667 ms" in text
    assert text.endswith("\r\x1b[2K")


def test_a_figure_is_whole_or_has_four_digits() -> None:
    assert [format_figure(x) for x in (49152.0, 0, 0.023451, -1.7734, float("inf"))] == [
        "49,152",
        "0",
        "0.02345",
        "-1.773",
        "inf",
    ]


def test_a_repository_without_an_owner_is_told_its_form(apr: Any, tmp_path: Path) -> None:
    done = apr("push", str(tmp_path / "m.gguf"), "foo", "--plan")
    assert done.code == 2
    assert "hint: write the repository as org/name: OWNER/foo" in done.stderr


def test_work_in_progress_is_named_until_something_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    out.configure(["qa", "m"])
    out.wait_line("checking", 0.5)
    out.wait_line("checking", 3.4)
    out.line("pass")
    out.line("pass")
    done = capsys.readouterr()
    assert done.out == "pass\npass\n"
    assert done.err == "checking …\rchecking … 3 s\x1b[K\r\x1b[2K"


def test_prose_is_wrapped_on_a_terminal_and_commands_are_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out.configure(["convert"])
    command = "apr convert a-model-with-a-long-name -o the-output-of-it --dtype q4_k_m"
    out.hint(f"{command}\nwith words that are too many for one line of this terminal")
    assert capsys.readouterr().err.count("\n") == 2, "a pipe gets lines as they are"
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    out.hint(f"{command}\nwith words that are too many for one line of this terminal")
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == f"hint: {command}"
    assert len(rest) == 2
    assert all(len(line) <= 40 and line.startswith("      ") for line in rest)
