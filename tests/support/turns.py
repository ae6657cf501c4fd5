"""Long tables, of which each commit runs a part in turn: as many commits in a row as there are parts run every case."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TypeVar

Case = TypeVar("Case")


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
