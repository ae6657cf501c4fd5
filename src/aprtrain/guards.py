"""Guards that stop a run early: mismatched models, a hung or idle device, stalls, signals."""

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
"""KL to the teacher in nats at step 0 below which teacher and student count as the same model."""

MOST_DROPPED = 1e-3
"""Maximum mean probability, on held-out text, of teacher tokens that the student lacks."""

LEAST_GAIN = 1e-4
"""Minimum relative improvement over the best held-out score."""

_LEAST_GAIN_NATS = 1e-6  # minimum absolute improvement: near a score of 0 the relative one is below rounding errors
_STALL_FACTOR = 20
_WINDOW, _INTERVAL_S = 60, 1.0  # number of samples of the GPU's utilization, and seconds between two


def is_better(score: float, best: float | None) -> bool:
    """Whether a held-out score in nats (lower is better) is below `best` by more than rounding errors."""
    return best is None or score < best - max(_LEAST_GAIN_NATS, LEAST_GAIN * abs(best))


def since_best(scores: Iterable[float]) -> int:
    """Number of scores since the last improvement; 0 without scores."""
    best, since = None, 0
    for score in scores:
        best, since = (score, 0) if is_better(score, best) else (best, since + 1)
    return since


@contextmanager
def deterministic() -> Iterator[None]:
    """Makes torch use deterministic algorithms inside the block; operations without one raise."""
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
    """Refuses a student with the teacher's weights, or with its dimensions unless `allow_same_arch`.

    Comparing weights cannot distinguish a requantized copy from a fine-tune, so equal dimensions need consent first.
    """
    if teacher != student:
        return
    if not allow_same_arch:
        raise RefusedError(
            "teacher and student have the same dimensions; one may be a copy of the other, perhaps in a different "
            "dtype",
            path=path,
            hint="add --allow-same-arch --allow-weaker-teacher if the student is a different model of that size; the "
            "second option accepts a teacher that predicts the data no better: leave it out for one that is trained",
        )
    if same_weights():
        raise RefusedError("teacher and student have the same weights", path=path, hint="choose another --student")


def check_scores(scores: Numbers, n_tokens: int, *, allow_weaker: bool, is_qat: bool = False) -> None:
    """Checks the held-out scores before the first step: the teacher must be better than the student.

    Raises RunError if the teacher gives more than MOST_DROPPED of its probability to tokens that the student lacks,
    RefusedError if the student already matches the teacher, or if the teacher predicts the data badly (damaged or
    random weights): its cross entropy must be finite, below ln(V) / 2 and below the student's. A student of --qat may
    be close to the teacher from the start.
    """
    dropped, kl, ce, own = (scores[name] or 0.0 for name in ("dropped_mass", "kl", "teacher_ce", "ce"))
    bound, is_enforced = math.log(n_tokens) / 2, not allow_weaker
    faults: tuple[tuple[bool, type[AprError], str, str], ...] = (
        (not dropped <= MOST_DROPPED, RunError,
            f"the teacher assigns {dropped:.2%} of its probability to tokens that the student lacks; the limit is "
            f"{MOST_DROPPED:.1%}",
            "--vocab-policy aligned, or a student with the teacher's tokenizer"),
        (not is_qat and not kl > KL_FLOOR, RefusedError,
            f"the student's predictions already equal the teacher's: KL {kl:.2g} nats at step 0",
            "they are probably the same model; choose another --student"),
        (not math.isfinite(ce), RefusedError, "the teacher's loss on held-out data is not finite",
            "its weights may be damaged"),
        (is_enforced and ce >= bound, RefusedError,
            f"the teacher predicts the held-out data badly: cross entropy {ce:.2f} nats, limit ln(V)/2 = {bound:.2f}",
            "check its weights and the data, or add --allow-weaker-teacher"),
        (is_enforced and not is_qat and ce >= own, RefusedError,
            f"the teacher predicts the held-out data no better than the student: {ce:.3f} and {own:.3f} nats",
            "check that teacher and student are not swapped, or add --allow-weaker-teacher"),
    )  # fmt: skip
    for is_fault, kind, message, hint in faults:
        if is_fault:
            raise kind(message, hint=hint)


