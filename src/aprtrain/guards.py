"""What stops a run that could only waste time: wrong pairs of models, a silent or idle device, a stall, a signal."""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

import torch
from torch import Tensor

from aprfmt.errors import AprError, RefusedError, RunError
from aprfmt.types import Numbers
from aprtrain.network.shape import Shape

KL_FLOOR = 1e-3
"""Nats to the teacher at step 0 below which there is nothing to learn."""

MOST_DROPPED = 1e-3
"""Mean probability on held-out text that a teacher may give to tokens that its student lacks."""

LEAST_GAIN = 1e-4
"""Share of the best held-out score by which a lower one must differ to count as better."""

_LEAST_GAIN_NATS = 1e-6  # near a score of 0, where that share is less than what rounding changes
_STALL_FACTOR = 20
_STALL_LEAST_S = 120.0  # a new shape may have to be compiled


def is_better(score: float, best: float | None) -> bool:
    """Whether a held-out score in nats, of which less is better, is lower than `best` by more than rounding changes."""
    return best is None or score < best - max(_LEAST_GAIN_NATS, LEAST_GAIN * abs(best))


def since_best(scores: Iterable[float]) -> int:
    """How many scores follow the last one that was better than those before it; 0 without scores."""
    best, since = None, 0
    for score in scores:
        best, since = (score, 0) if is_better(score, best) else (best, since + 1)
    return since


@contextmanager
def deterministic() -> Iterator[None]:
    """While the block runs, every kernel that has a deterministic form uses it, and the others fail."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# --- teacher and student ---


def check_distinct(
    teacher: Shape, student: Shape, path: str, *, allow_same_arch: bool, same_weights: Callable[[], bool]
) -> None:
    """Refuses a student that is its teacher, or might be: the same weights, or the same dims without consent.

    Weights alone cannot tell a re-quantized copy from a fine-tune, so `same_weights` is asked only after consent.
    """
    if teacher != student:
        return
    if not allow_same_arch:
        raise RefusedError(
            "teacher and student have the same dims; one may be a copy of the other, perhaps in another dtype",
            path=path,
            hint="add --allow-same-arch if the student is another model of that size",
        )
    if same_weights():
        raise RefusedError(
            "teacher and student hold the same weights",
            path=path,
            hint="there is nothing to learn; name another --student",
        )


def check_scores(scores: Numbers, n_tokens: int, *, allow_weaker: bool) -> None:
    """Stops a run whose teacher has nothing to teach, by the scores on held-out text before the first step, in nats.

    Raises RunError where the teacher gives more than MOST_DROPPED of its probability to tokens that the student lacks.
    RefusedError where the student answers as its teacher does, and for a teacher that does not know the data, as a
    damaged or random one does not: its cross entropy must be finite, below half of ln V and below the student's.
    """
    dropped, kl, ce, own = (scores[name] or 0.0 for name in ("dropped_mass", "kl", "teacher_ce", "ce"))
    bound, is_checked = math.log(n_tokens) / 2, not allow_weaker
    faults: tuple[tuple[bool, type[AprError], str, str], ...] = (
        (not dropped <= MOST_DROPPED, RunError,
            f"the teacher gives {dropped:.2%} of its probability to tokens that the student lacks; at most "
            f"{MOST_DROPPED:.1%} can be left out",
            "distil into a student that has the teacher's tokenizer, or train it on text that the teacher wrote"),
        (not kl > KL_FLOOR, RefusedError,
            f"the student's predictions equal the teacher's already: KL {kl:.2g} nats at step 0",
            "they are the same model; name another --student"),
        (not math.isfinite(ce), RefusedError, "the teacher's loss on held-out data is not finite",
            "its weights are damaged"),
        (is_checked and ce >= bound, RefusedError,
            f"the teacher predicts the held-out data badly: {ce:.2f} nats where half of ln V is {bound:.2f}",
            "check its weights, and that the data suits it; --allow-weaker-teacher continues anyway"),
        (is_checked and ce >= own, RefusedError,
            f"the teacher predicts the held-out data no better than the student: {ce:.3f} against {own:.3f} nats",
            "were they swapped? --allow-weaker-teacher continues anyway"),
    )  # fmt: skip
    for is_fault, kind, message, hint in faults:
        if is_fault:
            raise kind(message, hint=hint)


def check_resident(tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Raises RunError where a tensor lies on another device than the one that was asked for."""
    for name, tensor in tensors:
        if tensor.device != device:
            raise RunError(f"the tensor is on {tensor.device}, not on {device}", tensor=name)


# --- time ---


def tell(error: RunError) -> None:
    """The error on stderr."""
    sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))


def abort(error: RunError, tell: Callable[[RunError], object] = tell) -> None:
    """Ends the process with the error's exit code from any thread, while the main one may hang in a kernel."""
    tell(error)
    sys.stdout.flush()
    sys.stderr.flush()
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    os._exit(error.exit_code)


