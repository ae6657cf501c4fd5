"""How much of the machine a conversion takes: threads and memory, planned before it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from aprfmt.errors import RefusedError, UsageError
from aprfmt.formats.out import OutTensor
from aprfmt.io.pipe import CHUNK_BYTES, MOST_THREADS, THREAD_BYTES, WINDOW_BYTES, Flow

SMALLEST_WINDOW = 4 * CHUNK_BYTES
LATER_BYTES = 48 << 20
"""What loads only while writing: numpy, codecs, parts of the allocator that stay unused."""


_MARGIN_MIB = 4
"""A process started anew takes a little more or less."""


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
    """The flow of a conversion of `tensors`: `threads` of them (None: one a processor), in `max_memory` bytes.

    Fewer threads and a smaller window are taken where memory asks for it. Raises UsageError for a number of
    threads that cannot be, RefusedError where not even one thread fits.
    """
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"{threads} threads", hint=f"--threads takes 1 to {MOST_THREADS}")
    flow = Flow(threads or 0)
    if max_memory is None:
        return flow
    room = max_memory - _fixed(tensors)
    smallest = Flow(1, SMALLEST_WINDOW).memory_bytes
    if room < smallest:
        least = -(-(max_memory - room + smallest) // (1 << 20)) + _MARGIN_MIB
        raise RefusedError(
            f"the conversion needs at least {least} MiB of memory, but --max-memory allows {max_memory >> 20} MiB",
            hint=f"--max-memory {least}MiB, or leave it out",
        )
    per_thread = THREAD_BYTES + CHUNK_BYTES
    n = min(flow.n_workers, (room - SMALLEST_WINDOW) // per_thread)
    return Flow(n, min(WINDOW_BYTES, room - n * per_thread))


def _fixed(tensors: Iterable[OutTensor]) -> int:
    """What is held whatever the flow: the process as it is, and the largest tensor that has to be in memory whole."""
    return resident_bytes() + LATER_BYTES + max((t.held_bytes for t in tensors), default=0)
