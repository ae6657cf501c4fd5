"""Entry of `apr`: the version without any import, everything else through the table of commands."""

from __future__ import annotations

import gc
import io
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from aprfmt import __version__


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs `apr` with `argv` (default: the process's arguments) and exits with the documented code."""
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        # Looking for garbage among modules and vocabularies takes a tenth of the time of `apr inspect`.
        gc.set_threshold(50_000)
        _prepare_streams()
        arguments = _in_our_words(arguments)
        if "--version" in arguments[:2] and set(arguments) <= {"--version", "--json"}:
            _print_version("--json" in arguments)
            code = 0
        else:
            code = run(arguments)
        _leave(code)
    except KeyboardInterrupt:  # before or after `run` could catch it: nothing was begun
        sys.stderr.write("error: interrupted; no partial output is left\n")
        _leave(130)
    except MemoryError:  # outside of `run`; the streams may be half made
        with suppress(OSError):
            os.write(2, b"error: not enough memory\n")
        os._exit(7)


_ALIASES = {"info": "inspect", "show": "inspect", "version": "--version", "-V": "--version", "help": "--help"}
"""What people type first, as other programs have it."""


def _in_our_words(arguments: list[str]) -> list[str]:
    """The first word by its alias; `help COMMAND` is `COMMAND --help`."""
    first = next((i for i, word in enumerate(arguments) if word in _ALIASES or not word.startswith("-")), None)
    if first is None or arguments[first] not in _ALIASES:
        return arguments
    before, behind = arguments[:first], arguments[first + 1 :]
    if arguments[first] == "help" and behind:
        return [*before, *behind, "--help"]
    return [*before, _ALIASES[arguments[first]], *behind]


def _prepare_streams() -> None:
    """Gives a closed stream the null device, and an unbuffered one (PYTHONUNBUFFERED) a buffer.

    Without the buffer a short write, as of a disk that fills up, would lose the rest without an error.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(getattr(stream, "buffer", None), io.RawIOBase):
            encoding, errors = stream.encoding, stream.errors
            buffer = io.BufferedWriter(stream.detach())
            setattr(sys, name, io.TextIOWrapper(buffer, encoding, errors, line_buffering=True))


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code; reports errors, never a traceback.

    A command line of another program runs as the apr command that means the same, with a note.
    """
    from aprfmt.cli.failures import meant, report
    from aprfmt.cli.output import out
    from aprfmt.errors import set_hint_words
    from aprfmt.trust.signature import REQUIRED_SIGNER

    out.configure(arguments)
    out.typed = arguments
    words, signer = set_hint_words(None), None
    try:
        signer = os.environ.get(REQUIRED_SIGNER)
        error, typed = _try(arguments), arguments
        for _ in range(2):  # `convert FOLDER-OF-SHARDS OUT`: first the option, then the file
            if not isinstance(error, BaseException) or (ours := meant(error, typed)) is None:
                break
            typed = ours.words
            error = _try_noted(typed, ours.note)
            for line in ours.more:
                code = report(error) if isinstance(error, BaseException) else error
                error = _try_noted(line)
                error = error if isinstance(error, BaseException) else error or code
            if ours.more:
                break
        return report(error) if isinstance(error, BaseException) else error
    except (MemoryError, SystemError) as error:  # os.environ needs memory too
        return report(error)
    finally:
        set_hint_words(words)
        if signer is not None:
            os.environ[REQUIRED_SIGNER] = signer
        else:
            os.environ.pop(REQUIRED_SIGNER, None)


def _try_noted(words: list[str], what: str = "") -> int | BaseException:
    """`_try` of our line for another one, after a note of it and of `what` else there is to say."""
    from aprfmt.cli.output import out

    out.configure(words)
    out.note(shlex.join(["apr", *words]) + f"\n{what}" * bool(what))
    return _try(words)


def _try(arguments: list[str]) -> int | BaseException:
    """The exit code of one command line, or what went wrong."""
    from aprfmt.cli.failures import catch_signals, is_panic
    from aprfmt.errors import Terminated

    try:
        with catch_signals():
            return _dispatch(arguments)
    except (Exception, KeyboardInterrupt, Terminated) as error:
        return error
    except BaseException as error:
        if not is_panic(error):
            raise
        return error


def _dispatch(arguments: list[str]) -> int:
    is_completion = "_APR_COMPLETE" in os.environ  # the words are in the environment
    if not is_completion and (file := _only_to_inspect(arguments)) is not None:
        from aprfmt.cli.inspect_text import show

        show(file)
        return 0
    _check_memory()
    from aprfmt.cli.complete import SHELL_OPTIONS, serve_shell
    from aprfmt.cli.group import build, dispatch

    if arguments and arguments[0] in SHELL_OPTIONS and len(arguments) < 3 and arguments[-1] not in ("-h", "--help"):
        serve_shell(arguments[0], arguments[1] if len(arguments) == 2 else None)
        return 0
    if is_completion:
        build(None)(arguments, prog_name="apr")
    return dispatch(build(next((word for word in arguments if not word.startswith("-")), "")), arguments)


_LEAST_MEMORY, _LITTLE_MEMORY = 128 << 20, 8 << 30


def _check_memory() -> None:
    """Raises OutOfMemoryError under a limit with which OpenBLAS, which numpy loads, ends the process.

    Under others it is kept from reserving memory for each of its threads.
    """
    from aprfmt.errors import OutOfMemoryError, memory_limit

    limit = memory_limit()
    if limit is not None and limit < _LEAST_MEMORY:
        raise OutOfMemoryError(
            f"not enough memory: this process is limited to {limit >> 20} MiB, {_LEAST_MEMORY >> 20} are needed",
            hint="raise its limit: ulimit -v unlimited",
        )
    if limit is not None and limit < _LITTLE_MEMORY:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _only_to_inspect(arguments: Sequence[str]) -> str | None:
    """FILE of `apr inspect FILE`, which needs no parser: the import of typer takes a third of its time."""
    words = [word for word in arguments if word not in ("--json", "--quiet", "-q")]
    is_plain = len(words) == 2 and words[0] == "inspect" and words[1] != "" and not words[1].startswith("-")
    return words[1] if is_plain else None


def _print_version(as_json: bool) -> None:
    python = ".".join(map(str, sys.version_info[:3]))
    if as_json:
        import json

        body = {"schema": "apr.version/1", "ok": True, "name": "aprfmt", "version": __version__, "python": python}
        print(json.dumps(body))  # noqa: T201
    else:
        print(f"apr {__version__}")  # noqa: T201


def _leave(code: int) -> NoReturn:
    """Exits; output that nobody reads any more (a closed pipe) is dropped without a message."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or 141
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code == 0:  # else the failure has been told already
            sys.stderr.write(f"error: cannot write to standard output: {error.strerror}\n")
        code = code or 7
    exec("")  # else `python -m` ends by the signal if one interrupted an `exec`, of which dataclasses have some
    gc.freeze()  # else the interpreter looks through every module and vocabulary once more
    sys.exit(code)
