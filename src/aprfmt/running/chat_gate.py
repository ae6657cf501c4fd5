"""Whether a chat template is the one that a model was trained with: by its tokens, and by the model's losses."""

from __future__ import annotations

import re
from typing import NamedTuple

from aprfmt.errors import AprError, MissingDependencyError
from aprfmt.running.examined import ModelUnderTest
from aprfmt.running.findings import GateFinding, SkippedError
from aprfmt.running.qa_text import ANSWER, FORMATS, USER
from aprfmt.text import common_length, first_few
from aprfmt.tokenizer.chat import ChatTemplate

BETTER = 4.0
"""Nats by which another format may be better, for an answer and its end together."""

_MARKER = re.compile(r"<\|[^|<>\s]{1,40}\|>|<\uff5c[^<>\s]{1,40}\uff5c>|<(?:start|end)_of_turn>")
_PLAIN = f"Question: {USER}\nAnswer: "


class _Exchange(NamedTuple):
    """Losses of the answer and of its end mark, in nats; both are sums."""

    answer: float
    end: float


def chat_template(x: ModelUnderTest) -> GateFinding:
    """Renders a conversation, looks for its markers in the vocabulary, and compares losses with other forms."""
    template = x.metadata("tokenizer.chat_template")
    if not isinstance(template, str) or not template.strip():
        raise SkippedError("the model has no chat template", required=False)
    if "{" not in template:
        raise SkippedError(f"only the template's name is stored: {template[:40]}", required=False)
    try:
        text = _rendered(x, template)
    except MissingDependencyError as error:
        raise SkippedError(error.message) from error
    except AprError as error:
        return GateFinding(False, error.message)
    head, found, tail = text.partition(ANSWER)
    if not found or USER not in head:
        return GateFinding(False, "the template drops messages")
    foreign = [marker for marker in dict.fromkeys(_MARKER.findall(text)) if len(_ids(x, marker)) != 1]
    if foreign:
        return GateFinding(
            False,
            f"it writes markers that are not in the vocabulary: {first_few(foreign)}",
            value=len(foreign),
            threshold=0,
            disease="chat-template",
        )
    own = _exchange(x, head, tail.strip().split("\n")[0])
    others = {
        name: _exchange(x, form.text[0], form.behind)
        for name, form in FORMATS.items()
        if all(len(_ids(x, marker)) == 1 for marker in (*_MARKER.findall("".join(form)), form.behind))
    }
    plain = _exchange(x, _PLAIN, None)
    best = min(others, key=lambda name: sum(others[name]), default=None)
    worse = sum(own) - sum(others[best]) if best is not None else 0.0
    than_plain = own.answer - plain.answer
    evidence = (
        f"loss with the template: answer {own.answer:.1f} nats, end token {own.end:.1f}; "
        f"answer without: {plain.answer:.1f}"
    )
    if best is not None:
        evidence += f"; {sum(others[best]):.1f} in total with the {best} format"
    if worse > BETTER:
        text = f"the model expects the {best} format: {evidence}"
        return GateFinding(False, text, worse, BETTER, "chat-template")
    return GateFinding(than_plain <= BETTER, evidence, value=max(worse, than_plain), threshold=BETTER)


def _rendered(x: ModelUnderTest, template: str) -> str:
    special = {}
    for role, token in {"bos": x.llama.facts.bos, "eos": x.llama.facts.eos}.items():
        special[role] = x.llama.detokenize([token], special=True) if token >= 0 else ""
    talk = [{"role": "user", "content": USER}, {"role": "assistant", "content": ANSWER}]
    return ChatTemplate(template, special, path=x.file).render(talk, add_generation_prompt=False)


def _ids(x: ModelUnderTest, text: str) -> list[int]:
    ids = x.llama.tokenize(text, add_special=False)
    return ids[1:] if len(ids) == 2 and ids[0] == _space(x) else ids


def _space(x: ModelUnderTest) -> int:
    """The prefix of a SentencePiece vocabulary before a marker."""
    ids = x.llama.tokenize(" ", add_special=False)
    return ids[0] if len(ids) == 1 else -1


def _exchange(x: ModelUnderTest, head: str, behind: str | None) -> _Exchange:
    """Losses of the answer after `head`, and of `behind` or, if empty, the end token; None: without an end."""
    facts = x.llama.facts
    begun = x.llama.tokenize(head, add_special=False)
    begin = [facts.bos] if facts.adds_bos and begun[:1] != [facts.bos] else []
    answered = x.llama.tokenize(head + ANSWER, add_special=False)
    whole = x.llama.tokenize(head + ANSWER + (behind or ""), add_special=False)
    if behind == "" and facts.eos >= 0:
        whole = [*answered, facts.eos]
    first = common_length(begun, answered)
    last = common_length(answered, whole)
    losses = x.reader.score([*begin, *whole]).loss
    shift = len(begin) - 1
    return _Exchange(float(losses[first + shift : last + shift].sum()), float(losses[last + shift :].sum()))
