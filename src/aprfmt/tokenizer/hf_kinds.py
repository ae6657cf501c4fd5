"""Unigram and WordPiece models of a tokenizer.json as llama.cpp's lists."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aprfmt.errors import CorruptError, UnsupportedError
from aprfmt.tokenizer.ggml import CHARSMAP, TOKEN_TYPE_COUNT
from aprfmt.tokenizer.hf_added import UNDERLINE, Added, place
from aprfmt.tokenizer.model import TokenType

__all__ = ["Draft", "adds_space_prefix", "piece_score", "steps_of", "to_phantom", "unigram", "wordpiece"]

ADDED_SCORE = -1000.0
HOLE_SCORE = -10000.0
GREEDY_NOTE = (
    "a Unigram model with byte tokens: llama.cpp has no such algorithm, its SentencePiece merges are the nearest, "
    "so ids can differ"
)


@dataclass(slots=True)
class Draft:
    """What one algorithm makes of a tokenizer's files; the attributes are those of Tokenizer.

    `special` holds ids that count only where no other file names them.
    """

    model: str
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    pre: str | None = "default"
    pre_note: str = ""
    flags: dict[str, bool] = field(default_factory=dict)
    special: dict[str, int] = field(default_factory=dict)
    extra: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def steps_of(step: object) -> Iterator[Mapping[str, Any]]:
    """A normaliser or pre-tokenizer and all the steps inside it; a crafted file nests them thousands deep."""
    left = [step]
    while left:
        step = left.pop()
        if isinstance(step, Mapping):
            yield step
            inner = step.get("normalizers") or step.get("pretokenizers")
            left += inner if isinstance(inner, list) else []


def adds_space_prefix(parsed: Mapping[str, Any]) -> bool:
    """Whether a SentencePiece-style tokenizer puts a space before the text."""

    def prepends(step: Mapping[str, Any]) -> bool:
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space") else "never")
        return step.get("type") == "Prepend" or (step.get("type") == "Metaspace" and scheme != "never")

    both = ("normalizer", "pre_tokenizer")
    return any(prepends(step) for key in both for step in steps_of(parsed.get(key)))


def piece_score(kind: int, score: float) -> float:
    """The score llama.cpp gives added tokens and holes, else the model's own."""
    if kind == TokenType.UNUSED:
        return HOLE_SCORE
    return ADDED_SCORE if kind == TokenType.USER_DEFINED else score


def unigram(
    parsed: Mapping[str, Any], added: list[Added], named: set[str], config: Mapping[str, Any], source: str
) -> Draft:
    """A Unigram model: "t5" for llama.cpp, or "llama" where single bytes stand for what is no piece.

    Raises CorruptError for entries of another form, LimitError for ids far beyond the pieces.
    """
    model = parsed["model"]
    pieces = _pieces(model.get("vocab"), source)
    tokens, types = place(((text, i) for i, (text, _) in enumerate(pieces)), added, named, source)
    unk = model.get("unk_id")
    if unk is not None and (type(unk) is not int or not 0 <= unk < len(pieces)):
        raise CorruptError(f"model.unk_id is {unk!r}, but there are {len(pieces)} pieces", path=source)
    if unk is not None:
        types[unk] = int(TokenType.UNKNOWN)
    stored = [score for _, score in pieces] + [ADDED_SCORE] * (len(tokens) - len(pieces))
    greedy = model.get("byte_fallback") is True
    if greedy:
        for i, text in enumerate(tokens):
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                types[i] = int(TokenType.BYTE)
    draft = Draft(
        model="llama" if greedy else "t5",
        tokens=tokens,
        types=types,
        scores=[HOLE_SCORE if k == TokenType.UNUSED else s for k, s in zip(types, stored, strict=True)],
        flags={"add_space_prefix": adds_space_prefix(parsed)},
        special={} if unk is None else {"unk": unk},
    )
    if greedy:
        draft.notes.append(GREEDY_NOTE)
        return draft
    draft.flags["remove_extra_whitespaces"] = _merges_spaces(parsed)
    if charsmap := _charsmap(parsed, source):
        draft.extra[CHARSMAP] = (("ARRAY", "UINT8"), charsmap)
    draft.extra |= _segments(config)
    return draft


