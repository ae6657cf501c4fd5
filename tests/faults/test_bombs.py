"""Chat templates and pickles made to take all memory or time: each is an AprError, within the limits of their process.

By default a bomb may take a fraction of a second, and a commit runs some of them by turns. APR_BOMBS=all runs all, with
the limits that users have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import pickle_bombs
import pytest
from template_bombs import BOMBS
from turns import PARTS, in_turn, turn

from aprfmt.limits import MAX_CHAT_SECONDS, MAX_PICKLE_SECONDS

_ALL = os.environ.get("APR_BOMBS") == "all"
_SECONDS = max(MAX_CHAT_SECONDS, MAX_PICKLE_SECONDS) if _ALL else 0.1
_START = 1.5
"""Processor time of a new process and of the parent, on a slow machine."""
_MOST_BYTES = 512 << 20
_DRIVER = Path(pickle_bombs.__file__).with_name("hostile.py")

Ask = Callable[..., Any]
Case = TypeVar("Case")


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Asks one process for all; see its docstring."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(_DRIVER), str(_SECONDS)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def answer(*request: str) -> Any:
            print(json.dumps(request), file=process.stdin, flush=True)
            assert process.stdout is not None
            return json.loads(process.stdout.readline())

        yield answer
        process.stdin.close()


def some(bombs: Iterable[Case]) -> list[Case]:
    """Those in turn, or all."""
    return in_turn(bombs, lambda bomb: False, None if _ALL else turn(), of=PARTS)


def check(rows: dict[str, dict[str, Any]], sizes: list[int]) -> None:
    """Holds the rows against the limits."""
    if _ALL:
        slowest = sorted(rows, key=lambda name: -rows[name]["seconds"])[:5]
        print("bytes of the parent and of a child:", sizes)
        print("slowest:", {name: round(rows[name]["seconds"], 2) for name in slowest})
    assert {name: row for name, row in rows.items() if row["error"] is None} == {}
    assert {name: row for name, row in rows.items() if row["seconds"] > _SECONDS + _START} == {}
    assert sum(sizes) < _MOST_BYTES


@pytest.mark.timeout(3600 if _ALL else 600)
def test_templates(ask: Ask) -> None:
    assert len(BOMBS) >= 66
    rows = {name: ask("template", BOMBS[name]) for name in some(BOMBS)}
    check(rows, ask("end"))
    assert {row["hint"] for row in rows.values()} == {"--raw prompts without a template"}
    assert {name for name, row in rows.items() if row["error"] not in ("LimitError", "UnsupportedError")} == set()


@pytest.mark.timeout(3600 if _ALL else 600)
def test_pickles(ask: Ask, tmp_path: Path) -> None:
    rows, path, marker = {}, tmp_path / "m.bin", tmp_path / "marker"
    cases = list(product(pickle_bombs.FORMS, pickle_bombs.BODIES))
    assert len(cases) >= 60
    for form, name in some(cases):
        pickle_bombs.write(name, form, path, marker)
        rows[f"{name} ({form})"] = ask("pickle", str(path))
    check(rows, ask("end"))
    assert not marker.exists()
