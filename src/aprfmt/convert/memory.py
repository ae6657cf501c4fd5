"""Memory of a conversion: an estimate, and a flow within a limit."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from aprfmt.errors import RefusedError, UsageError
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import CHUNK_BYTES, MOST_THREADS, THREAD_BYTES, WINDOW_BYTES, Flow
from aprfmt.text import format_limit

SMALLEST_WINDOW = 4 * CHUNK_BYTES


LATER_BYTES = 48 << 20
"""Memory needed only while writing: numpy, codecs, allocator overhead."""


_MARGIN = 4
"""Safety margin: memory use varies slightly between processes."""


def resident_bytes() -> int:
    """Memory of this process now, in bytes."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1 << 10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_bytes(flow: Flow, tensors: Iterable[OutTensor]) -> int:
    """Peak memory of writing `tensors` with `flow`, in bytes."""
    return flow.memory_bytes + _fixed(tensors)


def flow_for(threads: int | None, max_memory: int | None, tensors: Iterable[OutTensor]) -> Flow:
    """The flow of a conversion of `tensors`: `threads` of them (None: one per CPU), in `max_memory` bytes.

    Uses fewer threads and a smaller window to stay within the limit. Raises UsageError for an invalid number of
    threads, RefusedError if not even one thread fits.
    """
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"{threads} threads", hint=f"use --threads 1 to {MOST_THREADS}")
    flow = Flow(threads or 0)
    if max_memory is None:
        return flow
    room = max_memory - _fixed(tensors)
    smallest = Flow(1, SMALLEST_WINDOW).memory_bytes
    if room < smallest:
        unit = 10**6 if max_memory % 10**6 == 0 and max_memory % (1 << 20) else 1 << 20
        least = format_limit((-(-(max_memory - room + smallest) // unit) + _MARGIN) * unit)
        raise RefusedError(
            f"the conversion needs at least {least} of memory, but --max-memory allows {format_limit(max_memory)}",
            hint=f"raise it to --max-memory {least.replace(' ', '')}, or leave it out",
        )
    per_thread = THREAD_BYTES + CHUNK_BYTES
    n = min(flow.n_workers, (room - SMALLEST_WINDOW) // per_thread)
    return Flow(n, min(WINDOW_BYTES, room - n * per_thread))


def _fixed(tensors: Iterable[OutTensor]) -> int:
    """Memory that does not depend on the flow: the process, and the largest tensor that must be held whole."""
    return resident_bytes() + LATER_BYTES + max((t.held_bytes for t in tensors), default=0)
