"""Child processes that end with the test that started them: failed, interrupted, or killed itself.

A test that fails or gets Ctrl-C kills them on its way out; where the suite is killed, the kernel does (Linux only).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Has the kernel kill this process when the one that started it ends, however that comes about."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def started(arguments: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`python ARGUMENTS` with both outputs piped, killed and reaped at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        preexec_fn=die_with_parent,  # noqa: PLW1509  (one thread forks, and only a system call follows)
    )
    with process:  # closes the pipes
        try:
            yield process
        finally:
            process.kill()


@dataclass
class Fork:
    """A copy of this process; `pid` is 0 once it is reaped."""

    pid: int
    code: int = 0

    def kill(self) -> None:
        """Ends it at once, unless it has ended."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Waits for its end: the exit code, or the negative signal."""
        if self.pid:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.pid = 0
        return self.code


@contextmanager
def forked(work: Callable[[], object]) -> Iterator[Fork]:
    """Does `work` in a fork, which has exit code 1 if it returns; killed and reaped at the end of the block."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            if os.getppid() == parent:  # it may have been killed before the kernel was asked
                work()
        finally:
            os._exit(1)
    fork = Fork(pid)
    try:
        yield fork
    finally:
        fork.kill()
        fork.wait()
