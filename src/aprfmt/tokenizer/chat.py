"""Chat templates: a conversation as the text that a model was trained on."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from aprfmt.errors import AprError, LimitError, MissingDependencyError, RefusedError, UnsupportedError
from aprfmt.limits import MAX_CHAT_CHARS
from aprfmt.types import PathLike

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, object]
"""One turn: "role" ("system", "user", "assistant", ...) and "content", a text."""

_FILE = "<template>"
"""What Jinja calls a template without a file in a traceback, whose lines are then the template's."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template as the libraries of the field render it. It runs in a sandbox: it comes with a model.

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

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: object) -> str:
        """The conversation as text; with the beginning of an answer at its end, or without.

        Where the template looks for the text in a list of parts, it gets it so.

        Args:
            messages: what was said, the oldest first.
            add_generation_prompt: whether the model is to answer.
            variables: what else the template is given, such as enable_thinking.

        Raises:
            MissingDependencyError: without jinja2.
            UnsupportedError: the template is none that Jinja understands, or fails; with its line.
            RefusedError: the template says that such a conversation cannot be.
            LimitError: the text does not end.
        """
        values = {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None, **variables}
        text = self._render(messages, values)
        last = messages[-1].get("content") if messages else None
        if isinstance(last, str) and last.strip() and last.strip() not in text:
            parts = [_in_parts(message) for message in messages]
            try:
                typed = self._render(parts, values)
            except AprError:
                return text
            return typed if last.strip() in typed else text
        return text

    def _render(self, messages: Sequence[Message], values: Mapping[str, object]) -> str:
        try:
            import jinja2
        except ImportError as error:
            raise MissingDependencyError(
                "chat templates need jinja2, which is not installed", hint="pip install jinja2"
            ) from error
        tokens = {f"{role}_token": text for role, text in self.special.items()}
        try:
            pieces, size = [], 0
            for piece in _compiled(self.source).generate(messages=list(messages), **tokens, **values):
                size += len(piece)
                if size > MAX_CHAT_CHARS:
                    raise LimitError(f"{self.name} writes more than {MAX_CHAT_CHARS:,} characters", path=self.path)
                pieces.append(piece)
        except AprError:
            raise
        except _Refusal as error:
            raise RefusedError(
                f"{self.name} refuses the conversation: {error}{_at_line(error)}",
                path=self.path,
                hint="leave out what it names, or prompt without a template: --raw",
            ) from None
        except jinja2.TemplateSyntaxError as error:
            raise self._broken(error, f" at line {error.lineno}") from None
        except Exception as error:
            raise self._broken(error, _at_line(error)) from None
        return "".join(pieces)

    def _broken(self, error: Exception, where: str) -> UnsupportedError:
        reason = str(error) or type(error).__name__
        return UnsupportedError(
            f"{self.name} cannot be rendered: {reason}{where}", path=self.path, hint="--raw prompts without a template"
        )


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _at_line(error: BaseException) -> str:
    """Where in the template an exception arose."""
    lines, frame = [], error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == _FILE:
            lines.append(frame.tb_lineno)
        frame = frame.tb_next
    return f" at line {lines[-1]}" if lines else ""


_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
"""A format of a text with a width of four digits, or one that is an argument."""


class _Refusal(Exception):
    """The template called raise_exception."""


@cache
def _compiled(source: str) -> jinja2.Template:
    template: jinja2.Template = _environment().from_string(source)
    return template


@cache
def _environment() -> jinja2.Environment:
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what the assistant says, for training; it prints what is inside."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """Without operators that make much of little."""

        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
            texts = [value for value in (left, right) if not isinstance(value, int | float)]
            if operator == "*" and texts:
                size = max((len(value) for value in texts), default=0)
                times = max((value for value in (left, right) if isinstance(value, int)), default=0)
                if size * times > MAX_CHAT_CHARS:
                    raise OverflowError("a text is repeated too often")
            elif operator == "**" and abs(right) > 64:
                raise OverflowError("an exponent is too large")
            elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
                raise OverflowError("a field is too wide")
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter of this name escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
