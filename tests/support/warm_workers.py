"""llama.cpp's workers as forks of a process that has imported what they need, which saves 0.3 s each.

    python warm_workers.py FD    serves the socket FD: reads a request with the worker's stdin, stdout, stderr and a
                                 pipe for its exit status, answers with its process id

The workers are processes of their own as elsewhere; they are not children of the process that asks for them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, NoReturn

from aprfmt.io.child import command, environment

MODULE = "aprfmt.llama.worker"
_MOST_BYTES = 1 << 20


class ForkedWorker:
    """What `Child` needs of a subprocess.Popen."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], status: int) -> None:
        self.pid, self.stdin, self.stdout, self._status = pid, stdin, stdout, status
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(MODULE, timeout or 0)
            self.returncode = int(os.read(self._status, 16) or b"-9")
            os.close(self._status)
        return self.returncode

    def kill(self) -> None:
        """Ends the process, unless it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


Start = Callable[[Sequence[str], Mapping[str, str], IO[bytes]], Any]


class WarmWorkers:
    """Starts workers by forks, other processes by `cold`, as where modules would come from other folders."""

    def __init__(self, cold: Start) -> None:
        self.cold = cold
        self._asked: socket.socket | None = None
        self._path = environment()["PYTHONPATH"]

    def start(self, words: Sequence[str], variables: Mapping[str, str], log: IO[bytes]) -> Any:
        """A process with these variables, whose standard error is `log`."""
        if list(words) != command(["-m", MODULE]) or variables["PYTHONPATH"] != self._path:
            return self.cold(words, variables, log)
        asked = self._asked or self._open()
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        status_read, status_write = os.pipe()
        given = [in_read, out_write, log.fileno(), status_write]
        socket.send_fds(asked, [json.dumps([dict(variables), sys.base_prefix]).encode() + b"\n"], given)
        for fd in (in_read, out_write, status_write):
            os.close(fd)
        return ForkedWorker(int(asked.recv(32)), os.fdopen(in_write, "wb"), os.fdopen(out_read, "rb"), status_read)

    def _open(self) -> socket.socket:
        self._asked, theirs = socket.socketpair()
        fd = theirs.fileno()
        self._process = subprocess.Popen(command([__file__, str(fd)]), pass_fds=[fd], env=environment())
        theirs.close()
        return self._asked

    def __enter__(self) -> WarmWorkers:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the process that forks; workers end when their standard input does."""
        if self._asked is not None:
            self._asked.close()
            self._process.wait()


def _serve(fd: int) -> None:
    import numpy

    from aprfmt.llama import capi, session, worker

    del numpy, capi, session, worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    asked = socket.socket(fileno=fd)
    while True:
        ready, _, _ = select.select([asked.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _reap(statuses)
        if asked.fileno() in ready:
            message, fds, _, _ = socket.recv_fds(asked, _MOST_BYTES, 4)
            if not message:
                return
            while not message.endswith(b"\n"):
                message += asked.recv(_MOST_BYTES)
            variables, folder = json.loads(message)
            pid = os.fork()
            if pid == 0:
                asked.detach()
                _become_worker(variables, folder, fds[:3])
            statuses[pid] = fds[3]
            for one in fds[:3]:
                os.close(one)
            asked.send(str(pid).encode())


def _reap(statuses: dict[int, int]) -> None:
    """Passes on how workers ended."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        fd = statuses.pop(pid)
        with suppress(BrokenPipeError):
            os.write(fd, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(fd)


def _become_worker(variables: Mapping[str, str], folder: str, fds: Sequence[int]) -> NoReturn:
    """Ends as a program does: llama.cpp's threads write their log then."""
    from aprfmt.llama import worker

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for at, fd in enumerate(fds):
        os.dup2(fd, at)
    os.closerange(3, max(fds) + 64)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    worker.main()
    raise SystemExit


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
