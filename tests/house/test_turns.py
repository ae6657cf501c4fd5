"""Tables of which each commit runs a part."""

from __future__ import annotations

import subprocess

import pytest
from turns import in_turn, turn

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
