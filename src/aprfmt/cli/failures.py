"""Every way a run can end badly: exit code, one clear sentence, what to try next.

AprError                    its own exit code (errors.py); `apr diff`: 2
click usage error           2
OSError                     7, or 3 for a missing file
MemoryError                 7
closed pipe                 141, silent
Ctrl-C, SIGTERM, SIGHUP     130, 143, 129
anything else               70: a defect of this program; APR_DEBUG=1 shows where
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from aprfmt.cli.output import out
from aprfmt.errors import AprError, storage_error

EXIT_INTERNAL = 70
EXIT_BROKEN_PIPE = 141


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived; raised so that unfinished outputs are removed on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


# Exception -> exit code (a signal's number is added), error code, sentence.
_PLAIN = (
    (KeyboardInterrupt, 130, "interrupted", "interrupted; no partial output is left"),
    (Terminated, 128, "terminated", "terminated; no partial output is left"),
    (MemoryError, 7, "memory", "not enough memory"),
)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)


@contextmanager
def catch_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into Terminated while the block runs (in the main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # A hang-up that somebody chose to ignore (nohup) stays ignored.
    before = {n: signal.signal(n, _terminate) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report(error: BaseException) -> int:
    """Prints `error` in the current output mode and returns the exit code."""
    if os.environ.get("APR_DEBUG") == "1":
        import traceback

        with suppress(OSError):
            out.error_stream.write("".join(traceback.format_exception(error)))
    if isinstance(error, BrokenPipeError) and not isinstance(error, AprError):
        return EXIT_BROKEN_PIPE
    code, body = classify(error)
    with suppress(BrokenPipeError):
        out.failure(body)
    return out.failure_exit or code if code < 128 else code


def classify(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Exit code and `error` object of the JSON envelope."""
    if isinstance(error, AprError):
        return error.exit_code, error.to_json()
    if isinstance(error, OSError):
        wrapped = storage_error(error, _file_of(error))
        return wrapped.exit_code, wrapped.to_json()
    for kind, exit_code, code, text in _PLAIN:
        if isinstance(error, kind):
            return getattr(error, "number", 0) + exit_code, _body(code, text)
    usage = _usage(error)
    if usage is not None:
        return 2, usage
    message = f"internal error: {type(error).__name__}: {error}"
    return EXIT_INTERNAL, _body("internal", message, hint="APR_DEBUG=1 shows where; please report it")


def _file_of(error: OSError) -> str:
    name = error.filename
    return os.fsdecode(name) if isinstance(name, (str, bytes, os.PathLike)) else "(unknown file)"


def _usage(error: BaseException) -> dict[str, Any] | None:
    import click

    if isinstance(error, click.exceptions.Abort):
        return _body("usage", "stopped at a question")
    if not isinstance(error, click.ClickException):
        return None
    ctx = getattr(error, "ctx", None)
    path = "apr" if ctx is None else ctx.command_path
    message, hint = _words(error)
    return _body("usage", message, hint=f"{hint}{path} --help")


def _words(error: Any) -> tuple[str, str]:
    """click's message as one plain sentence, and what it suggests as the start of a hint."""
    message, _, suggestion = error.format_message().strip().partition("Did you mean ")
    for clumsy, clear in (("valid integer range", "whole number"), ("valid float range", "number")):
        message = message.replace(clumsy, clear)
    # A suggestion may stand in parentheses; others belong to the message.
    message = message.rstrip(" (." if suggestion else " .")
    return message[:1].lower() + message[1:], f"did you mean {suggestion.rstrip(')')} " if suggestion else ""


def _body(code: str, message: str, *, hint: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "path": None, "tensor": None, "offset": None, "hint": hint}
