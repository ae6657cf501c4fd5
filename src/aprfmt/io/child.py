"""Python child processes: all are started here, answer JSON lines, and have limits on time, memory and output.

A child imports from the same places as this process, but never from the current folder: that may contain a stranger's
`torch/`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, TypeVar

import aprfmt
from aprfmt.errors import LimitError, StorageError, error_class
from aprfmt.io.serving import EXIT_MEMORY, has_limits
from aprfmt.types import Json, JsonObject, PathLike

_T = TypeVar("_T")

_SECONDS_TO_END = 5.0
_SLACK = 6
"""Wall-clock seconds allowed per processor second, on a machine that is busy with other work."""
_LAST_LINE = 300


class ChildDiedError(Exception):
    """A child process ended before it answered; the message says how.

    Attributes:
        log: its standard error.
        late: whether it was killed for taking too long.
        full: whether it reached its memory limit.
        seconds: processor time that a Service allowed for the request.
    """

    def __init__(self, how: str, log: str, *, late: bool = False, full: bool = False) -> None:
        super().__init__(how)
        self.log, self.late, self.full, self.seconds = log, late, full, 0.0


def search_path() -> list[str]:
    """`sys.path` of a child: absolute entries, without the current folder unless this package is imported from it."""
    with suppress(OSError):
        here = os.getcwd()
        own = os.path.dirname(os.path.dirname(os.path.abspath(aprfmt.__file__)))
        return [entry for entry in sys.path if os.path.isabs(entry) and (entry == own or not _is_same(entry, here))]
    return [entry for entry in sys.path if os.path.isabs(entry)]


def _is_same(entry: str, folder: str) -> bool:
    with suppress(OSError):
        return os.path.samefile(entry, folder)
    return False


def command(arguments: Sequence[str], *, site: bool = True) -> list[str]:
    """The command line of a child; without `site` it starts in half the time and runs no .pth files."""
    return [sys.executable, *(() if site else ("-S",)), *arguments]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child and of its own children, which import from `search_path` only; `more` is added."""
    places = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(search_path())}
    return {**os.environ, **places, **(more or {})}


