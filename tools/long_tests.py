"""Lists the tests that take long, of which each commit runs a part: tests/support/long_tests.txt.

    APR_TEST_TIMES=/tmp/times make test
    .venv/bin/python tools/long_tests.py /tmp/times.*

Tests that this turn left out keep their lines; with FULL=1 none is left out. Prints the seconds by
folder and file too. Processor time does not depend on what else the machine does.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))

from turns import LONG_TESTS, read_long_tests, takes_turns

LEAST_CALL = 0.3
LEAST_SETUP = 5.0
"""Seconds from which a function is listed, by the mean of its cases, and a file, by its fixtures.

What is listed stays from half of that on: other cases run in each turn.
"""

HEAD = "# Written by tools/long_tests.py: processor seconds, and a test function or a file, see turns.py."


def long_tests(lines: Iterable[str], listed: Collection[str] = ()) -> dict[str, float]:
    """{file or function: seconds}, the longest first, but of files that choose among their cases themselves."""
    calls: dict[str, list[float]] = defaultdict(list)
    setups: dict[str, float] = defaultdict(float)
    for found in map(json.loads, lines):
        file = found["test"].partition("::")[0]
        if takes_turns(Path(file)):
            continue
        if found["phase"] == "setup":
            setups[file] += found["seconds"]
        else:
            calls[found["test"].partition("[")[0]].append(found["seconds"])

    def is_long(name: str, seconds: float, least: float) -> bool:
        return seconds >= (least / 2 if name in listed else least)

    files = {file: round(seconds, 1) for file, seconds in setups.items() if is_long(file, seconds, LEAST_SETUP)}
    functions = {
        name: round(mean(each), 1)
        for name, each in calls.items()
        if name.partition("::")[0] not in files and is_long(name, mean(each), LEAST_CALL)
    }
    return dict(sorted({**files, **functions}.items(), key=lambda item: (-item[1], item[0])))


def merged(before: Mapping[str, float], found: Mapping[str, float], ran: Iterable[str]) -> dict[str, float]:
    """What was `found`, and of the list `before` it the functions and files of which no test `ran`."""
    seen = {name for test in ran for name in (test.partition("::")[0], test.partition("[")[0])}
    kept = {name: seconds for name, seconds in before.items() if name not in seen}
    return dict(sorted({**kept, **found}.items(), key=lambda item: (-item[1], item[0])))


def sums(lines: Iterable[str]) -> dict[str, float]:
    """{folder or file: seconds}, the longest first."""
    totals: dict[str, float] = defaultdict(float)
    for found in map(json.loads, lines):
        file = Path(found["test"].partition("::")[0])
        for place in (file, file.parents[-3] if len(file.parents) > 2 else file.parent):
            totals[str(place)] += found["seconds"]
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def main() -> None:
    """Writes the list and prints the sums."""
    lines = [line for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    if not lines:
        raise SystemExit(__doc__)
    before = read_long_tests(LONG_TESTS)
    found = merged(before, long_tests(lines, before), {json.loads(line)["test"] for line in lines})
    LONG_TESTS.write_text("\n".join([HEAD, *(f"{seconds:.1f} {name}" for name, seconds in found.items())]) + "\n")
    for place, seconds in list(sums(lines).items())[:60]:
        print(f"{seconds:8.1f}  {place}")


if __name__ == "__main__":
    main()
