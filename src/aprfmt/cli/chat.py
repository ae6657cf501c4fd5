"""Chat with a model on the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from aprfmt.cli.output import out, printable
from aprfmt.errors import AprError
from aprfmt.llama.client import LlamaDiedError
from aprfmt.text import format_seconds, plural

if TYPE_CHECKING:
    from aprfmt.llama.engine import Sampling
    from aprfmt.running.conversation import Conversation
    from aprfmt.running.generate import Loading, RunResult

ENDINGS = ("/exit", "/quit", "/bye")
"""Messages that end a chat."""

_PIPED_TOKENS = 512
"""Tokens of an answer to a message from a pipe, where nobody can stop an endless one."""

_PROMPT = ">>> "
_HELP = """\
/reset          clear the conversation
/system [TEXT]  set the system message and clear the conversation
/bye            exit (or /exit, Ctrl-D)
Ctrl-C stops an answer. End a line with \\ to continue it."""


def chat(
    file: str,
    loading: Loading,
    *,
    media: list[str],
    sampling: Sampling,
    system: str | None,
    max_tokens: int | None,
    stop: Sequence[str],
) -> None:
    """Reads messages until the end of input, and prints the answers of the model `file`; `media` go with the first."""
    from aprfmt.running.conversation import Conversation
    from aprfmt.running.generate import Prompt, Runner

    Prompt("", media=media).check()
    if max_tokens is None and not sys.stdin.isatty():
        max_tokens = _PIPED_TOKENS
    with suppress(ImportError):
        import readline  # noqa: F401  # input() then edits lines and remembers them
    with Runner(file, loading, out.progress_line) as runner:
        talk = Conversation(runner, system, max_tokens, sampling, stop)
        runner.chat_text([{"role": "user", "content": "Hello"}])  # fail early without a chat template
        out.progress_line("/help lists commands, Ctrl-D exits")
        while (line := _read()) is not None:
            if line.lstrip().startswith("/"):
                if not _command(line.strip(), talk):
                    return
            elif line.strip():
                media = _answer(talk, line, media)


def _answer(talk: Conversation, line: str, media: list[str]) -> list[str]:
    """Prints an answer; returns the media files to attach to the next message."""
    try:
        with _ending_answers(talk):
            found = talk.ask(
                line,
                media=media,
                on_text=out.stream,
                on_drop=lambda n: out.progress_line(
                    f"context full: dropped the oldest {plural(n, 'message')} (/reset, --ctx)"
                ),
            )
    except LlamaDiedError:
        raise
    except AprError as error:  # continue without the message
        out.failure(error)
        return media
    out.stream("\n")
    out.progress_line(statistics(found))
    return []


@contextmanager
def _ending_answers(talk: Conversation) -> Iterator[None]:
    """Stops the answer on Ctrl-C while the block runs."""
    before = signal.signal(signal.SIGINT, lambda number, frame: talk.runner.llama.interrupt())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _read() -> str | None:
    """The next message; None at the end of input."""
    lines: list[str] = []
    prompt = _PROMPT if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt if not lines else prompt and "... ")
        except KeyboardInterrupt:
            out.stream("\n")
            lines.clear()
            out.progress_line("Ctrl-D, /exit or /bye to exit")
            continue
        except EOFError:
            out.stream("\n")
            return None
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


def _command(line: str, talk: Conversation) -> bool:
    """Runs a /command; returns False if it ends the chat."""
    word, _, rest = line.partition(" ")
    if word in ENDINGS:
        return False
    if word == "/reset":
        talk.reset()
        out.progress_line("conversation cleared")
    elif word == "/system":
        talk.reset()
        talk.system = rest.strip() or None
        out.progress_line("system message set" if talk.system else "system message removed")
    else:
        if word != "/help":
            out.progress_line(f"unknown command {printable(word)}")
        for text in _HELP.splitlines():
            out.progress_line(text)
    return True


def statistics(found: RunResult) -> str:
    """The line printed after an answer."""
    parts = [f"{found.prompt_tokens:,} + {len(found.tokens):,} tokens"]
    if found.tokens_per_second is not None:
        parts.append(f"{found.tokens_per_second:.1f} tokens/s")
    parts.append(f"prompt {format_seconds(found.prompt_seconds)}")
    parts.append(_ENDED[found.ended].format(len(found.tokens)))
    return ", ".join(part for part in parts if part)


_ENDED = {
    "end": "",
    "stop": "ended by --stop",
    "length": "cut at {:,} tokens (--max-tokens)",
    "context": "cut: the context is full (--ctx)",
    "interrupt": "interrupted",
}
