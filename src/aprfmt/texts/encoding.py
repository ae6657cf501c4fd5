"""Encodes documents with a model's own tokenizer and chat template, and masks tokens that are not trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aprfmt.errors import CorruptError, RefusedError
from aprfmt.texts.records import Chat, Document, Marked
from aprfmt.tokenizer.chat import PrefixError
from aprfmt.tokenizer.chat_format import template_of
from aprfmt.tokenizer.encoding import tokenizer_json
from aprfmt.tokenizer.fast import Encoded, load
from aprfmt.tokenizer.model import Tokenizer

HIDDEN = np.uint32(1 << 31)
"""Set in the ids of masked tokens until they are written."""

Ids = npt.NDArray[np.uint32]
Int64 = npt.NDArray[np.int64]


class Encoder:
    """Encodes documents with a model's own tokenizer: BOS if it adds one, text, end token.

    Attributes:
        separator: id of the end token.
        begin: id of BOS, which starts every document; None if the tokenizer adds none.
        n_ids: upper bound of the ids.
        digest: SHA-256 of everything that determines the ids of a text.
        template: hash of the chat template, "" without one.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Raises RefusedError without a tokenizer or an end token, UnsupportedError if it cannot be run."""
        if tokenizer is None:
            raise RefusedError(
                "the model has no tokenizer, so text cannot be tokenized",
                hint="import it again with --tokenizer FOLDER",
            )
        if "eos" not in tokenizer.special:
            raise RefusedError("the tokenizer defines no end-of-sequence token to separate documents")
        text = tokenizer_json(tokenizer)
        self._tokenizer = load(text)
        self.separator = tokenizer.special["eos"]
        begin = tokenizer.special.get("bos")
        alone = self._tokenizer.encode([""], special=True)[0].ids
        with_begin = tokenizer.flags.get("add_bos", begin in alone[:1] and begin != self.separator)
        self.begin = begin if with_begin else None
        self._begin = np.array([] if self.begin is None else [self.begin], np.uint32)
        self._end = np.array([self.separator], np.uint32)
        self.n_ids = len(tokenizer.tokens)
        self._template = template_of(tokenizer)
        self._added = np.array(self._tokenizer.added(), np.uint32)
        self._tokenizer.drop_post_processor()  # it may strip spaces from a token's range in the text
        total = hashlib.sha256()
        # Post-processors and decoders differ between a model's containers.
        decides = {name: value for name, value in json.loads(text).items() if name not in ("post_processor", "decoder")}
        own = self._begin.tolist(), self.separator, self.n_ids
        for part in (json.dumps(decides, sort_keys=True).encode(), str(own).encode()):
            total.update(len(part).to_bytes(8, "little") + part)
        self.digest = total.hexdigest()
        self.template = hashlib.sha256(self._template.source.encode()).hexdigest() if self._template else ""

    def render(self, chat: Chat) -> Marked:
        """Renders a conversation, with the assistant's ranges. Raises as ChatTemplate.render_answers."""
        if self._template is None:
            raise PrefixError(
                "the data is conversations, and the model has no chat template",
                hint="use a model with one, or plain text (set the field with --text-field)",
            )
        return Marked(*self._template.render_answers(chat.messages, first=chat.first, tools=chat.tools))

    def encode(self, documents: Sequence[Document]) -> list[Ids]:
        """Ids [n] of each document, with HIDDEN set for masked tokens.

        Texts and arrays of ids get BOS, and the end token unless they end with it; a conversation gets an end token if
        its template puts no token after the last answer. Raises CorruptError, LimitError.
        """
        texts = [document for document in documents if isinstance(document, str)]
        chats = [document.text for document in documents if isinstance(document, Marked)]
        encoded = iter(self._tokenizer.encode(texts))
        placed = iter(self._tokenizer.encode(chats, places=True))
        found = []
        for document in documents:
            if isinstance(document, Marked):
                found.append(self._framed(_hide(next(placed), document.learned), is_chat=True))
            else:
                ids = np.array(next(encoded).ids, np.uint32) if isinstance(document, str) else document
                found.append(self._framed(ids))
        return found

    def plain(self, text: str) -> list[int]:
        """Ids of a text alone, without begin and end."""
        return self._tokenizer.encode([text])[0].ids

    def placed(self, texts: Sequence[str]) -> list[Encoded]:
        """Ids of each text alone, with the range of characters of each id."""
        return self._tokenizer.encode(texts, places=True)

    def _framed(self, ids: Ids, *, is_chat: bool = False) -> Ids:
        plain = ids & ~HIDDEN if is_chat else ids
        if len(ids) and int(plain.max()) >= self.n_ids:
            raise CorruptError(
                f"token id {int(plain.max())}, but the model's tokenizer has {self.n_ids}",
                hint="the shards were made with a different tokenizer; use the original text",
            )
        has_begin = len(ids) > 0 and np.array_equal(plain[: len(self._begin)], self._begin)
        has_end = len(ids) > 0 and int(plain[-1]) == self.separator
        if is_chat:
            learned = ids[ids < HIDDEN]
            has_end = len(learned) > 0 and bool(np.isin(learned[-1], self._added))
        begin, end = self._begin[: 0 if has_begin else None], self._end[: 0 if has_end else None]
        return np.concatenate([begin, ids, end])


def _hide(encoding: Encoded, learned: Sequence[tuple[int, int]]) -> Ids:
    """The ids of a text, with HIDDEN set except for tokens that overlap one of these character ranges."""
    ids = np.array(encoding.ids, np.uint32)
    places, ranges = np.array(encoding.places, np.int64).reshape(-1, 2), np.array(learned, np.int64).reshape(-1, 2)
    last = np.searchsorted(ranges[:, 0], places[:, 1], "left") - 1  # the last range that begins before a token's end
    is_learned = (last >= 0) & (ranges[last, 1] > places[:, 0]) if len(ranges) else np.zeros(len(ids), bool)
    return np.where(is_learned, ids, ids | HIDDEN)


def hidden_runs(ids: Ids) -> Int64:
    """The runs of masked tokens of a document [n, 2], ignoring its first token."""
    if not len(ids) or int(ids.max()) < HIDDEN:
        return np.zeros((0, 2), np.int64)
    hidden = np.concatenate([[False, False], ids[1:] >= HIDDEN, [False]])
    return np.flatnonzero(hidden[1:] != hidden[:-1]).astype(np.int64).reshape(-1, 2)
