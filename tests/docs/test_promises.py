"""SECURITY.md and docs/reliability.md: the tests that they name exist, and their figures are those of limits.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aprfmt import limits

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("SECURITY.md", "docs/reliability.md")
UNITS = {"": 1, "Ki": 1 << 10, "KiB": 1 << 10, "Mi": 1 << 20, "MiB": 1 << 20, "Gi": 1 << 30, "GiB": 1 << 30}


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_is_named_exists(page: str) -> None:
    named = re.findall(r"`(?:[A-Z_]+=\w+ pytest )?(tests/[\w/.]+)", (ROOT / page).read_text())
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_promise_in_a_table_of_tests_names_one(page: str) -> None:
    _, _, rest = (ROOT / page).read_text().partition("| Tests |")
    rows = [row for row in rest.partition("\n\n")[0].splitlines()[2:] if row]
    assert len(rows) > 10
    assert [row for row in rows if "tests/" not in row and "reliability.md" not in row] == []


def test_the_limits_are_those_of_the_code() -> None:
    found = re.findall(r"`([A-Z_]+)` \((\d+)(?: (\w+))?\)", (ROOT / "SECURITY.md").read_text())
    assert len(found) > 20
    stated = {name: int(number) * UNITS[unit] for name, number, unit in found}
    assert stated == {name: getattr(limits, name, None) for name in stated}


def test_no_limit_is_named_without_its_figure() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert re.findall(r"`(?:M[AI][XN]_\w+|\w+_MEMORY_BYTES)`(?! \()", text) == []
