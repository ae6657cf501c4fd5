"""The child's side of `child.Service`: answers requests about untrusted data, within limits.

It imports little, since a user waits for it to start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable

EXIT_MEMORY = 77
"""Exit status of a child that reached its memory limit."""

_REFILL = 1 / 40
"""The fraction of the time budget that each further request restores."""


def has_limits() -> bool:
    """Whether the operating system limits processor time; elsewhere the parent's clock is the only limit."""
    return hasattr(signal, "setitimer")


def serve(answer: Callable[[list[object]], object]) -> None:
    """Answers the JSON lines of stdin until it closes; SECONDS, BYTES and BYTE_SECONDS are arguments of the process.

    A request may take SECONDS of processor time, plus BYTE_SECONDS per byte. Overdrawn time is missing from the next
    requests, which restore a fortieth each: many slow requests end the process just as an endless one does. The process
    exits with EXIT_MEMORY when it runs out of memory, and dies of SIGPROF when it runs out of time.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the parent ends this one
    seconds, memory, byte_seconds = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _limit_memory(memory)
    left = seconds
    try:
        for line in sys.stdin.buffer:
            left = min(seconds, left + seconds * _REFILL)
            if has_limits():
                signal.setitimer(signal.ITIMER_PROF, left + byte_seconds * len(line))
            reply = json.dumps(answer(json.loads(line)), ensure_ascii=False).encode("utf-8", "surrogatepass")
            if has_limits():
                left = signal.setitimer(signal.ITIMER_PROF, 0)[0]
            replies.write(reply + b"\n")
            replies.flush()
    except MemoryError:
        os._exit(EXIT_MEMORY)
    except BrokenPipeError:
        os._exit(0)


def _limit_memory(n_bytes: int) -> None:
    """Limits address space and core dumps; macOS and Windows do not enforce the first."""
    try:
        import resource
    except ImportError:
        return
    for kind, most in ((resource.RLIMIT_AS, n_bytes), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        try:
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        except (ValueError, OSError):  # macOS refuses less than what is already mapped
            continue
