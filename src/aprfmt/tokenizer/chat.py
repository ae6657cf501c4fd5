"""Chat templates: a conversation as the text that a model was trained on."""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from aprfmt.errors import AprError, LimitError, MissingDependencyError, RefusedError, UnsupportedError
from aprfmt.limits import MAX_CHAT_CHARS, MAX_CHAT_SECONDS
from aprfmt.types import PathLike

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, object]
"""One turn: "role" ("system", "user", "assistant", ...) and "content", a text."""

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Around what a template marks as the assistant's, while it is rendered for its marks. No text has these characters."""

_FILE = "<template>"
"""What Jinja calls a template without a file in a traceback, whose lines are then the template's."""


class PrefixError(RefusedError):
    """A template that does not say what the assistant's part of a conversation is."""


class TemplateSyntaxError(UnsupportedError):
    """A template that Jinja cannot parse, whatever the conversation."""


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
            LimitError: the text does not end, or takes too long.
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
            tools: what the template is told of tools.

        Raises:
            PrefixError: the conversation up to a message is not the beginning of the whole one.
            And what `render` raises.
        """
        text = self.render(messages, add_generation_prompt=False, tools=tools)
        if _MARK.search(self.source):
            if OPEN in text or CLOSE in text:
                raise RefusedError(f"the conversation holds U+{ord(OPEN):X} or U+{ord(CLOSE):X}", path=self.path)
            values = {"add_generation_prompt": False, "tools": tools, "documents": None}
            marked = self._render(messages, values, marked=True)
            earlier = self._render(messages[:first], values, marked=True).count(OPEN) if first else 0
            return text, [span for span in self._marks(text, marked)[earlier:] if span[0] < span[1]]
        spans = []
        mark = self._end_mark(messages, text, tools)
        for i in range(first, len(messages)):
            if messages[i].get("role") != "assistant":
                continue
            before, content = self.render(messages[:i], tools=tools), str(messages[i].get("content") or "")
            through = text
            if i + 1 < len(messages):
                through = self.render(messages[: i + 1], add_generation_prompt=False, tools=tools)
            if text.startswith(through) and through.startswith(before) and mark is not None:
                spans.append((len(before), len(before) + len(_answer(through[len(before) :], content.strip()))))
                continue
            # The template has thoughts before the last answer alone.
            said = next(
                (s for s in (content, content.strip()) if s and text.startswith(before + s + (mark or ""))), None
            )
            if mark and said:
                spans.append((len(before), len(before) + len(said + mark)))
            else:
                raise PrefixError(
                    f"{self.name} writes a conversation otherwise when it goes on, so that what the assistant writes "
                    f"in message {i + 1} cannot be told",
                    path=self.path,
                    hint="put {% generation %} and {% endgeneration %} around it in the template, or give "
                    "conversations of one answer",
                )
        return text, [span for span in spans if span[0] < span[1]]

    def _end_mark(self, messages: Sequence[Message], text: str, tools: object) -> str | None:
        """What the template puts behind the last answer, "" where that is not seen; None where it begins another."""
        content = str(messages[-1].get("content") or "")
        if messages[-1].get("role") != "assistant" or not content.strip():
            return ""
        content = content if content in text else content.strip()
        asks = self.render(messages, tools=tools) == text  # whether an answer is to follow makes no difference
        more = [*messages, {"role": "user", "content": "?"}]
        if asks and not self.render(more, add_generation_prompt=False, tools=tools).startswith(text.rstrip()):
            return None
        return text.rpartition(content)[2].rstrip()

    def _marks(self, text: str, marked: str) -> list[tuple[int, int]]:
        """The ranges of `text` between the marks of `marked`, which is the same beside them."""
        pieces = re.split(f"[{OPEN}{CLOSE}]", marked)
        if "".join(pieces) != text or [c for c in marked if c in (OPEN, CLOSE)] != [OPEN, CLOSE] * (len(pieces) // 2):
            raise PrefixError(f"{self.name} changes the text between its generation marks", path=self.path)
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + len(piece))
        return [*zip(ends[1::2], ends[2::2], strict=False)]

    def _render(self, messages: Sequence[Message], values: Mapping[str, object], *, marked: bool = False) -> str:
        try:
            import jinja2
        except ImportError as error:
            raise MissingDependencyError(
                "chat templates need jinja2, which is not installed", hint="pip install jinja2"
            ) from error
        tokens = {f"{role}_token": text for role, text in self.special.items()}
        until = _until.set(time.monotonic() + MAX_CHAT_SECONDS)
        try:
            pieces, size = [], 0
            for piece in _compiled(self.source, marked).generate(messages=list(messages), **tokens, **values):
                size += len(piece)
                if size > MAX_CHAT_CHARS:
                    raise LimitError(f"{self.name} writes more than {MAX_CHAT_CHARS:,} characters", path=self.path)
                pieces.append(piece)
        except AprError:
            raise
        except _TooLong:
            raise LimitError(f"{self.name} takes more than {MAX_CHAT_SECONDS} s", path=self.path) from None
        except _Refusal as error:
            raise RefusedError(
                f"{self.name} refuses the conversation: {error}{_at_line(error)}",
                path=self.path,
                hint="leave out what it names, or prompt without a template: --raw",
            ) from None
        except jinja2.TemplateSyntaxError as error:
            raise self._broken(error, f" at line {error.lineno}", TemplateSyntaxError) from None
        except Exception as error:
            raise self._broken(error, _at_line(error)) from None
        finally:
            _until.reset(until)
        return "".join(pieces)

    def _broken(
        self, error: Exception, where: str, kind: type[UnsupportedError] = UnsupportedError
    ) -> UnsupportedError:
        reason = str(error) or type(error).__name__
        return kind(
            f"{self.name} cannot be rendered: {reason}{where}", path=self.path, hint="--raw prompts without a template"
        )


def _answer(text: str, content: str) -> str:
    """An answer with the mark that ends it, without the line ends behind."""
    trimmed = text.rstrip()
    return text if content and trimmed.endswith(content) else trimmed


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


_MARK = re.compile(r"\{%-?\s*generation\b")

_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
"""A format of a text with a width of four digits, or one that is an argument."""


class _Refusal(Exception):
    """The template called raise_exception."""


class _TooLong(Exception):
    """The time is over."""


_until: ContextVar[float] = ContextVar("_until")


def _in_time(values: Iterable[object]) -> Iterator[object]:
    """The same values, until the time is over."""
    until = _until.get()
    for value in values:
        if time.monotonic() > until:
            raise _TooLong
        yield value


def _joined(values: Sequence[object]) -> str:
    texts = [str(value) for value in values]
    if sum(map(len, texts)) > MAX_CHAT_CHARS:
        raise OverflowError("a text is too long")
    return "".join(texts)


@cache
def _compiled(source: str, marked: bool = False) -> jinja2.Template:
    template: jinja2.Template = _environment(marked).from_string(source)
    return template


@cache
def _environment(marked: bool) -> jinja2.Environment:
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox
    import jinja2.visitor

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what the assistant says, for training; it prints what is inside."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if not marked:
                return body

            def mark(text: str) -> jinja2.nodes.Node:
                return jinja2.nodes.Output([jinja2.nodes.TemplateData(text)], lineno=line)

            return [mark(OPEN), *body, mark(CLOSE)]

    class Bounded(jinja2.visitor.NodeTransformer):
        """Puts a bound on what a template can repeat: loops in time, texts in length."""

        def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
            self.generic_visit(node)
            node.iter = jinja2.nodes.Filter(node.iter, "_in_time", [], [], None, None, lineno=node.lineno)
            return node

        def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
            self.generic_visit(node)
            texts = jinja2.nodes.List(node.nodes, lineno=node.lineno)
            return jinja2.nodes.Filter(texts, "_joined", [], [], None, None, lineno=node.lineno)

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """Without operators that make much of little."""

        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
            found: jinja2.nodes.Template = Bounded().visit(super()._parse(source, name, filename))
            return found.set_environment(self)  # type: ignore[return-value]

        def call(self, *arguments: Any, **named: Any) -> Any:
            if time.monotonic() > _until.get():
                raise _TooLong
            return super().call(*arguments, **named)

        def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
            texts = [value for value in (left, right) if not isinstance(value, int | float)]
            if operator == "*" and texts:
                size = max((len(value) for value in texts), default=0)
                times = max((value for value in (left, right) if isinstance(value, int)), default=0)
                if size * times > MAX_CHAT_CHARS:
                    raise OverflowError("a text is repeated too often")
            elif operator == "+" and len(texts) == 2 and sum(map(len, texts)) > MAX_CHAT_CHARS:
                raise OverflowError("a text is too long")
            elif operator == "**" and abs(right) > 64:
                raise OverflowError("an exponent is too large")
            elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
                raise OverflowError("a field is too wide")
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters |= {"tojson": _to_json, "_in_time": _in_time, "_joined": _joined}
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
