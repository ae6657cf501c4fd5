"""A bar counted in bytes, with rate and ETA: on stderr, only on a terminal, never with --json or --quiet."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from aprfmt.cli.output import out, printable, shorten, width
from aprfmt.text import format_bytes, format_seconds

_INTERVAL_S = 0.1
_BAR_COLUMNS = 24


class Bar:
    """Use in a `with` block; `progress` is what the conversion functions take as `progress` (None: no bar)."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._total = 0
        self._done = 0
        self._start = 0.0
        self._drawn = 0.0

    @property
    def progress(self) -> Callable[[int], Callable[[int, str], None]] | None:
        """Called with the total bytes, gives advance(n_bytes, label)."""
        return self._begin if out.mode == "human" and out.error_stream.isatty() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn:
            out.error_stream.write("\r\x1b[2K")
            out.error_stream.flush()

    def _begin(self, total: int) -> Callable[[int, str], None]:
        self._total, self._done, self._start = total, 0, time.monotonic()
        return self._advance

    def _advance(self, n_bytes: int, label: str) -> None:
        self._done += n_bytes
        now = time.monotonic()
        if now - self._drawn >= _INTERVAL_S:
            self._drawn = now
            out.error_stream.write("\r" + self.render(now, label)[: width() - 1] + "\x1b[K")
            out.error_stream.flush()

    def render(self, now: float, label: str) -> str:
        """The line at time `now` (of time.monotonic)."""
        elapsed = max(now - self._start, 1e-9)
        share = min(1.0, self._done / self._total) if self._total else 1.0
        filled = round(share * _BAR_COLUMNS)
        rate = self._done / elapsed
        left = format_seconds((self._total - self._done) / rate) if rate and share < 1 else "0 s"
        text = (
            f"{self._verb} {'█' * filled}{'░' * (_BAR_COLUMNS - filled)} {share:4.0%} "
            f"{format_bytes(self._done)}/{format_bytes(self._total)} {format_bytes(rate)}/s {left}"
        )
        room = width() - len(text) - 3
        return f"{text}  {shorten(printable(label), room)}" if label and room >= 12 else text
