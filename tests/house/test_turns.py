"""Tables of which each commit runs a part."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from turns import LONG_TESTS, PARTS, _listed, _marked, in_turn, left_out, read_long_tests, takes_turns, turn

from long_tests import long_tests, merged, sums

TURNS = 4


def test_four_turns_run_every_case_and_each_the_first_ones() -> None:
    cases = range(103)
    parts = [in_turn(cases, lambda case: case % 10 == 0, now + 8, of=TURNS) for now in range(TURNS)]
    assert sorted({case for part in parts for case in part}) == list(cases)
    assert all({*range(0, 103, 10)} <= {*part} for part in parts)
    assert sum(map(len, parts)) == 103 + (TURNS - 1) * 11
    assert in_turn(cases, lambda case: False, None, of=TURNS) == list(cases)


def test_commits_in_a_row_have_other_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.delenv("APR_FULL", raising=False)
    for n in range(TURNS + 1):
        done = subprocess.CompletedProcess([], 0, f"{n + 10}\n", "")
        monkeypatch.setattr(subprocess, "run", lambda *a, done=done, **o: done)
        turn.cache_clear()
        seen.append(turn())
    monkeypatch.setenv("APR_FULL", "1")
    turn.cache_clear()
    assert turn() is None
    turn.cache_clear()
    assert seen == [10, 11, 12, 13, 14]


@dataclass(eq=False)
class Item:
    """What of a test decides whether it is in turn."""

    name: str
    marks: tuple[pytest.Mark, ...] = ()
    path: Path = Path("test_one.py")
    given: str = ""

    @property
    def nodeid(self) -> str:
        return f"{self.path}::{self.name}"

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(params={"model": self.given})

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)


def test_marked_tests_take_turns_and_each_functions_first_case_always_runs() -> None:
    half = pytest.mark.turns(of=2).mark
    table = [Item(f"test_table[{n}]", (pytest.mark.turns.mark,)) for n in range(10)]
    pair = [Item(f"test_pair[{n}]", (half,)) for n in range(3)]
    loose = [Item(f"test_loose[{n}]", (pytest.mark.turns(first=False).mark,)) for n in range(3)]
    plain = [Item(f"test_{n}", (pytest.mark.turns.mark,)) for n in "abcde"]
    by_row = pytest.mark.turns(rows=True).mark
    rows = [Item(f"test_rows[{n}]", (by_row,)) for n in ("a", "a/1", "a/2", "b/1", "b/2", "c", "a/3", "b/3")]
    others = [Item(name, path=Path("test_two.py")) for name in ("test_a", "test_table[1]")]
    items = [*others, *table, *pair, *plain, *loose, *rows]
    ran = [set(items) - left_out(items, now) for now in range(20, 20 + PARTS)]  # type: ignore[arg-type]
    assert set().union(*ran) == set(items)
    assert all(part >= {*others, table[0], pair[0], rows[0], rows[3], rows[5]} for part in ran)
    assert sorted(len(part & set(table)) for part in ran) == [3, 3, 3, 4]
    assert sorted(len(part & set(pair)) for part in ran) == [2, 2, 2, 2]
    assert sorted(len(part & {*plain, *loose}) for part in ran) == [2, 2, 2, 2]
    assert sorted(len(part & set(rows)) for part in ran) == [4, 4, 4, 5]
    assert left_out(items, None) == set()  # type: ignore[arg-type]


def test_a_marked_table_that_is_listed_takes_the_longer_turn() -> None:
    by = pytest.mark.turns(by="model").mark
    table = [Item(f"test_table[{n}]", (pytest.mark.turns.mark,)) for n in range(17)]
    shared = [Item(f"test_{test}[{n}]", (by,), given=str(n)) for test in "ab" for n in range(17)]
    for items, name in ((table, "test_table"), (shared, "test_b")):
        long = {f"test_one.py::{name}": 1.5}
        ran = [set(items) - _marked(items, now, long) for now in range(16)]  # type: ignore[arg-type]
        assert set().union(*ran) == {*items}
        assert {len(part) for part in ran} == {2 * len(items) // 17}


def test_tests_of_one_value_run_together() -> None:
    mark = pytest.mark.turns(by="model").mark
    items = [Item(f"test_{test}[{n}]", (mark,), given=str(n)) for test in "ab" for n in range(9)]
    ran = [sorted(item.name for item in set(items) - left_out(items, now)) for now in range(PARTS)]  # type: ignore[arg-type]
    assert sorted(ran) == [[f"test_{test}[{n}]" for test in "ab" for n in (0, now, now + 4)] for now in range(1, 5)]


def test_listed_tests_take_turns_that_cost_alike() -> None:
    """Of a function its cases, of a file the whole; what is not listed always runs, and marks go before the list."""
    long = {"test_one.py::test_a": 2.0, "test_one.py::test_b": 3.0, "test_two.py": 9.0}
    cases = [Item(f"test_a[{n}]") for n in range(16)]
    whole = [Item(name, path=Path("test_two.py")) for name in ("test_a", "test_c[1]", "test_c[2]")]
    others = [Item("test_c"), Item("test_a[marked]", (pytest.mark.turns.mark,))]
    items = [*cases, Item("test_b"), *whole, *others]
    ran = [set(items) - _listed(items, now, long) for now in range(5, 5 + 32)]  # type: ignore[arg-type]
    assert set().union(*ran) == set(items)
    assert all(part >= {*others} for part in ran)
    assert sorted(len(part & {*whole}) for part in ran) == [0] * 31 + [3]
    assert sorted(len(part & {*cases}) for part in ran) == [1] * 32
    quick = [set(cases) - _listed(cases, now, {"test_one.py::test_a": 0.5}) for now in range(8)]  # type: ignore[arg-type]
    assert sorted(map(len, quick)) == [2] * 8


def test_the_list_names_tests_that_are_there_and_choose_no_cases_themselves() -> None:
    root = LONG_TESTS.parents[2]
    for name in read_long_tests(LONG_TESTS):
        file, _, function = name.partition("::")
        assert not function or f"def {function.rpartition('::')[2]}(" in (root / file).read_text(), name
        assert not takes_turns(root / file), name


def test_long_tests_are_listed_by_the_mean_of_their_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose fixtures take long is listed instead of its functions, and one that takes turns itself is not."""
    monkeypatch.chdir(LONG_TESTS.parents[2])
    lines = [
        json.dumps({"test": f"tests/{test}", "phase": phase, "seconds": seconds})
        for test, phase, seconds in (
            ("house/test_strings.py::test_a[1]", "call", 1.5), ("house/test_strings.py::test_a[2]", "call", 0.7),
            ("house/test_strings.py::test_b", "call", 0.2), ("house/test_skips.py::test_c", "setup", 6.0),
            ("house/test_skips.py::test_c", "call", 2.0), ("llama/test_required_keys.py::test_d", "call", 9.0),
        )
    ]  # fmt: skip
    assert long_tests(lines) == {"tests/house/test_skips.py": 6.0, "tests/house/test_strings.py::test_a": 1.1}
    assert sums(lines)["tests/house"] == pytest.approx(10.4)
    before = {"tests/a.py": 3.0, "tests/b.py::test_gone": 2.0, "tests/b.py::test_other": 9.0}
    found = merged(before, {"tests/b.py::test_new": 4.0}, ["tests/b.py::test_new[1]", "tests/b.py::test_gone[a]"])
    assert found == {"tests/b.py::test_other": 9.0, "tests/b.py::test_new": 4.0, "tests/a.py": 3.0}
