"""The suite itself ends, whatever a test does."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of pytest on `folder` with the configuration of this repository."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*words, "--rootdir", str(folder), *options, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def test_no_two_files_have_one_name() -> None:
    """Pytest imports them by it, and would leave out the second one."""
    counts = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, n in counts.items() if n > 1] == []


def test_a_worker_that_dies_ends_the_run_with_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_kill.py").write_text(
        "import os, signal\ndef test_kill(): os.kill(os.getpid(), signal.SIGSEGV)\ndef test_after(): pass\n"
    )
    for name in ("a", "b", "c"):
        (tmp_path / f"test_{name}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    code, output = run(tmp_path, "-n", "2", "--dist", "loadfile")
    assert code == 1
    assert "crashed while running 'test_kill.py::test_kill'" in output


def test_a_test_that_hangs_ends(tmp_path: Path) -> None:
    (tmp_path / "test_hang.py").write_text("import time\ndef test_hang(): time.sleep(600)\n")
    code, output = run(tmp_path, "-o", "timeout=1")
    assert code == 1
    assert "Timeout (>1.0s)" in output
    assert "1 failed" in output


def test_a_test_that_hangs_outside_python_ends_the_run_with_its_place(tmp_path: Path) -> None:
    """Tests before it do not end its watch, and the traceback is not lost in what pytest captures."""
    (tmp_path / "conftest.py").write_text(
        "import hangs\ndef pytest_configure(config): hangs.keep_stderr(config)\n"
        "def pytest_runtest_setup(): hangs.watch(2)\n"
    )
    hung = "import time\ndef test_before(): pass\ndef test_hung(): time.sleep(600)\n"
    (tmp_path / "test_hang.py").write_text(hung)
    code, output = run(tmp_path)
    assert code == 1
    assert "in test_hung" in output
