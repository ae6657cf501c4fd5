"""A conversation with a model, which forgets the oldest messages when the context is full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aprfmt.llama.engine import Sampling
from aprfmt.running.generate import Runner, RunResult, require_unicode, with_markers
from aprfmt.types import PathLike

_SHARE, _MOST = 4, 512
"""The fraction of the context reserved for an answer, and its limit."""


@dataclass(slots=True)
class Conversation:
    """A conversation.

    Attributes:
        runner: the model.
        system: system message; None: none.
        max_tokens, sampling, stop: as for Runner.answer.
        turns: messages of the user and the assistant, oldest first.
    """

    runner: Runner
    system: str | None = None
    max_tokens: int | None = None
    sampling: Sampling | None = None
    stop: Sequence[str] = ()
    turns: list[dict[str, str]] = field(default_factory=list)
    _media: list[list[PathLike]] = field(default_factory=list)
    _unspelled: int = 0
    """Tokens reserved for an image or audio."""

    def ask(
        self,
        text: str,
        *,
        media: Sequence[PathLike] = (),
        on_text: Callable[[str], None] | None = None,
        on_drop: Callable[[int], None] | None = None,
    ) -> RunResult:
        """Answers a message; both are remembered. Raises AprError, and then forgets the message.

        Args:
            text: the message.
            media: its image and audio files.
            on_text: called with each piece of the answer.
            on_drop: called with the number of oldest messages dropped because the context is full.
        """
        require_unicode(text)
        before = len(self.turns)
        self.turns.append({"role": "user", "content": with_markers(text, len(media))})
        self._media.append([*media])
        try:
            prompt, dropped = self._fitting()
            before -= dropped
            if dropped and on_drop is not None:
                on_drop(dropped)
            found = self.runner.answer(
                prompt, max_tokens=self.max_tokens, sampling=self.sampling, stop=self.stop,
                media=[path for paths in self._media for path in paths], reuse=True, on_text=on_text,
            )  # fmt: skip
        except BaseException:
            del self.turns[max(before, 0) :], self._media[max(before, 0) :]
            raise
        self._unspelled = found.prompt_tokens - len(self.runner.ids(prompt)) if any(self._media) else 0
        self.turns.append({"role": "assistant", "content": found.text})
        self._media.append([])
        return found

    def reset(self) -> None:
        """Clears the conversation, except the system message."""
        self.turns.clear()
        self._media.clear()

    def _fitting(self) -> tuple[str, int]:
        """The prompt, and the number of oldest messages dropped to leave room for an answer."""
        n_ctx = self.runner.llama.facts.n_ctx
        reserve = min(_MOST, n_ctx // _SHARE)
        dropped = 0
        while True:
            system = [{"role": "system", "content": self.system}] if self.system else []
            prompt = self.runner.chat_text([*system, *self.turns])
            spelled = len(self.runner.ids(prompt))
            if len(self.turns) < 3 or spelled + self._unspelled + reserve <= n_ctx:
                return prompt, dropped
            # A question is dropped with its answer.
            del self.turns[:2], self._media[:2]
            self._unspelled = self._unspelled if any(self._media) else 0
            dropped += 2
