"""Logs of a run: a JSON line per step; for people a line for several steps, or a panel on a terminal.

It never stops a run: what cannot be written or shown is skipped.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import NotRequired, TextIO, TypedDict, cast

from aprfmt.errors import storage_errors
from aprfmt.inspection.run_report import FILE
from aprfmt.io.pipe import FileLayout, Literal, WriteOptions, write_file
from aprfmt.text import MAX_PERPLEXITY, format_clock, format_number, format_setting
from aprfmt.types import Json, JsonObject, Numbers
from aprtrain.report.tracker import Track, open_tracker

# Environment variables that may affect a run or its speed; none contains a secret.
_TELLING = ("APR_", "CUDA_", "CUBLAS_", "NCCL_", "PYTORCH_", "TORCH", "TRITON_", "OMP_", "MKL_", "WORLD_SIZE")


class SampledValues(TypedDict, total=False):
    """Metrics of a step that learns from the student's own continuations; the last three only if it sampled."""

    sampled_tokens: int
    sampler_age: int
    sampler_seconds: float
    sampler_tokens_per_s: float
    sampler_share: float


class StepValues(SampledValues):
    """Metrics of a step: losses in nats are means over its labels; None without a teacher or a GPU."""

    step: int
    loss: float
    ce: float
    kl: float | None
    kl1: float | None
    agreement: float | None
    teacher_entropy: float | None
    grad_norm: float
    lr: float
    labels: int
    tokens: int
    seconds: float
    tokens_per_s: float
    eta_s: float
    student_tflops: float
    mfu: float | None
    utilisation: int | None
    memory_bytes: int | None
    teacher_tflops: NotRequired[float]
    aligned: NotRequired[float]
    hidden: NotRequired[float]


_OF_LABELS, _OF_STEPS = ("loss", "ce", "kl", "kl1", "agreement", "teacher_entropy"), ("grad_norm", "seconds", "mfu")


def mean_of(steps: Sequence[StepValues]) -> StepValues:
    """Averages consecutive steps: the last one's values, with means over all their labels, or steps."""
    values = steps[-1].copy()
    means, rows = cast(Numbers, values), cast(Sequence[Numbers], steps)
    has_labels = any(step["labels"] for step in steps)
    for name in (*_OF_LABELS, *_OF_STEPS):
        found = [(value, row["labels"] or 0) for row in rows if (value := row[name]) is not None]
        weights = [n for _, n in found] if name in _OF_LABELS and has_labels else None
        means[name] = fmean([value for value, _ in found], weights) if found else None
    # Each had the same number of tokens.
    values["tokens_per_s"] = harmonic_mean([step["tokens_per_s"] for step in steps])
    values["eta_s"] *= values["seconds"] / max(steps[-1]["seconds"], 1e-9)
    return values


