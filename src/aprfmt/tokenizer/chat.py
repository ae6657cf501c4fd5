"""Chat templates: render a conversation as the text that a model was trained on.

A template comes with a model, so it is compiled and run in a separate process (`tokenizer.rendering`) with limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from aprfmt.errors import LimitError
from aprfmt.io.child import Child, Service
from aprfmt.limits import CHAT_MEMORY_BYTES, MAX_CHAT_CHARS, MAX_CHAT_SECONDS, MAX_TEMPLATE_CHARS
from aprfmt.tokenizer.rendering import RAW, Message, PrefixError, TemplateSyntaxError
from aprfmt.types import PathLike

__all__ = ["ChatTemplate", "Message", "PrefixError", "TemplateSyntaxError", "start"]

_T = TypeVar("_T")
_MOST_BYTES = 8 * MAX_CHAT_CHARS
"""Bytes of an answer: a character takes up to four bytes of UTF-8, a control character six of JSON."""

_service = Service(
    "aprfmt.tokenizer.rendering", seconds=MAX_CHAT_SECONDS, memory=CHAT_MEMORY_BYTES, most_bytes=_MOST_BYTES
)


def start() -> None:
    """Starts the rendering process early, so that it is ready when needed. Raises StorageError."""
    _service.start()


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template, rendered as transformers does.

    Attributes:
        source: the template.
        special: role of a special token ("bos", "eos", "pad", ...) -> its text; the template's bos_token, ...
        name: what errors call it.
        path: its file.
    """

    source: str
    special: Mapping[str, str] = field(default_factory=dict)
    name: str = "the chat template"
    path: PathLike | None = None
    _loaded: list[tuple[Child | None, int]] = field(default_factory=list, compare=False, repr=False)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: object) -> str:
        """Renders the conversation, optionally followed by the generation prompt.

        Content is passed as a list of parts if the template expects that.

        Args:
            messages: the conversation, oldest first.
            add_generation_prompt: append the start of the model's answer.
            variables: further template variables, such as enable_thinking. JSON values.

        Raises:
            MissingDependencyError: without jinja2.
            UnsupportedError: invalid Jinja, or the template fails; with its line.
            RefusedError: the template rejects the conversation.
            LimitError: it exceeds MAX_CHAT_CHARS, MAX_CHAT_SECONDS or CHAT_MEMORY_BYTES.
            StorageError: no process can be started.
        """
        values = {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None, **variables}
        return self._ask(str, "render", messages, values=values)

    def render_answers(
        self, messages: Sequence[Message], *, first: int = 0, tools: object = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders a whole conversation; returns its text and the character ranges that the assistant writes.

        Those are the parts between `{% generation %}` and `{% endgeneration %}`. Without such marks an answer is what
        the text up to its message adds to the text before it with the generation prompt, without line ends after the
        end mark. If a template leaves out parts of earlier answers, answers that are present verbatim count.

        Args:
            messages: the conversation, oldest first.
            first: answers of earlier messages do not count.
            tools: tool definitions for the template. JSON values.

        Raises:
            PrefixError: the text up to a message is not a prefix of the whole text.
            And what `render` raises.
        """
        text, spans = self._ask(list, "answers", messages, first=first, tools=tools)
        return text, [(start, end) for start, end in spans]

    def _ask(self, kind: type[_T], call: str, messages: Sequence[Message], **arguments: object) -> _T:
        if len(self.source) > MAX_TEMPLATE_CHARS:
            message = f"{self.name} has {len(self.source):,} characters; the limit is {MAX_TEMPLATE_CHARS:,}"
            raise LimitError(message, path=self.path, hint=RAW)
        with _service.lock:
            arguments |= {"template": self._number(), "messages": [*messages]}
            return self._value([call, arguments], kind)

    def _value(self, request: Sequence[object], kind: type[_T]) -> _T:
        return _service.value(request, kind, f"rendering {self.name}", path=self.path, hint=RAW)

    def _number(self) -> int:
        """The template's index in the running process."""
        child = _service.start()
        for loaded, number in self._loaded:
            if loaded is child:
                return number
        tokens = {f"{role}_token": text for role, text in self.special.items()}
        number = self._value(["load", {"source": self.source, "name": self.name, "tokens": tokens}], int)
        self._loaded[:] = [(child, number)]
        return number
