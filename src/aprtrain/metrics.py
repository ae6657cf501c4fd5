"""What a run says of itself: a JSON line and a line of text for every logged step, never silent, never in the way."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from aprfmt.errors import CorruptError, storage_error

FILE = "metrics.jsonl"

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Recorder:
    """Appends to `metrics.jsonl` (none without a folder) and writes progress to `stream` (none when None).

    On a terminal the line of the latest step is redrawn in place; lines of logged steps stay.
    """

    def __init__(self, folder: Path | None, stream: TextIO | None = sys.stderr) -> None:
        self._path = folder / FILE if folder is not None else None
        self._stream = stream
        self._is_live = stream is not None and stream.isatty()

    def begin(self, resumed_step: int | None) -> None:
        """Empties the file, or drops what was recorded after the step that the run goes on from."""
        if self._path is None:
            return
        try:
            kept = "" if resumed_step is None else _until(self._path, resumed_step)
            temporary = self._path.with_name(f".{FILE}.tmp")
            temporary.write_text(kept)
            os.replace(temporary, self._path)
        except OSError as error:
            raise storage_error(error, self._path) from error

    def record(self, event: str, values: Mapping[str, Any]) -> None:
        """One line {"event": ..., ...}; numbers that are not finite become null."""
        if self._path is None:
            return
        line = json.dumps({"event": event, **{key: _plain(value) for key, value in values.items()}})
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:  # a full disk fails the next save, with its own words
            self.say("metrics cannot be written: the disk may be full")

    def step(self, values: Mapping[str, Any], *, is_logged: bool, total: int) -> None:
        """A step's values; to the file and as a lasting line when it is a logged one."""
        if is_logged:
            self.record("step", values)
        if self._stream is not None and (is_logged or self._is_live):
            text = line(values, total)
            self._put(f"\r{text}\x1b[K" + ("\n" if is_logged else "") if self._is_live else text + "\n")

    def say(self, text: str) -> None:
        """A line of text."""
        self._put(f"\r\x1b[K{text}\n" if self._is_live else text + "\n")

    def _put(self, text: str) -> None:
        if self._stream is not None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except OSError:  # nobody reads it any more; the training is worth more than its lines
                self._stream = None


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file. Raises CorruptError."""
    try:
        return [json.loads(text) for text in path.read_text().splitlines()]
    except ValueError as error:
        raise CorruptError("not a file of metrics", path=path) from error


def _until(path: Path, step: int) -> str:
    if not path.exists():
        return ""
    kept = []
    for text in path.read_text().splitlines():
        try:
            is_old = int(json.loads(text).get("step", 0)) <= step
        except ValueError:  # the line that a killed run was writing
            continue
        if is_old:
            kept.append(text + "\n")
    return "".join(kept)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def line(values: Mapping[str, Any], total: int) -> str:
    """`step 120/5000  loss 2.31  ...  eta 1:23:45`."""
    parts = [f"step {values['step']}/{total}", f"loss {values['loss']:.4f}"]
    if values.get("kl") is not None:
        parts += [f"ce {values['ce']:.4f}", f"kl {values['kl']:.4f}", f"agree {values['agreement']:.1%}"]
    parts += [
        f"grad {values['grad_norm']:.3g}",
        f"lr {values['lr']:.2e}",
        f"{short(values['tokens_per_s'])} tok/s",
    ]
    if values.get("mfu") is not None:
        parts.append(f"mfu {values['mfu']:.1%}")
    if values.get("utilisation") is not None:
        parts.append(f"gpu {values['utilisation']}%")
    if values.get("memory_bytes"):
        parts.append(f"{values['memory_bytes'] / 2**30:.1f} GiB")
    return "  ".join([*parts, f"eta {clock(values['eta_s'])}"])


def short(number: float) -> str:
    """Three digits and a unit: 85.2k."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def clock(seconds: float) -> str:
    """h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
