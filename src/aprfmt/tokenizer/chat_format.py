"""Infers a chat template's format by rendering it: chatml, llama3, gemma, mistral, phi, ...

A Jinja template is a program, but most of them put fixed texts around messages. These texts are read off the rendering
of conversations with markers, and accepted only if they reproduce the template's output for further conversations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from aprfmt.errors import AprError, MissingDependencyError
from aprfmt.text import common_length, plural
from aprfmt.tokenizer.chat import ChatTemplate
from aprfmt.tokenizer.data import TokenizerData

Message = Mapping[str, str]
Conversation = Sequence[Message]

MAX_TEMPLATE = 1 << 18
"""Maximum size of a template that is rendered."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The texts around messages.

    Attributes:
        system, user, assistant: (before, after) the content; `system` is None if unsupported.
        folded: whether the system message is put at the start of the first user message, between the two texts of
            `system`.
        reply: the start of the answer.
        start: the start of a conversation, besides BOS.
        default: the system message of a conversation without one; None if missing.
    """

    user: tuple[str, str]
    assistant: tuple[str, str]
    reply: str
    system: tuple[str, str] | None = None
    folded: bool = False
    start: str = ""
    default: str | None = None

    def render(self, conversation: Conversation) -> str:
        """Renders a conversation for the model to answer."""
        out, pending = self.start, None
        messages = list(conversation)
        if self.default is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.default})
        for message in messages:
            content = message["content"]
            if message["role"] == "system" and self.system is not None:
                if self.folded:
                    pending = self.system[0] + content + self.system[1]
                else:
                    out += self.system[0] + content + self.system[1]
            elif message["role"] == "user":
                out += self.user[0] + (pending or "") + content + self.user[1]
                pending = None
            else:
                out += self.assistant[0] + content + self.assistant[1]
        return out + self.reply


def find_format(tokenizer: TokenizerData) -> tuple[ChatFormat | None, str]:
    """The format of the tokenizer's chat template; if unknown, the reason, a clause.

    Raises MissingDependencyError without jinja2.
    """
    template = template_of(tokenizer)
    if template is None:
        return None, "the model has no chat template"
    if len(template.source) > MAX_TEMPLATE:
        return None, f"the chat template has {len(template.source)} characters"
    try:
        render = _Renderer(template, tokenizer)
        found = _read_off(render)
        wrong = sum(render(talk) != found.render(talk) for talk in _probes(found.system is not None)) if found else 0
    except _Failure as error:
        return None, str(error)
    if found is None:
        return None, "the chat template does more than wrap messages in fixed text"
    return (found, "") if not wrong else (None, f"the template renders {plural(wrong, 'conversation')} differently")


class _Failure(Exception):
    """The template does not render a conversation."""


def template_of(tokenizer: TokenizerData) -> ChatTemplate | None:
    """The tokenizer's template; None without one, or if it only names one of llama.cpp's."""
    template = tokenizer.chat_template
    if template is None or "{" not in template:
        return None
    return ChatTemplate(template, {role: _text_of(tokenizer, role) for role in ("bos", "eos", "unk", "pad")})


class _Renderer:
    """The tokenizer's template."""

    def __init__(self, template: ChatTemplate, tokenizer: TokenizerData) -> None:
        self._template = template
        self._bos = ""
        # A BOS that the tokenizer adds is not part of the template; one that begins each message is.
        bos = template.special["bos"]
        if bos and tokenizer.flags.get("add_bos") is not False:
            self._bos = bos if self(_talk(_U, _A, _V)).count(bos) == 1 else ""

    def __call__(self, conversation: Conversation, *, reply: bool = True) -> str:
        """Renders the conversation, without BOS. Raises _Failure."""
        try:
            text = self._template.render(conversation, add_generation_prompt=reply)
        except MissingDependencyError:
            raise
        except AprError as error:
            raise _Failure(error.message) from error
        return text.removeprefix(self._bos)


def _text_of(tokenizer: TokenizerData, role: str) -> str:
    i = tokenizer.special.get(role)
    return tokenizer.tokens[i] if i is not None and i < len(tokenizer.tokens) else ""


def _talk(*turns: str, system: str | None = None) -> Conversation:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _probes(has_system: bool) -> list[Conversation]:
    """Conversations that the format must reproduce."""
    turns = ("Who are you?", "I am a model.\n\nAsk me!", "1 + 1 = ?", "2", "Café, 你好 {{ x }} <b>")
    systems = [None, "Be brief.\nBe kind."] if has_system else [None]
    return [_talk(*turns[:n], system=system) for n in (1, 3, 5) for system in systems]


_U, _A, _V, _S = "QuserQ", "QassistantQ", "QagainQ", "QsystemQ"


def _read_off(render: _Renderer) -> ChatFormat | None:
    """The texts around the markers, if they are the same for all messages."""
    start, first, between, end = _cut(render(_talk(_U, _A, _V)), _U, _A, _V)
    closed = _cut(render(_talk(_U, _A), reply=False), _A)[1]
    before_user = between.removeprefix(closed)
    if not (between.startswith(closed) and start.endswith(before_user)):  # the end of a text is not that of a message
        before_user = _TAIL.sub("", start[len(start) - common_length(start[::-1], between[::-1]) :])
        closed = between[: len(between) - len(before_user)]
    # A user message ends like an answer, or like a final answer.
    plain = _cut(render(_talk(_U, _A, _V), reply=False), _V)[1]
    ends = (closed, plain, first[: common_length(first, end)])
    plain = next(text for text in ends if first.startswith(text) and end.startswith(text) and (text or text == ends[2]))
    around = before_user, plain
    beginning = start[: len(start) - len(before_user)]
    found = ChatFormat(around, (first.removeprefix(plain), closed), end.removeprefix(plain), start=beginning)
    try:
        before, behind, *_ = _cut(render(_talk(_U, _A, _V, system=_S)), _S, _U, _A, _V)
    except _Failure:
        return found
    return _with_system(found, before, behind)


_TAIL = re.compile(r"^[^<\[]*[>\]]")
"""The remainder of a truncated tag."""


def _with_system(found: ChatFormat, before: str, behind: str) -> ChatFormat | None:
    """The format with the texts around a system message; None if they do not match."""
    start, before_user = found.start, found.user[0]
    if before.startswith(start + before_user):
        inner = before.removeprefix(start + before_user)
        if not behind.endswith(before_user) or not before_user:
            return replace(found, system=(inner, behind), folded=True)
    if not behind.endswith(before_user):
        return None
    system = before, behind[: len(behind) - len(before_user)]
    if start and start.startswith(system[0]) and start.endswith(system[1]) and len(start) >= len(before + system[1]):
        default = start[len(system[0]) : len(start) - len(system[1])]
        return replace(found, system=system, start="", default=default)
    return replace(found, system=(before.removeprefix(start), system[1])) if before.startswith(start) else None


def _cut(text: str, *marks: str) -> list[str]:
    """The texts between the markers, each of which must occur once. Raises _Failure."""
    out = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            raise _Failure("the chat template drops or repeats a message")
        out.append(before)
    return [*out, text]
