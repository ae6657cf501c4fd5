"""Renders chat templates: `python -m aprfmt.tokenizer.rendering` is the process in which they run.

A template is an untrusted program. It runs in a Jinja sandbox, within process limits on memory and time, set by
`tokenizer.chat`, whose requests `_answer` handles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, NoReturn

from aprfmt.errors import AprError, LimitError, MissingDependencyError, RefusedError, UnsupportedError
from aprfmt.io.serving import serve
from aprfmt.limits import MAX_CHAT_CHARS

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, object]
"""A message: "role" ("system", "user", "assistant", ...) and "content", a text."""

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Markers around the assistant's parts while a template is rendered for them. No text contains these characters."""

_FILE = "<template>"
"""Jinja's file name in tracebacks of a template without a file; the lines are then the template's."""

_MARK = re.compile(r"\{%-?\s*generation\b")


class PrefixError(RefusedError):
    """The assistant's parts of a conversation cannot be determined from the template."""


class TemplateSyntaxError(UnsupportedError):
    """A template that Jinja cannot parse."""


class Template:
    """A compiled template.

    Args:
        source: the template.
        name: what errors call it.
        tokens: special tokens, by template variable (bos_token, ...).
    """

    def __init__(self, source: str, name: str, tokens: Mapping[str, str]) -> None:
        self.source, self.name, self.tokens = source, name, tokens

    def render(self, messages: Sequence[Message], values: Mapping[str, object]) -> str:
        """Renders the conversation; content is passed in parts if the template requires it. Raises AprError."""
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

    def answers(self, messages: Sequence[Message], first: int, tools: object) -> tuple[str, list[tuple[int, int]]]:
        """See `ChatTemplate.render_answers`."""
        text = self._of(messages, tools, reply=False)
        if _MARK.search(self.source):
            if OPEN in text or CLOSE in text:
                raise RefusedError(f"the conversation contains U+{ord(OPEN):X} or U+{ord(CLOSE):X}")
            values = _values(tools, reply=False)
            marked = self._render(messages, values, marked=True)
            earlier = self._render(messages[:first], values, marked=True).count(OPEN) if first else 0
            return text, [span for span in self._marks(text, marked)[earlier:] if span[0] < span[1]]
        spans = []
        mark = self._end_mark(messages, text, tools)
        for i in range(first, len(messages)):
            if messages[i].get("role") != "assistant":
                continue
            before, content = self._of(messages[:i], tools), str(messages[i].get("content") or "")
            through = text
            if i + 1 < len(messages):
                through = self._of(messages[: i + 1], tools, reply=False)
            if text.startswith(through) and through.startswith(before) and mark is not None:
                spans.append((len(before), len(before) + len(_answer_in(through[len(before) :], content.strip()))))
                continue
            # The template keeps reasoning only before the last answer.
            own = next(
                (s for s in (content, content.strip()) if s and text.startswith(before + s + (mark or ""))), None
            )
            if mark and own:
                spans.append((len(before), len(before) + len(own + mark)))
            else:
                raise PrefixError(
                    f"{self.name} renders earlier messages differently as a conversation grows, so the assistant's "
                    f"text in message {i + 1} cannot be located",
                    hint="wrap it in {% generation %} and {% endgeneration %} in the template, or use single-answer "
                    "conversations",
                )
        return text, [span for span in spans if span[0] < span[1]]

    def _of(self, messages: Sequence[Message], tools: object, *, reply: bool = True) -> str:
        return self.render(messages, _values(tools, reply=reply))

    def _end_mark(self, messages: Sequence[Message], text: str, tools: object) -> str | None:
        """What the template puts after the last answer, "" if unknown; None if it begins another."""
        content = str(messages[-1].get("content") or "")
        if messages[-1].get("role") != "assistant" or not content.strip():
            return ""
        content = content if content in text else content.strip()
        asks = self._of(messages, tools) == text  # independent of a following answer
        more = [*messages, {"role": "user", "content": "?"}]
        if asks and not self._of(more, tools, reply=False).startswith(text.rstrip()):
            return None
        return text.rpartition(content)[2].rstrip()

    def _marks(self, text: str, marked: str) -> list[tuple[int, int]]:
        """The ranges of `text` between the markers of `marked`, which is otherwise equal."""
        pieces = re.split(f"[{OPEN}{CLOSE}]", marked)
        if "".join(pieces) != text or [c for c in marked if c in (OPEN, CLOSE)] != [OPEN, CLOSE] * (len(pieces) // 2):
            raise PrefixError(f"{self.name} changes the text between its generation tags")
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
        try:
            pieces, size = [], 0
            for piece in _compiled(self.source, marked).generate(messages=[*messages], **self.tokens, **values):
                size += len(piece)
                if size > MAX_CHAT_CHARS:
                    raise LimitError(f"{self.name} renders more than {MAX_CHAT_CHARS:,} characters", hint=RAW)
                pieces.append(piece)
        except (AprError, MemoryError):
            raise
        except _Refusal as error:
            raise RefusedError(
                f"{self.name} rejects the conversation: {error}{_at_line(error)}",
                hint="remove what it rejects, or prompt without a template: --raw",
            ) from None
        except jinja2.TemplateSyntaxError as error:
            raise self._broken(error, f" at line {error.lineno}", TemplateSyntaxError) from None
        except Exception as error:
            raise self._broken(error, _at_line(error)) from None
        return "".join(pieces)

    def _broken(
        self, error: Exception, where: str, kind: type[UnsupportedError] = UnsupportedError
    ) -> UnsupportedError:
        reason = str(error) or type(error).__name__
        return kind(f"{self.name} cannot be rendered: {reason}{where}", hint=RAW)


RAW = "--raw prompts without a template"


def _values(tools: object, *, reply: bool) -> dict[str, object]:
    return {"add_generation_prompt": reply, "tools": tools, "documents": None}


def _answer_in(text: str, content: str) -> str:
    """An answer with its end mark, without the line ends after it."""
    trimmed = text.rstrip()
    return text if content and trimmed.endswith(content) else trimmed


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _at_line(error: BaseException) -> str:
    """The template line of an exception."""
    lines, frame = [], error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == _FILE:
            lines.append(frame.tb_lineno)
        frame = frame.tb_next
    return f" at line {lines[-1]}" if lines else ""


class _Refusal(Exception):
    """The template called raise_exception."""


@cache
def _compiled(source: str, marked: bool) -> jinja2.Template:
    template: jinja2.Template = _environment(marked).from_string(source)
    return template


@cache
def _environment(marked: bool) -> jinja2.Environment:
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's text for training; it renders its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if not marked:
                return body

            def mark(text: str) -> jinja2.nodes.Node:
                return jinja2.nodes.Output([jinja2.nodes.TemplateData(text)], lineno=line)

            return [mark(OPEN), *body, mark(CLOSE)]

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
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
    import datetime

    return datetime.datetime.now().strftime(form)


# --- the process ---

_templates: list[Template] = []
"""Templates received so far, which requests reference by index."""


def _answer(request: list[object]) -> object:
    """The reply to [call, arguments]: {"ok": value}, or {"error": [class, message, hint]}."""
    call, arguments = request
    assert isinstance(arguments, dict)
    try:
        return {"ok": _CALLS[call](**arguments)}
    except AprError as error:
        return {"error": [type(error).__name__, error.message, error.hint]}


def _load(source: str, name: str, tokens: dict[str, str]) -> int:
    _templates.append(Template(source, name, tokens))
    return len(_templates) - 1


def _render(template: int, messages: list[Message], values: dict[str, object]) -> str:
    return _templates[template].render(messages, values)


def _answers(template: int, messages: list[Message], first: int, tools: object) -> object:
    return _templates[template].answers(messages, first, tools)


_CALLS: dict[object, Callable[..., object]] = {"load": _load, "render": _render, "answers": _answers}


def _main() -> None:
    with suppress(ImportError):  # reported by the first answer
        _environment(False)  # while the parent does something else
    serve(_answer)


if __name__ == "__main__":
    _main()
