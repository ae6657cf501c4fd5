"""Long tables, of which each commit runs a part in turn: as many commits in a row as there are parts run every case.

`in_turn` chooses among the cases of a table; `pytest.mark.turns` on a test, a class or a file has `left_out` choose
among its tests when the whole suite runs: each function runs its first case and a quarter of the others. Of the marked
functions of a file that take no cases, and of the cases of those that are marked `turns(first=False)`, a quarter runs.
With `turns(by="name")` all tests of a file that take the same value of the parameter `name` run together, so that what
they share is built for the values in turn only. With `turns(rows=True)` the first case of each row always runs: what
stands before the first `/` in a case's id is its row. `turns(of=…)` names another number of parts.

Tests that take long are listed in long_tests.txt: of those that take three seconds and more one in 32 runs, of those
that take one second one in 16, of the others one in 8, of each function another case. Those that are marked take as
many turns, if their mark names fewer. A listed file without marks, whose fixtures take long, runs as a whole.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import pytest

Case = TypeVar("Case")

PARTS = 4
"""Commits in a row that run every test that is marked."""
PARTS_OF_LISTED = {3.0: 32, 1.0: 16, 0.0: 8}
"""Seconds -> commits in a row that run every listed test that takes as many and more."""

LONG_TESTS = Path(__file__).with_name("long_tests.txt")
"""What takes 0.3 s and more of processor time for a case: `SECONDS FILE::FUNCTION` or `SECONDS FILE` a line.

`tools/long_tests.py` writes it.
"""


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


def examples(whole: int) -> int:
    """Examples of a property that a run draws: other ones each time, a part of the `whole`, which APR_FULL draws."""
    return whole if turn() is None else whole // PARTS


def first_always(values: Iterable[Case]) -> list[Any]:
    """Parameters of a test or a fixture, of which the first always runs and the others take turns."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.turns(first=False)) for value in others)]


def left_out(items: Iterable[pytest.Item], now: int | None) -> set[pytest.Item]:
    """The marked and the listed tests that the turn `now` does not run."""
    items, long = [*items], read_long_tests(LONG_TESTS)
    return _marked(items, now, long) | (set() if now is None else _listed(items, now, long))


def read_long_tests(path: Path) -> dict[str, float]:
    """Seconds by file or function."""
    lines = (line.split(maxsplit=1) for line in path.read_text().splitlines() if not line.startswith("#"))
    return {name: float(seconds) for seconds, name in lines}


def takes_turns(path: Path) -> bool:
    """Whether a file of tests chooses among its cases itself."""
    return re.search(r"\b(in_turn\(|turn\(\))", path.read_text()) is not None


def _listed(items: Iterable[pytest.Item], now: int, long: Mapping[str, float]) -> set[pytest.Item]:
    """Listed tests of other turns; the most expensive are dealt first, so that turns cost alike."""
    units: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("turns") is None:
            file, _, case = item.nodeid.partition("::")
            function = f"{file}::{case.partition('[')[0]}"
            if file in long:
                units[file].append(item)
            elif function in long:
                units[item.nodeid].append(item)
    cost = {unit: long.get(unit) or long[unit.partition("[")[0]] for unit in units}
    out: set[pytest.Item] = set()
    for parts in PARTS_OF_LISTED.values():
        alike = [unit for unit in units if _parts(cost[unit]) == parts]
        dealt = sorted(alike, key=lambda unit: (-cost[unit], unit))
        out |= {item for place, unit in enumerate(dealt) if place % parts != now % parts for item in units[unit]}
    return out


def _parts(seconds: float) -> int:
    return next(parts for least, parts in PARTS_OF_LISTED.items() if seconds >= least)


def _marked(items: Iterable[pytest.Item], now: int | None, long: Mapping[str, float]) -> set[pytest.Item]:
    tables: dict[tuple[Path, str, int, bool], dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    longest: dict[tuple[Path, str], int] = defaultdict(int)
    for item in items:
        mark = item.get_closest_marker("turns")
        if mark is not None:
            how = {"of": PARTS, "rows": False, "by": "", "first": True, **mark.kwargs}
            name, bracket, _ = item.name.partition("[")
            values = item.callspec.params if bracket else {}  # type: ignore[attr-defined]
            by = how["by"] if how["by"] in values else ""
            table = by or (name if bracket and how["first"] else "")
            seconds = long.get(item.nodeid.partition("[")[0])
            of = how["of"] if seconds is None else max(how["of"], _parts(seconds))
            if by:  # all functions of a value run together
                longest[item.path, by] = max(of, longest[item.path, by])
                of = 0
            tables[item.path, table, of, how["rows"]][str(values[by]) if by else item.name].append(item)
    found = set()
    for (path, table, of, rows), cases in tables.items():
        of = of or longest[path, table]
        firsts = {case.partition("/")[0].removesuffix("]") if rows else "": case for case in reversed(cases)}
        always = set(firsts.values()) if table else set()
        start = crc32(
            f"{path.name} {table}".encode()
        )  # a table of one test costs another commit than that of the next file
        running = in_turn(cases, always.__contains__, None if now is None else now + start, of=of)
        found |= {item for case in cases.keys() - set(running) for item in cases[case]}
    return found
