"""Maps every failure to an exit code, a one-line message and a hint.

AprError                    its own exit code (errors.py); `apr diff`: 2
a bad command line          2
OSError                     7, or 3 for a missing file
out of memory               7, including errors raised by libraries
closed pipe                 141, silent
Ctrl-C, SIGTERM, SIGHUP     130, 143, 129
anything else               70: a bug in apr; APR_DEBUG=1 shows a traceback
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from aprfmt.cli.output import out
from aprfmt.errors import (
    ONE_FILE,
    AprError,
    CorruptError,
    ExistsError,
    NotFoundError,
    OutOfMemoryError,
    Terminated,
    UnknownFormatError,
    UsageError,
    out_of_memory,
    storage_error,
)
from aprfmt.text import first_few

if TYPE_CHECKING:
    from typer._click import Parameter

    from aprfmt.cli.foreign_line import Suggestion

EXIT_INTERNAL = 70
EXIT_BROKEN_PIPE = 141
_ALIKE = 0.7


_NOTHING_LEFT = "; no partial output is left"
# Exception, exit code (a signal's number is added), error code, which begins the message, too.
_ENDINGS = ((KeyboardInterrupt, 130, "interrupted"), (Terminated, 128, "terminated"))


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)


@contextmanager
def catch_signals() -> Iterator[None]:
    """Raises Terminated on SIGTERM and SIGHUP while the block runs (main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # SIGHUP stays ignored under nohup.
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
    if isinstance(error.__cause__, KeyboardInterrupt | Terminated):  # Python 3.11 wraps what ends a class's creation
        error = error.__cause__
    if isinstance(error, BrokenPipeError) and not isinstance(error, AprError):
        return EXIT_BROKEN_PIPE
    code, described = classify(error)
    with suppress(BrokenPipeError):
        out.failure(described)
    code = code if 0 < code < 256 else EXIT_INTERNAL  # a plugin's class may say anything
    return out.failure_exit or code if code < 128 else code


def meant(error: BaseException, arguments: Sequence[str]) -> Suggestion | None:
    """The command line that corrects one that typer rejected with `error`; None if it would not mean the same."""
    if isinstance(error, UnknownFormatError) and (error.hint or "").startswith(ONE_FILE):
        from aprfmt.cli.other_tools import of_folder

        return of_folder(arguments, str(error.path), str(error.hint).removeprefix(ONE_FILE))
    is_page = isinstance(error, UsageError) and arguments[:1] in (["convert"], ["export"])
    if is_page or (isinstance(error, AprError) and arguments[:1] in (["pull"], ["validate"])):
        from aprfmt.cli.other_tools import of_refused

        found = of_refused(arguments)
        return found if found is not None and found.runs(arguments) else None
    if isinstance(error, NotFoundError) and error.path:
        from aprfmt.cli.other_tools import of_missing

        found = of_missing(arguments, error.path)
        return found if found is not None and found.runs(arguments) else None
    if not isinstance(error, Exception) or isinstance(error, AprError | OSError | MemoryError):
        return None
    import typer

    if not isinstance(error, typer.TyperException):
        return None
    from aprfmt.cli.other_tools import suggest

    found = suggest(arguments, error)
    return found if found is not None and found.runs(arguments) else None


def classify(error: BaseException) -> tuple[int, AprError]:
    """The exit code of `error`, and its description as an AprError."""
    return _panic(error) if is_panic(error) else _classify(error)


def _classify(error: BaseException) -> tuple[int, AprError]:
    if isinstance(error, AprError):
        error.hint = _with_added(error.hint) or error.hint
        if isinstance(error, ExistsError) and error.path and (line := _under_free_name(error.path)) is not None:
            error.hint = f"{error.hint}; to keep both:\n{line}" if error.hint else line
        if isinstance(error, NotFoundError) and error.hint == error.usual_hint and error.path:
            error.hint = _sibling(error.path) or error.hint
        return error.exit_code, error
    if (lacking := out_of_memory(error)) is not None:
        return lacking.exit_code, lacking
    if isinstance(error, OSError):
        name = error.filename
        path = os.fsdecode(name) if isinstance(name, (str, bytes, os.PathLike)) else "(unknown file)"
        wrapped = storage_error(error, path)
        return wrapped.exit_code, wrapped
    for kind, exit_code, code in _ENDINGS:
        if isinstance(error, kind):
            message = code if out.has_streamed else code + _NOTHING_LEFT  # what is printed, remains
            return getattr(error, "number", 0) + exit_code, AprError(message, code=code)
    import typer

    if isinstance(error, typer.TyperException):
        return 2, _usage_error(error)
    message = f"internal error: {type(error).__name__}: {error}"
    hint = "set APR_DEBUG=1 for a traceback; please report this bug"
    return EXIT_INTERNAL, AprError(message, code="internal", hint=hint)


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library panicked; pyo3 raises that as a BaseException, not an Exception."""
    return type(error).__module__ == "pyo3_runtime"


def _panic(error: BaseException) -> tuple[int, AprError]:
    text = " ".join(str(error).split())[:200]
    if re.search(r"memory|alloc|ThreadPool|WouldBlock", text):
        lacking = OutOfMemoryError(f"not enough memory or threads: {text}")
        return lacking.exit_code, lacking
    damaged = CorruptError(f"the tokenizer library failed: {text}", hint="apr validate FILE checks the tokenizer")
    return damaged.exit_code, damaged


def _sibling(path: str) -> str | None:
    """A hint with the most similar name in the path's folder; None if no name is similar."""
    from difflib import get_close_matches

    folder, name = os.path.split(path)
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return None
    near = get_close_matches(name, names, 1, 0.75)
    return f"did you mean {os.path.join(folder, near[0])}?" if near else None


def _nearest(error: Exception) -> list[str]:
    """The options or commands that an unknown one was possibly meant to be."""
    from difflib import SequenceMatcher, get_close_matches

    from aprfmt.cli.commands import COMMANDS

    if options := getattr(error, "possibilities", None):
        word, names = str(getattr(error, "option_name", "")), {name: name.lstrip("-") for name in sorted(options)}
    elif out.command not in COMMANDS:
        word, names = out.command, {repr(name): name for name in get_close_matches(out.command, COMMANDS)}
    else:
        return []
    word = word.lstrip("-")
    return [
        shown
        for shown, name in names.items()
        if word in name or name in word or SequenceMatcher(None, word, name).ratio() >= _ALIKE
    ]


def _usage_error(error: Exception) -> UsageError:
    """typer's error as one sentence, with what to type."""
    from aprfmt.cli.commands import COMMANDS
    from aprfmt.cli.other_tools import missing_of, suggest

    near = _nearest(error)
    _, missing = missing_of(error, out.arguments)
    message = str(getattr(error, "message", "")) if near else error.format_message()  # type: ignore[attr-defined]
    message = (_all_missing(missing) or message).replace("valid int range", "integer")
    message = message.replace("valid float range", "number").strip(" .")
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    ours = suggest(out.arguments, error)
    line = _with_option(error, near[0]) if len(near) == 1 else None
    if ours is not None and line is not None and ours.dropped == [getattr(error, "option_name", "")]:
        ours = None  # a word that resembles an option is that option, not one of another program to leave out
    if ours is not None:
        hint, message = ours.hint(), ours.because or message
    elif line is not None:
        hint = f"{line}\n"
    elif not near and (others := _commands_with(getattr(error, "option_name", None))):
        plain = str(getattr(error, "message", "")).strip(" .")
        message = f"{plain}; it is an option of {first_few([f'apr {name}' for name in others])}"
    if out.command in COMMANDS:
        hint += "\n" * (ours is not None) + f"apr {out.command} --help"
    elif ours is None:
        hint += "apr --help"
    return UsageError(message[:1].lower() + message[1:], hint=hint)


def _commands_with(option: str | None) -> list[str]:
    """The commands that have an option of this name."""
    from aprfmt.cli.commands import COMMANDS
    from aprfmt.cli.foreign_line import command_of

    if option is None or not option.startswith("--"):
        return []
    return [name for name in COMMANDS if any(option in (*p.opts, *p.secondary_opts) for p in command_of(name).params)]


def _with_option(error: Exception, option: str) -> str | None:
    """The line as typed, with `option` in place of an unknown one that resembles it; None if that is not a line."""
    from aprfmt.cli.other_tools import parse

    unknown = str(getattr(error, "option_name", ""))
    words = [
        option + word.removeprefix(unknown) if word.partition("=")[0] == unknown else word for word in out.arguments
    ]
    return shlex.join(["apr", *words]) if words != out.arguments and parse(words) is None else None


def _under_free_name(path: str) -> str | None:
    """The line that was typed, with a name that is free instead of the output `path`; None if the line has no such."""
    from aprfmt.cli.commands import COMMANDS
    from aprfmt.cli.foreign_line import free

    at = [i for i, word in enumerate(out.arguments) if word.removeprefix("--output=") == path]
    if len(at) != 1 or out.arguments[0] not in COMMANDS or (name := free(path)) is None:
        return None
    words = [*out.arguments]
    words[at[0]] = words[at[0]].removesuffix(path) + name
    return shlex.join(["apr", *words])


_ADDED = re.compile(r"(?:(?P<before>[^;]*), or )?add (?=--)(?P<words>[^(]*)", re.DOTALL)


def _with_added(hint: str | None) -> str | None:
    """`add --force to replace it` as the line that was typed, with the option; None if the hint is another one."""
    from aprfmt.cli.commands import COMMANDS

    arguments = out.arguments
    if not hint or not arguments or arguments[0] not in COMMANDS or (match := _ADDED.match(hint)) is None:
        return None
    from aprfmt.cli.foreign_line import command_of, is_switch

    switches = {name for p in command_of(arguments[0]).params if is_switch(p) for name in p.opts}
    rest, added = match["words"].split(), list[str]()
    while rest and rest[0].startswith("--"):
        n_words = 1 if rest[0].rstrip(",;") in switches or "=" in rest[0] else 2
        added += rest[:n_words]
        rest = rest[n_words:]
        if added[-1].endswith((",", ";")):
            added[-1] = added[-1].rstrip(",;")
            break
    if not added or any(word.isupper() or word.rstrip(",") == "or" for word in added):
        return None  # a placeholder
    at = arguments.index("--") if "--" in arguments else len(arguments)
    line = shlex.join(["apr", *arguments[:at], *added, *arguments[at:]])
    behind = " ".join([*rest, hint[match.end() :]]).strip()
    return "\n".join(filter(None, (line, f"or {match['before']}" if match["before"] else "", behind)))


def _all_missing(missing: list[Parameter]) -> str | None:
    """The message if several parameters are missing, else None."""
    names = [p.human_readable_name if p.param_type_name == "argument" else max(p.opts, key=len) for p in missing]
    return f"Missing {' and '.join(names)}" if len(names) > 1 else None
