"""Long tables, of which each commit runs a part in turn: as many commits in a row as there are parts run every case.

`in_turn` chooses among the cases of a table; `pytest.mark.turns` on a test, a class or a file has `left_out` choose
among its tests when the whole suite runs: each function runs its first case and a quarter of the others. Of the marked
functions of a file that take no cases, and of the cases of those that are marked `turns(first=False)`, a quarter runs.
`turns(of=…)` names another number of parts.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

Case = TypeVar("Case")

PARTS = 4
"""Commits in a row that run every test that is marked."""


@cache
def turn() -> int | None:
    """The number of this commit in its history; None where APR_FULL asks for every case."""
    if os.environ.get("APR_FULL"):
        return None
    command = ["git", "rev-list", "--count", "HEAD"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return int(found.stdout or 0)


def in_turn(cases: Iterable[Case], always: Callable[[Case], bool], now: int | None, *, of: int) -> list[Case]:
    """Cases that always run, and one of `of` parts of the others: that of the turn `now`, all where it is None."""
    found, other = [], 0
    for case in cases:
        if always(case):
            found.append(case)
            continue
        if now is None or other % of == now % of:
            found.append(case)
        other += 1
    return found


def left_out(items: Iterable[pytest.Item], now: int | None) -> set[pytest.Item]:
    """The marked tests that the turn `now` does not run."""
    tables: dict[tuple[Path, str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("turns")
        if mark is not None:
            name, bracket, _ = item.name.partition("[")
            has_first = bracket and mark.kwargs.get("first", True)
            tables[item.path, name if has_first else "", mark.kwargs.get("of", PARTS)].append(item)
    found = set()
    for (_, function, of), tests in tables.items():
        always = {tests[0]} if function else set()
        found |= set(tests).difference(in_turn(tests, always.__contains__, now, of=of))
    return found
