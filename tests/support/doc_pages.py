"""The code blocks of a page of documentation, run in order as a reader would type them.

A fence says what becomes of its block:

* `console`: the lines after `$ ` are commands, the others what they print: in this order, a line `…` for any number of
  lines, `…` within a line for any text, times and rates for any other. A command of which a line `error: …` is printed
  must fail;
* `sh`: a script that must succeed;
* `python`: a program that must succeed;
* any language with `title="NAME"`: a file of that name;
* all others (`text`, `mermaid`, `yaml` without a title) are read, not run.

`cd` holds for what follows on the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_PACE = re.compile(r"\d[\d.,]* ?(ms|s|[KMG]i?B/s|tok/s|tokens/s)\b")
_SECONDS = 300


def on_two_processors() -> None:
    """Keeps this process to two: there llama.cpp takes one thread; several wait by spinning for what runs beside."""
    if hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0)
        os.sched_setaffinity(0, {processors[(2 * worker + n) % len(processors)] for n in range(2)})


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file that it is (or ""), its text, and its line on the page."""

    language: str
    title: str
    text: str
    line: int


@dataclass(frozen=True)
class Command:
    """A line of a console and what the page says that it prints."""

    words: str
    prints: tuple[str, ...]
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        margin, language, options, body = match.groups()
        title = _TITLE.search(options)
        plain = re.sub(f"^{margin}", "", body, flags=re.MULTILINE)
        found.append(Block(language, title[1] if title else "", plain, text.count("\n", 0, match.start()) + 2))
    return found


def commands(block: Block) -> Iterator[Command]:
    """The commands of a console block; a line that ends in a backslash goes on in the next."""
    lines = block.text.splitlines()
    at = 0
    while at < len(lines):
        assert lines[at].startswith("$ "), f"line {block.line + at}: output before any command: {lines[at]}"
        start, words = at, lines[at][2:]
        while words.endswith("\\"):
            at += 1
            words += "\n" + lines[at].removeprefix("> ")
        at += 1
        begin = at
        while at < len(lines) and not lines[at].startswith("$ "):
            at += 1
        yield Command(words, tuple(lines[begin:at]), block.line + start)


def run_page(page: Path, folder: Path, env: Mapping[str, str], *, skip: int = 0) -> int:
    """Runs the blocks of a page after the first `skip` in `folder`; returns how many commands ran.

    Raises AssertionError with page and line where a command fails or prints something else.
    """
    session = _Session(page, folder, dict(env))
    for block in blocks(page)[skip:]:
        if block.title:
            path = session.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "console":
            for command in commands(block):
                session.prints(command)
        elif block.language == "sh":
            session.shell(block.text, block.line)
        elif block.language == "python":
            session.run([sys.executable, "-c", block.text], block.text, block.line)
    return session.count


class _Session:
    def __init__(self, page: Path, folder: Path, env: dict[str, str]) -> None:
        self.page, self.folder, self.count = page, folder, 0
        bin_folder = str(Path(sys.executable).parent)
        self.env = {**os.environ, "COLUMNS": "80", **env}
        self.env["PATH"] = bin_folder + os.pathsep + self.env["PATH"]
        for name in ("FORCE_COLOR", "APR_DEBUG"):
            self.env.pop(name, None)

    def run(self, program: list[str], words: str, line: int, *, fails: bool = False) -> str:
        done = subprocess.run(
            program,
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
            preexec_fn=on_two_processors,
            check=False,
        )
        self.count += 1
        assert (done.returncode != 0) == fails, f"{self.page}:{line}: exit {done.returncode}: {words}\n{done.stdout}"
        return done.stdout

    def shell(self, words: str, line: int, *, fails: bool = False) -> str:
        """What a script prints; where it ends is where the next one begins."""
        begin = 'trap \'printf "\\n%s" "$PWD"\' EXIT\n'
        output, _, where = self.run(["bash", "-e", "-c", begin + words], words, line, fails=fails).rpartition("\n")
        self.folder = Path(where)
        return output

    def prints(self, command: Command) -> None:
        fails = any(line.startswith("error: ") for line in command.prints)
        output = self.shell(command.words, command.line, fails=fails)
        wanted = "\n".join(map(_pattern, command.prints))
        assert re.fullmatch(wanted, _even(output)) or not command.prints, (
            f"{self.page}:{command.line}: {command.words}\nprints\n{output}\nthe page says\n"
            + "\n".join(command.prints)
        )


def _even(text: str) -> str:
    return "\n".join(_PACE.sub("~", line).rstrip() for line in text.splitlines())


def _pattern(line: str) -> str:
    if line.strip() == "…":
        return r"(?:.*\n)*?.*"
    return ".*".join(re.escape(part) for part in _even(line).split("…"))
