"""No small file takes a command more than 512 MB or 15 s of processor time. APR_BOMBS=all tries the long ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import bombs
import pytest

MOST_MIB, MOST_SECONDS = 512, 15
NAMES = [name for name, bomb in bombs.BOMBS.items() if not bomb.is_long or os.environ.get("APR_BOMBS") == "all"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures processes as Linux does")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    words = [sys.executable, bombs.__file__, str(tmp_path_factory.mktemp("bombs")), *NAMES]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", NAMES)
def test_a_small_file_stays_small(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    found = outcomes[name]
    assert found["code"] in bombs.BOMBS[name].codes, found
    assert found["mib"] <= MOST_MIB, found
    assert found["cpu_s"] <= MOST_SECONDS, found
    assert "internal error" not in found["said"]