def check_resident(tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Raises RunError if a tensor is not on `device`."""
    for name, tensor in tensors:
        if tensor.device != device:
            raise RunError(f"the tensor is on {tensor.device}, not on {device}", tensor=name)


# --- time ---


def tell(error: RunError) -> None:
    """Writes the error to stderr."""
    sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))


def abort(error: RunError, tell: Callable[[RunError], object] = tell) -> None:
    """Exits with the error's exit code from any thread, even if the main thread hangs in a kernel."""
    tell(error)
    sys.stdout.flush()
    sys.stderr.flush()
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    os._exit(error.exit_code)


class Watchdog:
    """Calls `on_stall` if a step takes longer than 20 times the median and `least_s`; limit of the first: `first_s`.

    The second step has the larger of both limits. Any step may have to compile a new shape, hence `least_s`; 0: only
    the first is limited. Run each step in `with watchdog.step():`. Time between steps is free.
    """

    def __init__(self, first_s: float, on_stall: Callable[[RunError], None] = abort, *, least_s: float = 120.0) -> None:
        self._first_s, self._least_s = first_s, least_s or math.inf
        self._on_stall = on_stall
        self._times: deque[float] = deque(maxlen=101)
        self._number = 0

    @property
    def limit_s(self) -> float:
        """Time limit of the next step in seconds."""
        if not self._times:
            return self._first_s
        usual = max(self._least_s, _STALL_FACTOR * statistics.median(self._times))
        # Other processes may still be compiling during the second step.
        return max(usual, self._first_s) if len(self._times) == 1 else usual

    @contextmanager
    def step(self) -> Iterator[None]:
        """Times the block."""
        self._number += 1
        start, limit = time.monotonic(), self.limit_s
        timer = threading.Timer(min(limit, threading.TIMEOUT_MAX), self._tell, (self._number, limit))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        self._times.append(time.monotonic() - start)

    def _tell(self, number: int, limit: float) -> None:
        what = "the first step of this run" if number == 1 else f"step {number} of this run"
        self._on_stall(
            RunError(
                f"{what} takes more than {limit:.0f} s",
                hint="the stack traces show where it hangs; increase --deadline or --step-deadline",
            )
        )


# --- utilisation ---


def nvml_reader(device: torch.device) -> Callable[[], int] | None:
    """A function that returns the GPU's utilisation in percent from NVML; None if NVML is unavailable."""
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


class UtilizationMonitor:
    """Samples GPU utilisation once a second; warns once below 50 % over a minute, stops the run below `least` %.

    `read` returns percent, or a negative number on failure. `wanted` is cleared while the GPU may be idle.
    """

    def __init__(self, read: Callable[[], int], warn: Callable[[str], None], *, least: float = 5.0) -> None:
        self._read, self._least = read, least
        self._warn = warn
        self._samples: deque[int] = deque(maxlen=_WINDOW)
        self._has_warned = False
        self.wanted = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="apr-utilisation", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def latest(self) -> int | None:
        """Percent, averaged over the last ten samples."""
        last = list(self._samples)[-10:]
        return round(sum(last) / len(last)) if last else None

    def check(self) -> None:
        """Call once per step. Raises RunError if the device is idle."""
        samples = list(self._samples)
        if len(samples) < _WINDOW:
            return
        mean = sum(samples) / len(samples)
        if mean < self._least:
            raise RunError(
                f"the GPU is idle: {mean:.0f} % utilization over {len(samples)} s",
                hint="check nvidia-smi: another process may block the GPU; --min-utilization 0 turns this check off",
            )
        if mean < 50 and not self._has_warned:
            self._has_warned = True
            self._warn(f"GPU utilization is {mean:.0f} % over {len(samples)} s; a larger --micro-tokens may help")

    def _watch(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            if self.wanted.is_set() and (value := self._read()) >= 0:
                self._samples.append(value)


# --- signals ---


class Stop:
    """Whether a signal asked the run to stop; `number` is the signal's, else 0."""

    def __init__(self) -> None:
        self.number = 0

    def __bool__(self) -> bool:
        return self.number != 0


class EvaluationStopped(RunError):
    """A signal ended an evaluation between two batches."""


@contextmanager
def catch_signals(tell: Callable[[str], None] = lambda words: None) -> Iterator[Stop]:
    """A Stop that SIGTERM and SIGINT set inside the block; only in the main thread.

    The first signal stops the run after the current step or batch of an evaluation and is reported through `tell` at
    once, from another thread; a second one ends the process. SIGHUP is ignored: a run outlives its terminal.
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

    # Python runs signal handlers between bytecodes, which a long kernel delays; the wakeup fd is written at once.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def hear() -> None:
        while number := os.read(reading, 1)[0]:
            if number in before:
                tell(f"{signal.Signals(number).name}: stopping after this step; send it again to quit at once")

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
