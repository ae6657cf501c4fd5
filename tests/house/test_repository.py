"""What is in the repository is what belongs there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LARGEST = 500_000


def test_no_file_is_large() -> None:
    """A model that somebody wrote beside the code would stay in the history of every clone."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in done.stdout.decode().split("\0") if name]
    assert len(paths) > 500
    assert [str(path) for path in paths if path.is_file() and path.stat().st_size > LARGEST] == []
