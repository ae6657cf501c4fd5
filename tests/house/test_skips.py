"""The table of what a run of the suite left out."""

from __future__ import annotations

import re
from pathlib import Path

import skips

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_counts_reasons_and_says_what_to_type() -> None:
    found = skips.table(
        ["Skipped: needs a GPU", "a GGUF has no objects", "Skipped: needs a GPU", "a GGUF has no objects", "x"]
    )
    assert found == [
        "    2  needs a GPU  →  on a machine with CUDA: python -m pytest -m cuda tests/train",
        "    2  a GGUF has no objects",
        "    1  x",
    ]


def test_every_reason_that_names_a_need_says_what_to_type() -> None:
    """The reasons of the suite's own skipif marks."""
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    reasons = re.findall(r'skipif\(.*reason="([^"]+)"', sources)
    assert len(reasons) > 10
    assert [reason for reason in reasons if not skips.way(reason)] == []
