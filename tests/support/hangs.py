"""Ends a run in which a test hangs outside Python, where pytest-timeout is not heard.

pytest's own `faulthandler_timeout` starts a thread for each test, which costs more than half of the tests do; here one
thread serves all tests of a minute.
"""

from __future__ import annotations

import faulthandler
import os
import time
from dataclasses import dataclass

import pytest

SECONDS = 900.0
"""What a test may take; up to a fifteenth less, since the watch began with an earlier one."""


@dataclass
class _Watch:
    stderr: int = 2
    since: float = float("-inf")


_watch = _Watch()


def keep_stderr(config: pytest.Config) -> None:
    """Keeps the real standard error for the traceback, since tests run with another one."""
    capture = config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        _watch.stderr = os.dup(2)


def watch(seconds: float = SECONDS) -> None:
    """Before each test: prints all threads' tracebacks and ends the process with 1, unless called again in time."""
    now = time.monotonic()
    if now - _watch.since > seconds / 15:
        faulthandler.dump_traceback_later(seconds, file=_watch.stderr, exit=True)
        _watch.since = now
