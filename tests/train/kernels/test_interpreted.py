"""Our Triton kernels on a CPU: interpreted.py in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

CASES = Path(__file__).with_name("interpreted.py")


def test_triton_kernels_by_the_interpreter(triton: Path, tmp_path: Path) -> None:
    # Variables of this run would give that process the temporary folders of this one, which it would empty.
    ours = {name: text for name, text in os.environ.items() if not name.startswith(("PYTEST_", "APR_TEST_"))}
    paths = os.pathsep.join((str(triton), ours.get("PYTHONPATH", "")))
    options = "-q", "-n", "0", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'own'}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, CASES],
        env=dict(ours, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=paths),
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
