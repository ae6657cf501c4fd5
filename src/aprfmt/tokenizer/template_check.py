"""Checks a chat template before it is written: it must render two conversations."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from aprfmt.errors import AprError, MissingDependencyError, RefusedError
from aprfmt.tokenizer.chat import ChatTemplate, Message
from aprfmt.tokenizer.chat_format import template_of
from aprfmt.tokenizer.data import NAMED_TEMPLATES
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import PathLike


class TemplateRefusedError(RefusedError):
    """A chat template does not render the probes."""


_QUESTION, _ANSWER, _MORE = "What is the capital of France?", "Paris.", "And of Italy?"
PROBES: tuple[list[Message], ...] = (
    [{"role": "user", "content": _QUESTION}],
    [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _MORE},
    ],
)
"""A first question, and a question after an answer; without a system message, which some templates reject."""

_KEYS = ("chat_template", "tokenizer.chat_template")


def is_template_key(key: str) -> bool:
    """Whether a metadata key of a container or folder holds a chat template."""
    return key in _KEYS or key.startswith("tokenizer.chat_template.")


def template_for(source: str, tokenizer: Tokenizer | None) -> ChatTemplate:
    """The template `source` with the special tokens of a tokenizer."""
    found = None if tokenizer is None else template_of(replace(tokenizer, chat_template=source))
    return found or ChatTemplate(source)


def check_rendering(source: str, tokenizer: Tokenizer | None, path: PathLike) -> None:
    """Raises TemplateRefusedError if the template does not render the probes, or leaves out what the user says.

    Names of llama.cpp's templates, such as rwkv-world, pass. Raises MissingDependencyError without jinja2.
    """
    if source in NAMED_TEMPLATES:
        return
    template = template_for(source, tokenizer)
    for messages in PROBES:
        problem = _problem(template, messages)
        if problem:
            raise TemplateRefusedError(
                f"the chat template is not written: {problem}",
                path=path,
                hint=f"the template in use, on one message: apr meta template render {shlex.quote(str(path))}",
            )


def _problem(template: ChatTemplate, messages: Sequence[Message]) -> str | None:
    try:
        text = template.render(messages)
    except MissingDependencyError:
        raise
    except AprError as error:
        return error.message
    left = next((m["content"] for m in messages if m["role"] == "user" and str(m["content"]) not in text), None)
    return None if left is None else f"it leaves out the user's message {left!r}"
