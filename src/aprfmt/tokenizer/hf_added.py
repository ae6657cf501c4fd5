"""Added tokens of Hugging Face files, and the text and type of every id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aprfmt.errors import CorruptError, LimitError
from aprfmt.limits import MAX_TOKEN_ID, MAX_VOCAB_HOLES
from aprfmt.tokenizer.model import TokenType

__all__ = ["UNDERLINE", "Added", "added_tokens", "looks_special", "named_specials", "place"]

UNDERLINE = "\u2581"
"""SentencePiece's space."""


@dataclass(slots=True)
class Added:
    """One added token, from whichever file."""

    id: int
    content: str
    special: bool


def looks_special(text: str) -> bool:
    """llama.cpp's rule for added tokens that are control tokens although their file does not say so."""
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<\uff5c") and text.endswith("\uff5c>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def added_tokens(
    parsed: Mapping[str, Any], settings: Mapping[str, Any], vocab: Mapping[str, int], source: str
) -> list[Added]:
    """Added tokens of tokenizer.json, then those that only tokenizer_config.json lists."""
    listed = parsed.get("added_tokens") or []
    if not isinstance(listed, list):
        raise CorruptError("added_tokens is no array", path=source)
    added = [_added(entry, f"added_tokens[{n}]", source) for n, entry in enumerate(listed)]
    decoder = settings.get("added_tokens_decoder") or {}
    if not isinstance(decoder, Mapping):
        raise CorruptError("added_tokens_decoder is no JSON object", path="tokenizer_config.json")
    ids, texts = {token.id for token in added} | set(vocab.values()), {token.content for token in added}
    for key, entry in decoder.items():
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else key
        where = f"added_tokens_decoder[{key!r}]"
        if not isinstance(entry, Mapping):
            raise CorruptError(f"{where} is no JSON object", path="tokenizer_config.json")
        token = _added({**entry, "id": token_id}, where, "tokenizer_config.json")
        if token.content not in texts and (token.id not in ids or vocab.get(token.content) == token.id):
            added.append(token)
    return added


def _added(entry: object, where: str, source: str) -> Added:
    if not isinstance(entry, Mapping):
        raise CorruptError(f"{where} is no JSON object", path=source)
    token_id, content = entry.get("id"), entry.get("content")
    if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
        raise CorruptError(f"{where} has no usable id: {token_id!r}", path=source)
    if not isinstance(content, str) or any("\ud800" <= c <= "\udfff" for c in content):
        raise CorruptError(f"{where} has no usable content: {content!r}", path=source)
    return Added(token_id, content, entry.get("special") is True)


def named_specials(settings: Mapping[str, Any]) -> set[str]:
    """Texts with a role in tokenizer_config.json: special to transformers, whatever their flag says."""
    more = settings.get("additional_special_tokens") or []
    values = [value for key, value in settings.items() if key.endswith("_token")]
    values += more if isinstance(more, list) else []
    texts = [value.get("content") if isinstance(value, Mapping) else value for value in values]
    return {text for text in texts if isinstance(text, str)}


def place(
    vocab: Iterable[tuple[str, int]], added: list[Added], named: set[str], source: str
) -> tuple[list[str], list[int]]:
    """Text and GGML type of each id, by llama.cpp's rule; ids that nothing names become unused pads.

    Raises:
        CorruptError: no token at all.
        LimitError: ids far beyond the number of tokens.
    """
    vocab = list(vocab)
    ids = {*(i for _, i in vocab), *(token.id for token in added)}
    if not ids:
        raise CorruptError("the vocabulary is empty", path=source)
    size = max(ids) + 1
    if size - len(ids) > len(ids) + MAX_VOCAB_HOLES:
        raise LimitError(f"ids reach {size - 1}, but there are only {len(ids)} tokens", path=source)
    tokens = [f"[PAD{i}]" for i in range(size)] if len(ids) < size else [""] * size
    types = [int(TokenType.UNUSED)] * size
    normal = int(TokenType.NORMAL)
    for text, i in vocab:
        tokens[i], types[i] = text, normal
    for token in added:
        control = token.special or token.content in named or looks_special(token.content)
        types[token.id] = int(TokenType.CONTROL if control else TokenType.USER_DEFINED)
        # llama.cpp looks for user-defined texts in the input as it is, where a space is a space.
        tokens[token.id] = token.content if control else token.content.replace(UNDERLINE, " ")
    return tokens, types
