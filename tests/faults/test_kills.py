"""A process that is killed leaves the old output or the new one, whole, and nothing that the next run does not remove.

A share of the kills; `tools/kill_writers.py` makes as many as one likes.
"""

from __future__ import annotations

import random
import sys

import pytest
import writers
from publications import WAYS, Kills
from writers import WRITERS

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="publishes as Linux does"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> Kills:
    root = tmp_path_factory.mktemp("kills")
    writers.prepare(root)
    return Kills(root)


@pytest.mark.turns
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRITERS)
def test_a_killed_writer_leaves_the_old_or_the_new(name: str, way: str, kills: Kills) -> None:
    draw = random.Random(f"{name} {way}")
    for _ in range(2):
        kills.kill_at(name, way, draw)
    assert kills.faults == []
