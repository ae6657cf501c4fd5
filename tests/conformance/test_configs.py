"""Unusual configurations, both ways: the GGUF is right, or refused by key and value, or what differs is said.

The cases are lines of configs.jsonl; `python tools/configs.py` judges all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from llama_peer import LlamaPeer
from odd_configs import REFUSED, SAME, SKIPPED, OddConfig, judge, read_cases


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaPeer]:
    """The running llama.cpp."""
    pytest.importorskip("torch").set_num_threads(1)
    with LlamaPeer() as peer:
        yield peer


@pytest.mark.llama
@pytest.mark.turns(of=8)
@pytest.mark.parametrize("case", read_cases(), ids=lambda case: f"{case.model_type}-{case.why}".replace(" ", "-"))
def test_right_refused_or_said(case: OddConfig, tmp_path: Path, llama: LlamaPeer) -> None:
    verdicts = judge(case, tmp_path, llama)
    assert verdicts["apr"].outcome == SAME, verdicts
    assert all(verdict.fine for verdict in verdicts.values()), verdicts
    refused = {REFUSED} if verdicts["to_gguf"].outcome == SKIPPED else set()  # llama.cpp has no network for it
    assert case.expected in {"", *refused, *(verdict.outcome for verdict in verdicts.values())}, verdicts
