"""Byte-level and SentencePiece-style BPE models of a tokenizer.json as llama.cpp's lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import add, methodcaller
from typing import Any

from aprfmt.errors import CorruptError, UnsupportedError
from aprfmt.tokenizer import pre
from aprfmt.tokenizer.hf_added import Added, place
from aprfmt.tokenizer.hf_kinds import ADDED_SCORE, HOLE_SCORE, Draft, adds_space_prefix, steps_of
from aprfmt.tokenizer.model import TokenType

__all__ = ["bpe", "is_byte_level"]

_MERGE_SPACE = "\u0120"
"""Stands for a space inside a half of a merge, which is itself written as two halves around a space."""
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PRE_BY_CLASS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
_REACHED_BY_NO_MERGE = -1e6


def bpe(
    parsed: Mapping[str, Any],
    text: bytes | None,
    vocab: Mapping[str, int],
    added: list[Added],
    named: set[str],
    settings: Mapping[str, Any],
    source: str,
) -> Draft:
    """A BPE model: "gpt2", or "llama" when it works on pieces with single bytes for what is no piece.

    Args:
        parsed: tokenizer.json or its like.
        text: the bytes of the tokenizer.json, None where there is none.
        vocab: id by text, checked.
        added, named: see place.
        settings: tokenizer_config.json.
        source: the file's name.

    Raises:
        CorruptError: merges of another form or of unknown tokens.
        UnsupportedError: affixes that llama.cpp's algorithm has not.
    """
    model = parsed["model"]
    affixes = [key for key in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if affixes:
        raise UnsupportedError(f"a BPE model with {affixes[0]} is not supported", path=source)
    tokens, types = place(vocab.items(), added, named, source)
    merges = _merges(model.get("merges", []), vocab.keys() | {token.content for token in added}, source)
    if model.get("byte_fallback") is True and not is_byte_level(parsed.get("pre_tokenizer")):
        _piece_types(tokens, types, model.get("unk_token"))
        flags = {"add_space_prefix": adds_space_prefix(parsed)}
        return Draft("llama", tokens, types, merges, _scores(tokens, types, merges), flags=flags)
    if text is None:
        name = _PRE_BY_CLASS.get(str(settings.get("tokenizer_class", "")).removesuffix("Fast"))
        note = "" if name else "vocab.json and merges.txt do not say how text is split into words"
        return Draft("gpt2", tokens, types, merges, pre=name, pre_note=note)
    choice = pre.detect(text, parsed)
    return Draft("gpt2", tokens, types, merges, pre=choice.name, pre_note=choice.detail)


def _piece_types(tokens: list[str], types: list[int], unk: object) -> None:
    """SentencePiece types beyond the common rule: single bytes and the unknown token."""
    for i, text in enumerate(tokens):
        if text == unk:
            types[i] = int(TokenType.UNKNOWN)
        elif _BYTE.fullmatch(text):
            types[i] = int(TokenType.BYTE)


def _merges(merges: object, texts: set[str], source: str) -> list[str]:
    """Merges as "left right" whichever way the file spells them; each half and the whole must be a token."""
    if not isinstance(merges, list):
        raise CorruptError("model.merges is no array", path=source)
    if (whole := _plain_merges(merges, texts)) is not None:
        return whole
    result = []
    for n, merge in enumerate(merges):
        halves = merge.split(" ") if isinstance(merge, str) else merge
        if (
            not isinstance(halves, list)
            or len(halves) != 2
            or not all(isinstance(half, str) for half in halves)
        ):
            raise CorruptError(f"model.merges[{n}] is no pair of tokens: {merge!r}", path=source)
        left, right = halves
        if left not in texts or right not in texts or left + right not in texts:
            raise CorruptError(
                f"model.merges[{n}] names a token that is not in the vocabulary: {halves}", path=source
            )
        spaced = " " in left or " " in right
        result.append(
            f"{left.replace(' ', _MERGE_SPACE)} {right.replace(' ', _MERGE_SPACE)}"
            if spaced
            else f"{left} {right}"
        )
    return result


def _plain_merges(merges: list[Any], texts: set[str]) -> list[str] | None:
    """The same for lists where all is well and no token has a space: hundreds of thousands at a time."""
    kinds = set(map(type, merges))
    if kinds == {list} and set(map(len, merges)) == {2} and not any(" " in text for text in texts):
        try:
            merges = list(map(" ".join, merges))
        except TypeError:
            return None
    elif kinds != {str}:
        return None
    if set(map(methodcaller("count", " "), merges)) != {1}:
        return None
    halves = " ".join(merges).split(" ")
    lefts, rights = halves[0::2], halves[1::2]
    if not texts.issuperset(lefts) or not texts.issuperset(rights):
        return None
    return merges if texts.issuperset(map(add, lefts, rights)) else None


def _scores(tokens: list[str], types: list[int], merges: list[str]) -> list[float]:
    """Scores that make a best-score-first merger do what the ranked merges do: minus the rank.

    llama.cpp's SentencePiece merges the adjacent pair whose joined text has the best score; a text that
    several merges give takes the rank of the first. Single characters and bytes need no merge and score 0.
    """
    rank: dict[str, int] = {}
    for n, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), n)
    fixed = {
        int(TokenType.CONTROL): ADDED_SCORE,
        int(TokenType.USER_DEFINED): ADDED_SCORE,
        int(TokenType.UNUSED): HOLE_SCORE,
        int(TokenType.BYTE): 0.0,
        int(TokenType.UNKNOWN): 0.0,
    }

    def score(text: str, kind: int) -> float:
        if kind in fixed:
            return fixed[kind]
        return -float(rank[text]) if text in rank else 0.0 if len(text) == 1 else _REACHED_BY_NO_MERGE

    return [score(text, kind) for text, kind in zip(tokens, types, strict=True)]


def is_byte_level(pre_tokenizer: object) -> bool:
    """Whether a pre-tokenizer turns text into GPT-2's byte alphabet."""
    return any(step.get("type") == "ByteLevel" for step in steps_of(pre_tokenizer))
