"""The tokenizer.json of WordPiece tokenizers out of a GGUF."""

from __future__ import annotations

from typing import Any

from aprfmt.errors import UnsupportedError
from aprfmt.tokenizer.hf_added import UNDERLINE
from aprfmt.tokenizer.model import Tokenizer, TokenType

__all__ = ["from_phantom", "wordpiece_parts"]

_LONGEST_WORD = 10_000
"""llama.cpp has no limit; this one keeps a crafted text from taking quadratic time."""


def from_phantom(text: str, kind: int) -> str:
    """WordPiece's spelling of llama.cpp's token: the tails of words begin with ##, words with nothing."""
    if kind != TokenType.NORMAL:
        return text
    return text[len(UNDERLINE) :] if text.startswith(UNDERLINE) else "##" + text


def wordpiece_parts(tok: Tokenizer) -> dict[str, Any]:
    """normalizer, pre_tokenizer, decoder and model of a WordPiece tokenizer. Raises UnsupportedError without unk."""
    kinds = tok.types or [int(TokenType.NORMAL)] * len(tok.tokens)
    vocab = {
        from_phantom(text, kind): i
        for i, (text, kind) in enumerate(zip(tok.tokens, kinds, strict=True))
        if kind != TokenType.UNUSED
    }
    unk = tok.special.get("unk", 100)
    if unk >= len(tok.tokens):
        raise UnsupportedError(
            "a bert tokenizer without an unknown token cannot be written as tokenizer.json",
            hint="give the original tokenizer with --tokenizer",
        )
    lowercase = tok.flags.get("lowercase", True)
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": tok.flags.get("strip_accents", lowercase),
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": from_phantom(tok.tokens[unk], kinds[unk]),
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": _LONGEST_WORD,
            "vocab": vocab,
        },
    }
