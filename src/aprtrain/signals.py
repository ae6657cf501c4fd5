"""SIGTERM and SIGINT ask a run to end after its step; a second one ends it at once.

SIGHUP, which says that the terminal is gone, ends no run.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether somebody asked the run to end: `number` is the signal's, 0 for none."""

    def __init__(self) -> None:
        self.number = 0

    def __bool__(self) -> bool:
        return self.number != 0


@contextmanager
def catch_signals() -> Iterator[Stop]:
    """A Stop that the signals set while the block runs; outside of the main thread none does."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def ask(number: int, frame: FrameType | None) -> None:
        stop.number = number
        for n, handler in before.items():
            signal.signal(n, handler)

    for n in before:
        signal.signal(n, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGHUP, hang_up)
        for n, handler in before.items():
            signal.signal(n, handler)
