"""What is in the repository is what belongs there."""

from __future__ import annotations

import subprocess
import tomllib
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


def test_hints_name_packages_that_an_index_has() -> None:
    """An extra of a package that is installed from a clone or a wheel is no requirement that pip can find."""
    sources = [path for path in (ROOT / "src").rglob("*.py") if "aprfmt[" in path.read_text(encoding="utf-8")]
    assert sources == []


def test_every_extra_is_documented_and_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    readme = (ROOT / "README.md").read_text()
    for extra in project["optional-dependencies"].keys() - {"test", "dev", "docs"}:
        assert f"\n| `{extra}` | " in readme, f"README.md does not document the extra {extra}"
