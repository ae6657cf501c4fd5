"""Processor seconds of tests, their child processes included, in the file that APR_TEST_TIMES names.

A line of JSON for each setup and call, in one file a worker: FILE.gw0, FILE.gw1. `tools/long_tests.py` reads them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest


def recorded(item: pytest.Item, phase: str) -> Generator[None]:
    """Around a phase of a test."""
    path = os.environ.get("APR_TEST_TIMES")
    if not path:
        return (yield)
    before = _seconds()
    try:
        return (yield)
    finally:
        line = {"test": item.nodeid, "phase": phase, "seconds": round(_seconds() - before, 3)}
        with Path(f"{path}.{os.environ.get('PYTEST_XDIST_WORKER', 'main')}").open("a") as file:
            file.write(json.dumps(line) + "\n")


def _seconds() -> float:
    """Of this process, of children that ended, and of those that serve several tests."""
    return sum(os.times()[:4]) + sum(map(_seconds_of, _children()))


def _children() -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return []


def _seconds_of(pid: str) -> float:
    with suppress(OSError):
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return 0.0
