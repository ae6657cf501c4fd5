"""What the trainer's tests start does not outlive them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import train_children
from train_children import forked, started

SLEEP = ["-c", "import time; time.sleep(60)"]
STARTS = "with {maker} as child: print(child.pid, flush=True); import time; time.sleep(60)"


def ends(pid: int) -> bool:
    """Whether the process is gone, or only waits to be reaped, within some seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_a_failed_or_interrupted_test_kills_its_children() -> None:
    pids: list[int] = []

    def test(error: type[BaseException]) -> None:
        with started(SLEEP) as process, forked(lambda: time.sleep(60)) as fork:
            pids.extend((process.pid, fork.pid))
            raise error

    for error in (AssertionError, KeyboardInterrupt):
        with pytest.raises(error):
            test(error)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does it on Linux")
@pytest.mark.parametrize("maker", [f"started({SLEEP})", "forked(lambda: time.sleep(60))"])
def test_a_suite_that_is_killed_takes_its_children_with_it(maker: str) -> None:
    code = f"import time; from train_children import forked, started\n{STARTS.format(maker=maker)}"
    support = str(Path(train_children.__file__).parent)
    with started(["-c", code], PYTHONPATH=support) as suite:
        assert suite.stdout is not None
        pid = int(suite.stdout.readline())
        os.kill(pid, 0)
        suite.kill()
        assert ends(pid)
