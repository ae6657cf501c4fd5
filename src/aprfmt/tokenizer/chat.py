"""Chat templates: a conversation as the text that a model was trained on.

A template comes with a model, so it is compiled and run in a process of its own (`tokenizer.rendering`), with limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aprfmt.errors import LimitError
from aprfmt.io.child import Child, Service
from aprfmt.limits import CHAT_MEMORY_BYTES, MAX_CHAT_CHARS, MAX_CHAT_SECONDS, MAX_TEMPLATE_CHARS
from aprfmt.tokenizer.rendering import RAW, Message, PrefixError, TemplateSyntaxError
from aprfmt.types import PathLike

__all__ = ["ChatTemplate", "Message", "PrefixError", "TemplateSyntaxError", "start"]

_MOST_BYTES = 8 * MAX_CHAT_CHARS
"""Of an answer: a character takes four bytes of UTF-8, and control characters six of JSON."""

_service = Service(
    "aprfmt.tokenizer.rendering", seconds=MAX_CHAT_SECONDS, memory=CHAT_MEMORY_BYTES, most_bytes=_MOST_BYTES
)


def start() -> None:
    """Lets the process that renders begin, so that it is ready when it is asked. Raises StorageError."""
    _service.start()


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template as the libraries of the field render it.

    Attributes:
        source: the template.
        special: role of a special token ("bos", "eos", "pad", ...) -> its text; the template has it as bos_token, ...
        name: what errors call it.
        path: the file that it comes from.
    """

    source: str
    special: Mapping[str, str] = field(default_factory=dict)
    name: str = "the chat template"
    path: PathLike | None = None
    _loaded: list[tuple[Child | None, int]] = field(default_factory=list, compare=False, repr=False)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: object) -> str:
        """The conversation as text; with the beginning of an answer at its end, or without.

        Where the template looks for the text in a list of parts, it gets it so.

        Args:
            messages: what was said, the oldest first.
            add_generation_prompt: whether the model is to answer.
            variables: what else the template is given, such as enable_thinking. JSON values.

        Raises:
            MissingDependencyError: without jinja2.
            UnsupportedError: the template is none that Jinja understands, or fails; with its line.
            RefusedError: the template says that such a conversation cannot be.
            LimitError: it exceeds MAX_CHAT_CHARS, MAX_CHAT_SECONDS or CHAT_MEMORY_BYTES.
            StorageError: no process can be started.
        """
        values = {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None, **variables}
        return str(self._ask("render", messages, values=values))

    def render_answers(
        self, messages: Sequence[Message], *, first: int = 0, tools: object = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """A whole conversation as text, and the ranges of its characters that the assistant is to write.

        Those are what the template has between `{% generation %}` and `{% endgeneration %}`. Of a template without
        such marks an answer is what the text up to its message has beyond the text before it with the beginning of an
        answer; line ends behind the mark that ends it are none of it. Where a template leaves something out of earlier
        answers, those that stand there word for word count.

        Args:
            messages: what was said, the oldest first.
            first: answers of earlier messages do not count.
            tools: what the template is told of tools. JSON values.

        Raises:
            PrefixError: the conversation up to a message is not the beginning of the whole one.
            And what `render` raises.
        """
        text, spans = self._ask("answers", messages, first=first, tools=tools)
        return text, [(start, end) for start, end in spans]

    def _ask(self, call: str, messages: Sequence[Message], **arguments: object) -> Any:
        if len(self.source) > MAX_TEMPLATE_CHARS:
            message = f"{self.name} has {len(self.source):,} characters; the limit is {MAX_TEMPLATE_CHARS:,}"
            raise LimitError(message, path=self.path, hint=RAW)
        with _service.lock:
            arguments |= {"template": self._number(), "messages": [*messages]}
            return self._value([call, arguments])

    def _value(self, request: Sequence[object]) -> Any:
        return _service.value(request, f"rendering {self.name}", path=self.path, hint=RAW)

    def _number(self) -> int:
        """The template's number in the process that runs."""
        child = _service.start()
        for loaded, number in self._loaded:
            if loaded is child:
                return number
        tokens = {f"{role}_token": text for role, text in self.special.items()}
        number = int(self._value(["load", {"source": self.source, "name": self.name, "tokens": tokens}]))
        self._loaded[:] = [(child, number)]
        return number