def _pieces(vocab: object, source: str) -> list[tuple[str, float]]:
    if not isinstance(vocab, list):
        raise CorruptError("model.vocab is no array of pieces and scores", path=source)
    for n, entry in enumerate(vocab):
        if not (
            isinstance(entry, list)
            and len(entry) == 2
            and isinstance(entry[0], str)
            and type(entry[1]) in (int, float)
            and abs(entry[1]) < 1e30
        ):
            raise CorruptError(f"model.vocab[{n}] is no piece with a score: {entry!r}", path=source)
    if any("\ud800" <= c <= "\udfff" for text, _ in vocab for c in text):
        raise CorruptError("model.vocab holds a text with a lone surrogate", path=source)
    return [(text, float(score)) for text, score in vocab]


def _charsmap(parsed: Mapping[str, Any], source: str) -> bytes:
    """SentencePiece's compiled normalisation, b"" where the normaliser has none."""
    for step in steps_of(parsed.get("normalizer")):
        stored = step.get("precompiled_charsmap")
        if step.get("type") != "Precompiled" or not stored:
            continue
        try:
            data = base64.b64decode(stored, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise CorruptError(f"precompiled_charsmap is no base64: {error}", path=source) from error
        check_charsmap(data, source)
        return data
    return b""


def check_charsmap(data: bytes, source: str) -> None:
    """Raises CorruptError for a charsmap that llama.cpp would not load: u32 length of a trie, trie, texts."""
    trie = int.from_bytes(data[:4], "little")
    if len(data) < 5 or trie + 4 >= len(data) or trie % 4:
        raise CorruptError(f"precompiled_charsmap of {len(data)} bytes has a trie of {trie}", path=source)


def _merges_spaces(parsed: Mapping[str, Any]) -> bool:
    """Whether runs of spaces count as one."""
    if any(step.get("type") == "WhitespaceSplit" for step in steps_of(parsed.get("pre_tokenizer"))):
        return True
    patterns = [
        step.get("pattern") for step in steps_of(parsed.get("normalizer")) if step.get("type") == "Replace"
    ]
    return {"Regex": " {2,}"} in patterns


def _segments(config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    count = config.get("type_vocab_size")
    return {TOKEN_TYPE_COUNT: ("UINT32", count)} if type(count) is int and 0 <= count < 1 << 32 else {}


def to_phantom(text: str, kind: int, prefix: str = "##") -> str:
    """llama.cpp's spelling of a WordPiece token: words begin with U+2581, the rest of a word with nothing."""
    if kind != TokenType.NORMAL:
        return text
    return text.removeprefix(prefix) if text.startswith(prefix) else UNDERLINE + text


def wordpiece(
    parsed: Mapping[str, Any],
    vocab: Mapping[str, int],
    added: list[Added],
    named: set[str],
    config: Mapping[str, Any],
    source: str,
) -> Draft:
    """A WordPiece model: "bert". Raises CorruptError, UnsupportedError for rules that llama.cpp has not."""
    model = parsed["model"]
    prefix = model.get("continuing_subword_prefix", "##")
    if not isinstance(prefix, str) or not prefix:
        raise UnsupportedError("a WordPiece model without a prefix for the tails of words", path=source)
    unk = model.get("unk_token", "[UNK]")
    if unk not in vocab:
        raise CorruptError(f"model.unk_token {unk!r} is not in the vocabulary", path=source)
    tokens, types = place(vocab.items(), added, named, source)
    tokens = [to_phantom(text, kind, prefix) for text, kind in zip(tokens, types, strict=True)]
    return Draft(
        model="bert",
        tokens=tokens,
        types=types,
        flags=_bert_flags(parsed.get("normalizer")),
        special={"unk": vocab[unk]},
        extra=_segments(config),
    )


def _bert_flags(normalizer: object) -> dict[str, bool]:
    """Lower-casing and accents; what strips no accents by itself does it with the lower-casing, as BERT does."""
    flags = {"lowercase": False, "strip_accents": False}
    for step in steps_of(normalizer):
        kind = step.get("type")
        if kind == "BertNormalizer":
            lowercase = step.get("lowercase", True) is True
            accents = step.get("strip_accents")
            flags = {
                "lowercase": lowercase,
                "strip_accents": lowercase if accents is None else accents is True,
            }
        elif kind in ("Lowercase", "StripAccents"):
            flags["lowercase" if kind == "Lowercase" else "strip_accents"] = True
    return flags
