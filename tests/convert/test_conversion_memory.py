"""--threads and --max-memory: obeyed, or refused before anything is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aprfmt
from aprfmt.convert.memory import SMALLEST_WINDOW, flow_for, peak_bytes, resident_bytes
from aprfmt.errors import RefusedError, UsageError
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import MOST_THREADS, THREAD_BYTES

MIB = 1 << 20
ALLOW = {"allow_no_config": True, "allow_unmapped": True}


def held(n_bytes: int) -> list[OutTensor]:
    return [OutTensor("t", "F32", (1,), 4, lambda: [bytes(4)], n_bytes)]


def test_a_flow_without_wishes_uses_every_processor() -> None:
    flow = flow_for(None, None, [])
    assert flow.n_workers >= 1
    assert flow_for(3, None, []).n_workers == 3
    assert peak_bytes(flow, held(500 * MIB)) - peak_bytes(flow, []) > 400 * MIB


@given(st.integers(300, 4000), st.integers(1, MOST_THREADS))
def test_a_flow_stays_within_the_memory_it_may_take(mib: int, threads: int) -> None:
    try:
        flow = flow_for(threads, mib * MIB, [])
    except RefusedError:
        assert mib * MIB < resident_bytes() + 48 * MIB + 2 * THREAD_BYTES + SMALLEST_WINDOW
        return
    assert 1 <= flow.n_workers <= threads
    assert flow.window_bytes >= SMALLEST_WINDOW
    assert peak_bytes(flow, []) <= mib * MIB + 8 * MIB  # what this process took in between


@pytest.mark.parametrize("threads", [0, -1, MOST_THREADS + 1])
def test_impossible_numbers_of_threads(threads: int) -> None:
    with pytest.raises(UsageError, match="threads"):
        flow_for(threads, None, [])


def test_too_little_memory_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    aprfmt.save_file({"w": np.ones((64, 64), np.float32)}, tmp_path / "m.apr")
    with pytest.raises(RefusedError, match="at least") as caught:
        aprfmt.convert_model(
            tmp_path / "m.apr",
            tmp_path / "o.safetensors",
            max_memory=5 * MIB,
            allow_no_config=True,
            allow_unmapped=True,
        )
    assert not (tmp_path / "o.safetensors").exists()
    assert re.fullmatch(r"raise it to --max-memory \d+MiB, or leave it out", caught.value.hint or "")


def test_the_memory_that_the_refusal_names_is_enough(tmp_path: Path) -> None:
    aprfmt.save_file({"w": np.ones((64, 64), np.float32)}, tmp_path / "m.apr")
    command = [
        sys.executable,
        "-m",
        "aprfmt",
        "convert",
        str(tmp_path / "m.apr"),
        "-o",
        str(tmp_path / "o.safetensors"),
    ]
    command += ["--allow-no-config", "--allow-unmapped", "--max-memory"]
    refused = subprocess.run([*command, "5MiB"], capture_output=True, text=True, check=False)
    assert refused.returncode == 5
    least = re.search(r"--max-memory (\d+MiB)", refused.stderr)
    assert least is not None
    assert subprocess.run([*command, least[1]], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(("typed", "unit"), [(10_000_000, "MB"), (10 << 20, "MiB"), (5_000_001, "MiB")])
def test_a_limit_is_told_in_its_unit(typed: int, unit: str) -> None:
    with pytest.raises(RefusedError, match=rf"needs at least \d+ {unit} of memory") as refused:
        flow_for(None, typed, [])
    assert re.fullmatch(rf"raise it to --max-memory \d+{unit}, or leave it out", refused.value.hint or "")
    assert typed == 5_000_001 or refused.value.message.endswith(f"allows 10 {unit}")


@pytest.mark.turns(first=False)
@pytest.mark.parametrize("dtype", ["keep", "f16", "q8_0"])
def test_a_big_model_stays_within_max_memory(tmp_path: Path, dtype: str) -> None:
    """A 320 MB matrix goes through a process that may take 200 MiB, decoded and encoded on the way."""
    source = tmp_path / "m.safetensors"
    script = (
        "import sys, numpy as np, aprfmt\n"
        "if sys.argv[1] == 'make':\n"
        "    aprfmt.save_file({'w': np.ones((10_000, 8_000), np.float32)}, sys.argv[2])\n"
        "else:\n"
        "    aprfmt.convert_model(sys.argv[2], sys.argv[3], dtype=sys.argv[4], max_memory=200 << 20,\n"
        "                         allow_no_config=True, allow_unmapped=True, fsync=False)\n"
        # ru_maxrss would count the memory of the process that started this one.
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])\n"
    )

    def run(*arguments: str) -> int:
        done = subprocess.run([sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True)
        return int(done.stdout) >> 10

    source = tmp_path / "m.apr"
    run("make", str(source))
    assert run("convert", str(source), str(tmp_path / "o.apr"), dtype) <= 200
