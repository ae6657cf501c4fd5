"""What a run says of itself: a JSON line and a line of text for every logged step, never silent, never in the way."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NotRequired, TextIO, TypedDict

from aprfmt.errors import storage_errors
from aprtrain.report.live import Panel, fits, line

FILE = "metrics.jsonl"
METADATA = "distillation_metadata.json"

# Variables that may decide what a run does or how fast; none of them holds a secret.
_TELLING = ("APR_", "CUDA_", "CUBLAS_", "NCCL_", "PYTORCH_", "TORCH", "TRITON_", "OMP_", "MKL_", "WORLD_SIZE")


Numbers = dict[str, float | None]
"""Measured numbers by name; None for one that was not measured. JSON data."""


class StepValues(TypedDict):
    """What a step says of itself: losses in nats are means over its labels; None without a teacher or a GPU."""

    step: int
    loss: float
    ce: float
    kl: float | None
    kl1: float | None
    agreement: float | None
    teacher_entropy: float | None
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    tokens_per_s: float
    eta_s: float
    student_tflops: float
    mfu: float | None
    utilisation: int | None
    memory_bytes: int | None
    teacher_tflops: NotRequired[float]


class Recorder:
    """Appends to `metrics.jsonl` (none without a folder) and writes progress to `stream` (none when None).

    On a terminal a panel of the latest step is drawn in place and other lines stay above it; elsewhere every logged
    step is a line. Several threads may use it.
    """

    def __init__(self, folder: Path | None, stream: TextIO | None = sys.stderr) -> None:
        self._path = folder / FILE if folder is not None else None
        self._stream = stream
        self._panel = Panel(stream) if stream is not None and fits(stream) else None
        self._lock = threading.RLock()

    def begin(self, resumed_step: int | None) -> None:
        """Empties the file, or drops what was recorded after the step that the run continues from."""
        if self._path is None:
            return
        with storage_errors(self._path):
            kept = "" if resumed_step is None else _until(self._path, resumed_step)
            temporary = self._path.with_name(f".{FILE}.tmp")
            temporary.write_text(kept)
            os.replace(temporary, self._path)
        here = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_TELLING)}
        resumed = resumed_step is not None
        self.record("begin", {"step": resumed_step or 0, "resumed": resumed, "environment": here})

    def record(self, event: str, values: Mapping[str, object]) -> None:
        """One line {"event": ..., "time": seconds since 1970, ...}; numbers that are not finite become null."""
        if event != "step":
            self._show(lambda panel: panel.event(event, values))
        if self._path is None:
            return
        plain = {key: _plain(value) for key, value in values.items()}
        text = json.dumps({"event": event, "time": round(time.time(), 3), **plain})
        try:
            with self._lock, open(self._path, "a", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError:  # a full disk fails the next save, with its own words
            self.say("metrics cannot be written: the disk may be full")

    def step(self, values: StepValues, *, is_logged: bool, total: int) -> None:
        """A step's values; to the file, and as a line where there is no panel, when it is a logged one."""
        if is_logged:
            self.record("step", values)
        if self._panel is not None:
            self._show(lambda panel: panel.step(values, total))
        elif is_logged:
            self.say(line(values, total))

    def say(self, text: str) -> None:
        """A line of text."""
        if self._panel is not None:
            self._show(lambda panel: panel.above(text))
        else:
            self._put(text + "\n")

    def _show(self, draw: Callable[[Panel], str]) -> None:
        """Writes what `draw` makes of the panel."""
        panel = self._panel
        if panel is not None:
            with self._lock:
                self._put(draw(panel))

    def _put(self, text: str) -> None:
        if self._stream is None or not text:
            return
        try:
            with self._lock:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError):  # nobody reads it any more; the training is worth more than its lines
            self._stream = self._panel = None


def _until(path: Path, step: int) -> str:
    if not path.exists():
        return ""
    kept = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            is_old = json.loads(text).get("step", 0) <= step
        except (ValueError, TypeError, AttributeError, RecursionError):  # what a killed run was writing
            continue
        if is_old:
            kept.append(text + "\n")
    return "".join(kept)


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