class _Beside:
    """Runs `watch` in a thread of its own while a `with` block runs, until `_over` is set."""

    def __init__(self, name: str, watch: Callable[[], None]) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=watch, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class Watchdog(_Beside):
    """Ends the process when a step takes longer than 20 times the median and 2 min, the first two than `first_s`.

    Use in `with`; steps run in `with watchdog.step():`. What is outside of them may take any time.
    """

    def __init__(self, first_s: float, on_stall: Callable[[RunError], None] = abort) -> None:
        self._first_s = first_s
        self._on_stall = on_stall
        self._times: deque[float] = deque(maxlen=101)
        self._began: float | None = None
        self._number = 0
        super().__init__("apr-watchdog", self._watch)

    @property
    def limit_s(self) -> float:
        """Seconds that the next step may take."""
        if not self._times:
            return self._first_s
        usual = max(_STALL_LEAST_S, _STALL_FACTOR * statistics.median(self._times))
        # The second one waits for the first, which other processes may still be compiling.
        return max(usual, self._first_s) if len(self._times) == 1 else usual

    @contextmanager
    def step(self) -> Iterator[None]:
        """Times the block."""
        self._number += 1
        self._began = start = time.monotonic()
        try:
            yield
        finally:
            self._began = None
        self._times.append(time.monotonic() - start)

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._first_s / 10)):
            began, limit = self._began, self.limit_s
            if began is not None and time.monotonic() - began > limit:
                what = "the first step of this run" if self._number == 1 else f"step {self._number} of this run"
                self._on_stall(
                    RunError(
                        f"{what} takes more than {limit:.0f} s",
                        hint="the stacks above show where it hangs; --deadline gives the first step more time",
                    )
                )
                return


# --- utilisation ---


def nvml_reader(device: torch.device) -> Callable[[], int] | None:
    """A function that gives the GPU's utilisation in percent, by NVIDIA's management library; None without it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, answer = ctypes.c_void_p(), (ctypes.c_uint * 2)()
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    name = f"GPU-{uuid}".encode()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
        return None

    def read() -> int:
        return -1 if nvml.nvmlDeviceGetUtilizationRates(handle, answer) else int(answer[0])

    return read


class Utilisation(_Beside):
    """Samples once a second; below 50 % over a minute it warns once, below 5 % the run is stopped.

    `read` gives percent, negative where it cannot tell. `wanted` is cleared while the device has a right to rest.
    """

    def __init__(
        self, read: Callable[[], int], warn: Callable[[str], None], *, window: int = 60, interval_s: float = 1.0
    ) -> None:
        self._read = read
        self._warn = warn
        self._samples: deque[int] = deque(maxlen=window)
        self._interval_s = interval_s
        self._has_warned = False
        self.wanted = threading.Event()
        super().__init__("apr-utilisation", self._watch)

    @property
    def latest(self) -> int | None:
        """Percent, averaged over the last ten samples."""
        last = list(self._samples)[-10:]
        return round(sum(last) / len(last)) if last else None

    def check(self) -> None:
        """Called once a step. Raises RunError for a device that idles."""
        samples = list(self._samples)
        if len(samples) < (self._samples.maxlen or 0):
            return
        mean = sum(samples) / len(samples)
        if mean < 5:
            raise RunError(
                f"the GPU is at {mean:.0f} % over {len(samples)} s: the work waits, or is done elsewhere",
                hint="check nvidia-smi: another process may hold the GPU",
            )
        if mean < 50 and not self._has_warned:
            self._has_warned = True
            self._warn(f"the GPU is at {mean:.0f} % over {len(samples)} s; larger --micro-tokens may help")

    def _watch(self) -> None:
        while not self._over.wait(self._interval_s):
            if self.wanted.is_set() and (value := self._read()) >= 0:
                self._samples.append(value)


# --- signals ---


class Stop:
    """Whether somebody asked the run to end: `number` is the signal's, 0 for none."""

    def __init__(self) -> None:
        self.number = 0

    def __bool__(self) -> bool:
        return self.number != 0


@contextmanager
def catch_signals(tell: Callable[[str], None] = lambda words: None) -> Iterator[Stop]:
    """A Stop that the signals set while the block runs; outside of the main thread none does.

    SIGTERM and SIGINT ask a run to end after its step, which `tell` is told of at once, in another thread; a second
    one ends it at once. SIGHUP, which says that the terminal is gone, ends no run.
    """
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

    # A handler runs when the interpreter comes to it, which a kernel may keep waiting; the byte comes at once.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def hear() -> None:
        while number := os.read(reading, 1)[0]:
            if number in before:
                tell(f"{signal.Signals(number).name}: ends after this step; a second one ends it at once")

    hearing = threading.Thread(target=hear, name="apr-signals", daemon=True)
    hearing.start()
    for n in before:
        signal.signal(n, ask)
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(wakeup)
        os.write(writing, b"\0")
        hearing.join()
        os.close(reading)
        os.close(writing)
        signal.signal(signal.SIGHUP, hang_up)
        for n, handler in before.items():
            signal.signal(n, handler)
