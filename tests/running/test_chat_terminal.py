"""A conversation on a terminal: a child process on a pseudo-terminal, and what a user would type."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import aprfmt

pty = pytest.importorskip("pty")
pytestmark = [pytest.mark.llama, pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")]

SECONDS = 60.0
READY = ">>> "


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, arguments: list[str]) -> None:
        self.text = ""
        self._code: int | None = None
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.environ.update(TERM="dumb", NO_COLOR="1", PYTHONUNBUFFERED="1")
            os.execv(sys.executable, [sys.executable, "-m", "aprfmt", *arguments])

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        """Types Ctrl-C; a moment after a prompt, since readline first has to wait for it."""
        time.sleep(0.3)
        self.type("\x03")

    def expect(self, pattern: str) -> str:
        """What it writes until `pattern` is there, which is taken away with it."""
        end = time.monotonic() + SECONDS
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < end, f"{pattern!r} did not come: {self.text!r}"
            assert self._read(), f"it ended before {pattern!r}: {self.text!r}"
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def _read(self) -> bool:
        if not select.select([self._fd], [], [], 0.5)[0]:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # how Linux says that the other side is closed
            data = b""
        self.text += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)

    def wait(self) -> int:
        """Its exit code; what it wrote last is in `text`."""
        while self._read():
            pass
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def close(self) -> None:
        if self._code is None:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        os.close(self._fd)


Start = Callable[..., Terminal]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `apr` with arguments on a terminal."""
    started: list[Terminal] = []

    def make(*arguments: object) -> Terminal:
        started.append(Terminal([str(argument) for argument in arguments]))
        return started[-1]

    yield make
    for terminal in started:
        terminal.close()


def test_a_conversation(start: Start, smollm2_short: Path) -> None:
    talk = start("run", smollm2_short, "-n", 24, "--stop", "zzzz")
    talk.expect(READY)
    talk.type("My name is Bob. What is 2+2?\n")
    first = talk.expect(READY)
    assert re.search(r"\d+ \+ \d+ tokens", first)
    before = int(re.search(r"(\d+) \+ \d+ tokens", first)[1])  # type: ignore[index]
    talk.type("And 3+3?\n")
    second = int(re.search(r"(\d+) \+ \d+ tokens", talk.expect(READY))[1])  # type: ignore[index]
    assert second > before + 10  # what was said is in the prompt
    talk.type("/reset\n")
    talk.expect("conversation cleared")
    talk.expect(READY)
    talk.type("My name is Bob. What is 2+2?\n")
    assert int(re.search(r"(\d+) \+ \d+ tokens", talk.expect(READY))[1]) == before  # type: ignore[index]
    talk.type("/system Answer in one word.\n")
    talk.expect("system message set")
    talk.type("/nothing\n")
    talk.expect("unknown command /nothing")
    talk.expect("/reset")
    talk.type("a line \\\n")
    talk.expect(r"\.\.\. ")
    talk.interrupt()
    talk.expect("/bye to exit")
    talk.type("/exit\n")
    assert talk.wait() == 0


def test_interrupts_and_the_end(start: Start, smollm2_gguf: Path) -> None:
    talk = start("run", smollm2_gguf)
    talk.expect(READY)
    talk.interrupt()
    talk.expect("Ctrl-D, /exit or /bye to exit")
    talk.type("Count from 1 to 1000, each number on a line.\n")
    talk.expect(r"each number on a line\.\n.")  # the answer has begun
    talk.interrupt()
    assert "interrupted" in talk.expect(READY)
    talk.type("What is 2+2?\n")
    assert "interrupted" not in talk.expect(r"tokens/s[^\n]*\n")
    talk.expect(READY)
    talk.type("\x04")
    assert talk.wait() == 0
    assert "Traceback" not in talk.text


def test_the_oldest_messages_are_forgotten(start: Start, smollm2_short: Path) -> None:
    talk = start("run", smollm2_short, "--ctx", 256, "-n", 40)
    talk.expect(READY)
    for _ in range(6):
        talk.type("Name some animals that live in a forest and some that live in the sea.\n")
        if "dropped the oldest 2 messages" in talk.expect(READY):
            break
    else:
        pytest.fail("nothing was forgotten")
    talk.type("word " * 300 + "\n")  # for which there is no room
    assert "the context has room for" in talk.expect(READY)
    talk.type("Hello\n")
    assert re.search(r"\d+ \+ \d+ tokens", talk.expect(READY))
    talk.type("/exit\n")
    assert talk.wait() == 0


def test_a_model_without_template(start: Start, tmp_path: Path) -> None:
    from demo_model import build

    build(tmp_path / "demo.gguf")
    aprfmt.stamp(tmp_path / "demo.gguf", tmp_path / "m.gguf", set={"tokenizer.chat_template": None})
    talk = start("run", tmp_path / "m.gguf")
    assert talk.wait() == 2
    assert "no chat template" in talk.text