class Recorder:
    """Appends to `metrics.jsonl` (none without a folder) and writes progress to `stream` (None: none).

    On a terminal it draws a panel of the latest step in place and prints other lines above it; elsewhere it prints a
    line for the steps since the last one. Thread-safe.
    """

    def __init__(self, folder: Path | None, stream: TextIO | None = sys.stderr) -> None:
        self._path = folder / FILE if folder is not None else None
        self._stream = stream
        self._panel = Panel(stream) if stream is not None and fits(stream) else None
        self._lock = threading.RLock()
        self._logged_at = time.monotonic()
        self._track: Track | None = None

    def begin(
        self, resumed_step: int | None, damaged: Sequence[Mapping[str, object]] = (), config: JsonObject | None = None
    ) -> None:
        """Truncates the file, or drops what was recorded after the step from which the run resumes.

        `damaged` are newer checkpoints that it could not resume from: `step` and `reason`. Steps and scores also go to
        the configuration's `log_to`, with the configuration.
        """
        if self._path is None:
            return
        with storage_errors(self._path):
            kept = "" if resumed_step is None else _until(self._path, resumed_step)
        write_file(str(self._path), FileLayout(FILE, [Literal(kept.encode())]), WriteOptions(force=True))
        here = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_TELLING)}
        resumed = resumed_step is not None
        facts = {"step": resumed_step or 0, "resumed": resumed, "damaged": list(damaged), "environment": here}
        self.record("begin", facts)
        if config is not None and isinstance(config["log_to"], str):
            self._track = open_tracker(config["log_to"], self._path.parent, config, resumed_step)

    def record(self, event: str, values: Mapping[str, object]) -> None:
        """Writes one line {"event": ..., "time": seconds since 1970, ...}; non-finite numbers become null."""
        if event != "step":
            self._show(lambda panel: panel.event(event, values))
        if self._path is None:
            return
        plain = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in values.items()}
        text = json.dumps({"event": event, "time": round(time.time(), 3), **plain})
        try:
            with self._lock, open(self._path, "a", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError:  # a full disk makes the next save fail, with its own message
            self.log("metrics cannot be written: the disk may be full")
        if self._track is not None:
            try:
                self._track(event, plain)
            except Exception as error:  # of a library that training does not depend on
                self._track = None
                self.log(f"--log-to failed and is now off: {type(error).__name__}: {error}")

    def step(self, values: StepValues, *, total: int, mean: StepValues | None = None) -> None:
        """Records a step, in the file and the panel; `mean` is printed as a line without a panel."""
        self.record("step", values)
        if self._panel is not None:
            self._show(lambda panel: panel.step(values, total))
        elif mean is not None:
            self.log(line(mean, total))

    def doing(self, words: str) -> None:
        """Shows a long activity other than steps ("": none): in the panel, elsewhere as an occasional line."""
        if self._panel is not None:
            self._panel.doing = words
            self._show(lambda panel: panel.draw(always=not words))
        elif words and time.monotonic() - self._logged_at >= _RARELY_S:
            self.log(words)

    def notice(self, words: str) -> None:
        """Shows a notice until the end: in the panel immediately, elsewhere as a line."""
        if self._panel is not None:
            self._panel.notice = words
            self._show(lambda panel: panel.draw(always=True))
        else:
            self.log(words)

    def log(self, text: str) -> None:
        """Prints a line of text."""
        if self._panel is not None:
            self._show(lambda panel: panel.above(text))
        else:
            self._put(text + "\n")

    def _show(self, draw: Callable[[Panel], str]) -> None:
        """Writes the output of `draw` to the stream."""
        panel = self._panel
        if panel is not None:
            with self._lock:
                self._put(draw(panel))

    def _put(self, text: str) -> None:
        if self._stream is None or not text:
            return
        self._logged_at = time.monotonic()
        try:
            with self._lock:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone; the training matters more than its lines
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


# --- what people see ---

_INTERVAL_S = 0.125  # at most eight redraws per second, and the last one
_RARELY_S = 20.0  # between lines about a long activity
_HISTORY = 240  # values in a sparkline
_CELLS = 12  # columns of a sparkline
_RECENT = 20  # steps from which the remaining time is estimated
_LEVELS = "▁▂▃▄▅▆▇█"
_GAP = "   "

Segment = tuple[str, str]
"""Text segments with their colour code ("" for none)."""


def line(values: StepValues, total: int) -> str:
    """`step 120/5000  loss 2.31  ...  eta 1:23:45`."""
    parts = [f"step {values['step']}/{total}", f"loss {values['loss']:.4f}"]
    if values["kl1"] is not None:
        parts += [f"ce {values['ce']:.4f}", f"kl {values['kl1']:.4f}", f"agree {values['agreement']:.1%}"]
    if "aligned" in values:
        parts.append(f"aligned {values['aligned']:.1%}")
    if "hidden" in values:
        parts.append(f"hidden {values['hidden']:.4f}")
    parts += [
        f"grad {values['grad_norm']:.3g}",
        f"lr {values['lr']:.2e}",
        f"{format_number(values['tokens_per_s'])} tok/s",
        *_device(values),
    ]
    return "  ".join([*parts, f"eta {format_clock(values['eta_s'])}"])


def scores_text(scores: Numbers) -> str:
    """`ce 2.1000  perplexity 8.1662  ...`; a perplexity that is too large to compare is left out: see `ce`."""
    shown = {name: value for name, value in scores.items() if isinstance(value, float) and name != "best"}
    if shown.get("perplexity", 0.0) > MAX_PERPLEXITY:
        del shown["perplexity"]
    return "  ".join(f"{name} {value:.4f}" for name, value in shown.items())


def settings_table(values: Mapping[str, Json], defaults: Mapping[str, Json]) -> list[str]:
    """Lines of a table of the options that differ from their defaults, and the number of the others."""
    changed = [name for name, value in values.items() if value != defaults.get(name)]
    rows = [("option", "value", "default")]
    rows += [(name, format_setting(values[name]), format_setting(defaults.get(name))) for name in changed]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = [f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows]
    return [*lines, f"  {len(values) - len(changed)} other options have their defaults"]


def _losses_of(values: StepValues) -> dict[str, float | None]:
    """The shown losses by label; the KL is that at temperature 1, as in evaluations."""
    return {"loss": values["loss"], "kl": values["kl1"], "ce": values["ce"]}


def _device(values: StepValues) -> Iterator[str]:
    if values["mfu"] is not None:
        yield f"mfu {values['mfu']:.1%}"
    if values["utilisation"] is not None:
        yield f"gpu {values['utilisation']}%"
    if values["memory_bytes"]:
        yield f"{values['memory_bytes'] / 2**30:.1f} GiB"


def _spark(values: Sequence[float]) -> str:
    """A sparkline of `values` with at most the maximum number of characters, each the mean of its part."""
    n = min(_CELLS, len(values))
    means = [fmean(values[len(values) * i // n : len(values) * (i + 1) // n]) for i in range(n)]
    if not means:
        return ""
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_LEVELS[min(7, int(8 * (mean - low) / span))] for mean in means)


def fits(stream: TextIO) -> bool:
    """Whether `stream` is a terminal on which a panel can be redrawn."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


class Panel:
    """Renders the panel, "" if it was just drawn; knows how many of its lines are on the screen.

    Attributes:
        doing, notice: the current activity, and the permanent notice; "": none.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._colours = not os.environ.get("NO_COLOR")
        encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "")
        self._unicode = encoding.startswith("utf")
        self._values: StepValues | None = None
        self._total = 0
        self._history: dict[str, deque[float]] = {n: deque(maxlen=_HISTORY) for n in ("loss", "kl", "ce")}
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._scores: Mapping[str, object] = {}
        self._saved: tuple[object, float] | None = None
        self._failed = 0
        self.doing = self.notice = ""
        self._shown = 0
        self._drawn_at = -math.inf

    def step(self, values: StepValues, total: int) -> str:
        """Updates the panel with a step."""
        self._values, self._total = values, total
        self._seconds.append(values["seconds"])
        for name, value in _losses_of(values).items():
            kept = self._history[name]
            if value is not None and math.isfinite(value):
                kept.append(value)
        return self.draw()

    def event(self, event: str, values: Mapping[str, object]) -> str:
        """Updates the panel with an evaluation, a checkpoint, a failed save, or the end, which is always drawn."""
        if event == "evaluation":
            self._scores = values
        elif event == "checkpoint":
            self._saved = values["step"], time.monotonic()
        elif event == "failed_save":
            self._failed += 1
        if event in ("end", "error"):
            self.doing = self.notice = ""
        return self.draw(always=event == "end")

    def above(self, text: str) -> str:
        """Prints a line of text above the panel."""
        gone = self._back() + "\x1b[J"
        self._shown = 0
        return f"{gone}{text}\n{self.draw()}"

    def draw(self, *, always: bool = False) -> str:
        """Redraws the panel, at most every eighth of a second unless `always`."""
        now = time.monotonic()
        if now - self._drawn_at < _INTERVAL_S and not always:
            return ""
        columns, rows = _size(self._stream)
        values, news = self._values, iter([(self.notice, "33"), (self.doing, "36")])
        if values is not None:
            parts = [self._progress(values, columns), news, self._losses(values), self._speed(values), self._results()]
        elif self.notice or self.doing or self._shown:
            parts = [news]
        else:
            return ""
        self._drawn_at = now
        lines = [text for segments in parts if (text := self._fit(segments, columns - 1))][: max(1, rows - 1)]
        drawn = self._back() + "".join(f"{text}\x1b[K\n" for text in lines) + "\x1b[J"
        self._shown = len(lines)
        return drawn

    def _back(self) -> str:
        return f"\x1b[{self._shown}F" if self._shown else "\r"

    def _fit(self, segments: Iterator[Segment], columns: int) -> str:
        """As many segments as fit into `columns`, in order; at least the first one, truncated."""
        out, used = "", 0
        for words, colour in segments:
            if not words:
                continue
            gap = _GAP if used else ""
            if used and used + len(gap) + len(words) > columns:
                continue
            words = words[:columns]
            used += len(gap) + len(words)
            out += gap + (f"\x1b[{colour}m{words}\x1b[0m" if colour and self._colours else words)
        return out

    def _progress(self, values: StepValues, columns: int) -> Iterator[Segment]:
        step, total = values["step"], self._total
        share = min(1.0, step / total) if total else 1.0
        yield f"step {step:,}/{total:,}", "1"
        yield f"eta {format_clock((total - step) * fmean(self._seconds))}", ""
        width = min(40, columns - 50)
        if width >= 8:
            full = round(share * width)
            bar = "█" * full + "░" * (width - full)
            yield (bar if self._unicode else "#" * full + "." * (width - full)), "36"
        yield f"{share:.1%}", ""

    def _losses(self, values: StepValues) -> Iterator[Segment]:
        for name, value in _losses_of(values).items():
            if name == "loss" or values["kl1"] is not None:
                curve = _spark(list(self._history[name])) if self._unicode else ""
                yield f"{name} {value:.4f} {curve}".rstrip(), "32" if name == "loss" else ""
        if values["agreement"] is not None:
            yield f"agree {values['agreement']:.1%}", ""

    def _speed(self, values: StepValues) -> Iterator[Segment]:
        yield f"{format_number(values['tokens_per_s'])} tok/s", ""
        for words in _device(values):
            yield words, ""
        yield f"lr {values['lr']:.2e}", "2"
        yield f"grad {values['grad_norm']:.3g}", "2"

    def _results(self) -> Iterator[Segment]:
        if self._failed:
            yield f"failed saves: {self._failed}", "31"
        scores = self._scores
        if scores:
            found = [f"{n} {scores[n]:.4f}" for n in ("kl", "ce") if scores.get(n) is not None]
            yield f"held-out at {scores['step']:,}: {' '.join(found)}", ""
        if self._saved is not None:
            step, when = self._saved
            yield f"checkpoint {step:,}, {format_clock(time.monotonic() - when)} ago", ""


def _size(stream: TextIO) -> tuple[int, int]:
    """Columns and rows of the terminal."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):  # ValueError: a stream without a file
        columns, rows = shutil.get_terminal_size((80, 24))
    return columns or 80, rows or 24
