"""Entry of `apr`: the version without any import, everything else through the table of commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from aprfmt import __version__


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs `apr` with `argv` (default: the process's arguments) and exits with the documented code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments[:2] and set(arguments) <= {"--version", "--json"}:
        _print_version("--json" in arguments)
        code = 0
    else:
        code = run(arguments)
    _leave(code)


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code; prints whatever went wrong, never a traceback."""
    from aprfmt.cli.failures import Terminated, catch_signals, report
    from aprfmt.cli.output import out

    out.configure(arguments)
    try:
        with catch_signals():
            return _dispatch(arguments)
    except (Exception, KeyboardInterrupt, Terminated) as error:
        return report(error)


def _dispatch(arguments: list[str]) -> int:
    from aprfmt.cli.group import build, finish

    group = build()
    if "_APR_COMPLETE" in os.environ:
        group.main(arguments, prog_name="apr")
    return finish(group, arguments)


def _print_version(as_json: bool) -> None:
    python = ".".join(map(str, sys.version_info[:3]))
    if as_json:
        import json

        body = {
            "schema": "apr.version/1",
            "ok": True,
            "name": "aprfmt",
            "version": __version__,
            "python": python,
        }
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
        sys.stderr.write(f"error: cannot write to standard output: {error.strerror}\n")
        code = code or 7
    sys.exit(code)
