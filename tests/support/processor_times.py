"""Processor seconds of tests, their child processes included, in the file that APR_TEST_TIMES names.

A line of JSON for each setup and call, in one file a worker: FILE.gw0, FILE.gw1. `tools/long_tests.py` reads them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest


def recorded(item: pytest.Item, phase: str) -> Generator[None]:
    """Around a phase of a test."""
    path = os.environ.get("APR_TEST_TIMES")
    before = _seconds()
    try:
        return (yield)
    finally:
        if path:
            line = {"test": item.nodeid, "phase": phase, "seconds": round(_seconds() - before, 3)}
            with Path(f"{path}.{os.environ.get('PYTEST_XDIST_WORKER', 'main')}").open("a") as file:
                file.write(json.dumps(line) + "\n")


def _seconds() -> float:
    times = os.times()
    return sum(times[:4])