def run(arguments: Sequence[str], seconds: float) -> str | None:
    """Runs a child with these arguments; returns its standard output, None if it fails or takes too long."""
    try:
        done = subprocess.run(
            command(arguments), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False,
            env=environment(), cwd=sys.base_prefix,
        )  # fmt: skip
    except (subprocess.TimeoutExpired, OSError, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None


def _start(words: Sequence[str], variables: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=log, env=variables, cwd=sys.base_prefix)


class Child:
    """A process that answers each JSON line with a JSON line. Its working folder is that of the Python installation.

    Args:
        arguments: for Python, such as ["-m", "aprfmt.llama.worker"]; paths among them are absolute.
        more: additional environment variables.
        site: whether Python imports `site`, which packages with .pth files need.
        most_bytes: the longest answer accepted; None: any.

    Raises:
        StorageError: the process cannot be started.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        more: Mapping[str, str] | None = None,
        *,
        site: bool = True,
        most_bytes: int | None = None,
    ) -> None:
        self._saying = threading.Lock()
        self._most_bytes = most_bytes
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = _start(command(arguments, site=site), environment(more), self._log)
        except OSError as error:
            self._log.close()
            raise StorageError(f"cannot start a Python process: {error.strerror}", path=sys.executable) from error
        self._kill_timer = _KillTimer(self._process.kill)

    def ask(self, request: object, seconds: float, on_part: Callable[[Json], None] | None = None) -> JsonObject:
        """Sends a request and returns the answer; calls `on_part` with each partial answer before it.

        Raises ChildDiedError, also if the child sends nothing for `seconds` and is killed.
        """
        return self.ask_in_text(json.dumps(request, default=str), seconds, on_part)

    def ask_in_text(self, text: str, seconds: float, on_part: Callable[[Json], None] | None = None) -> JsonObject:
        """Like `ask`, for a request that is already JSON text on one line."""
        while True:
            with self._kill_timer.limit(seconds):
                if text:
                    self._say(text)
                    text = ""
                line = self._line(seconds)
            answer: JsonObject = json.loads(line.decode("utf-8", "surrogatepass"))
            if "part" not in answer:
                return answer
            if on_part is not None:
                on_part(answer["part"])

    def say(self, line: str) -> None:
        """Sends a line that gets no answer."""
        self._say(line)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._saying:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline(-1 if self._most_bytes is None else self._most_bytes)
        if line.endswith(b"\n"):
            return line
        if len(line) == self._most_bytes:
            raise ChildDiedError(f"returned more than {self._most_bytes} bytes", "", full=True)
        raise self._death(seconds)

    def _death(self, seconds: float) -> ChildDiedError:
        code = self._process.wait()
        late = self._kill_timer.is_over or (code < 0 and -code == getattr(signal, "SIGPROF", 0))
        how = f"was killed after {seconds:g} s without a response" if late else f"died ({_ending(code)})"
        return ChildDiedError(how, self.log(), late=late, full=code == EXIT_MEMORY)

    def log(self) -> str:
        """The child's standard error; waits for a child that is about to exit."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        return self.written()

    def written(self) -> str:
        """What the child has written to stderr so far."""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        self._log.seek(0, os.SEEK_END)
        return text

    def close(self) -> None:
        """Kills the process."""
        self._kill_timer.close()
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a request that it did not read
                pipe.close()
        self._process.wait()
        self._log.close()


class _KillTimer:
    """Kills a process that takes too long to answer; one thread serves all answers."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end, self._changed = end, threading.Condition()
        self._until: float | None = None
        self._idle = self._closed = False
        self._thread: threading.Thread | None = None
        self.is_over = False

    def limit(self, seconds: float) -> _KillTimer:
        """A context manager: the block ends within `seconds`, or the process is killed."""
        with self._changed:
            self._until = time.monotonic() + seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            elif self._idle:
                self._changed.notify()
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._until = None

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                until = self._until
                if until is None:
                    self._idle = True
                    self._changed.wait()
                    self._idle = False
                elif (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    self.is_over = True
                    self._end()
                    return

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()


def _ending(code: int) -> str:
    try:
        return str(signal.Signals(-code).name)
    except ValueError:
        return f"exit status {code}"


class Service:
    """Handles untrusted data in a child with limits; starts it on first use and again after its death.

    One child serves all threads of this process in turn; hold `lock` for requests that belong together.

    Args:
        module: a module that runs `serving.serve`.
        seconds: processor time of one request; see `serving.serve`.
        memory: bytes of the child's address space (Linux).
        most_bytes: the longest answer.
        byte_seconds: additional processor time per byte of a request.
        more: additional environment variables.
    """

    def __init__(
        self,
        module: str,
        *,
        seconds: float,
        memory: int,
        most_bytes: int,
        byte_seconds: float = 0.0,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self._module, self._seconds, self._memory, self._most_bytes = module, seconds, memory, most_bytes
        self._byte_seconds, self._more = byte_seconds, more
        self.lock = threading.RLock()
        self._child: Child | None = None
        self._pid = 0

    @property
    def child(self) -> Child | None:
        """The running child of this process; one that was started before a fork belongs to the parent."""
        return self._child if self._pid == os.getpid() else None

    def start(self) -> Child:
        """Starts the child unless it runs, without waiting for it. Raises StorageError."""
        if self.child is None:
            import atexit

            arguments = ["-m", self._module, *map(str, (self._seconds, self._memory, self._byte_seconds))]
            self._child = Child(arguments, self._more, site=False, most_bytes=self._most_bytes)
            self._pid = os.getpid()
            atexit.unregister(self.close)
            atexit.register(self.close)
        assert self._child is not None
        return self._child

    def ask(self, request: object) -> JsonObject:
        """Sends a request and returns the answer. Raises ChildDiedError, StorageError."""
        text = json.dumps(request, default=str)
        seconds = self._seconds + self._byte_seconds * len(text)
        with self.lock:
            try:
                return self.start().ask_in_text(text, seconds * (_SLACK if has_limits() else 1))
            except BaseException as error:  # what it still sends belongs to no other request
                self.close()
                if isinstance(error, ChildDiedError):
                    error.seconds = seconds
                raise

    def value(
        self, request: object, kind: type[_T], task: str, *, path: PathLike | None = None, hint: str | None = None
    ) -> _T:
        """Sends a request and returns the value in the answer, which is of type `kind`.

        Raises the error that the child answers with, LimitError if it dies or exceeds its time or memory during `task`
        ("reading the pickle"), and StorageError.
        """
        try:
            answer = self.ask(request)
        except ChildDiedError as death:
            raise LimitError(self._reason(death, task), path=path, hint=hint) from None
        if isinstance(error := answer.get("error"), list):
            name, message, own_hint = error
            tensor = answer.get("tensor")
            raise error_class(str(name))(
                str(message), path=path, tensor=None if tensor is None else str(tensor),
                hint=None if own_hint is None else str(own_hint),
            )  # fmt: skip
        found = answer["ok"]
        assert isinstance(found, kind), f"{task}: {type(found).__name__} instead of {kind.__name__}"
        return found

    def _reason(self, death: ChildDiedError, task: str) -> str:
        if death.late:
            return f"{task} takes more than {death.seconds:.3g} s"
        if death.full or "memory allocation" in death.log:
            return f"{task} takes more than {self._memory >> 20} MiB of memory"
        line = last_line(death.log)
        return f"{task} failed: its process {death}" + (f": {line}" if line else "")

    def close(self) -> None:
        """Kills the child."""
        if (child := self.child) is not None:
            self._child = None
            child.close()


def last_line(log: str) -> str:
    """The last non-empty line of a child's log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:_LAST_LINE] if lines else ""
