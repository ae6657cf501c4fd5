"""The text of generated tokens, which arrive as bytes."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Bytes of tokens as text: no partial characters, and nothing after the first stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = [word for word in stop if word]
        self._given, self._all = 0, ""
        self.stopped = False

    @property
    def text(self) -> str:
        """The whole text so far."""
        return self._all

    def add(self, data: bytes) -> str:
        """Adds bytes; returns new text that is certain to be part of the output."""
        return self._new(self._decoder.decode(data), final=False)

    def end(self) -> str:
        """The rest."""
        return "" if self.stopped else self._new(self._decoder.decode(b"", True), final=True)

    def _new(self, text: str, *, final: bool) -> str:
        self._all += text
        found = [at for word in self._stop if (at := self._all.find(word)) >= 0]
        if found:
            self.stopped, self._all = True, self._all[: min(found)]
        # The end of the text may be the start of a stop string.
        held = 0
        if not (found or final):
            held = max(
                (n for word in self._stop for n in range(1, len(word)) if self._all.endswith(word[:n])), default=0
            )
        new = self._all[self._given : len(self._all) - held]
        self._given += len(new)
        return new
