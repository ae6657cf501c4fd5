"""The tokenizer.json of SentencePiece-style tokenizers out of a GGUF: merges and Unigram."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Any

from aprfmt.errors import UnsupportedError
from aprfmt.tokenizer.ggml import CHARSMAP
from aprfmt.tokenizer.hf_added import UNDERLINE
from aprfmt.tokenizer.model import Tokenizer, TokenType

__all__ = ["derived_merges", "llama_parts", "unigram_parts"]

_TO_UNDERLINE = {"type": "Replace", "pattern": {"String": " "}, "content": UNDERLINE}
_PREPEND = {"type": "Prepend", "prepend": UNDERLINE}
_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": UNDERLINE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}
_STRIP_ONE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def llama_parts(tok: Tokenizer) -> dict[str, Any]:
    """normalizer, pre_tokenizer, decoder and model of a tokenizer that merges pieces, single bytes for the rest.

    llama.cpp joins the two neighbours whose text has the best score; as ranked merges that is every way to cut
    a token in two tokens, best score first.

    Raises UnsupportedError when the 256 byte tokens are not complete.
    """
    _check_bytes(tok)
    gemma = tok.model == "gemma4"
    prefix = tok.flags.get("add_space_prefix", not gemma) and not gemma
    unk = _text(tok, "unk", 0)
    vocab = _vocab(tok)
    halves = map(_halves, tok.merges) if gemma else derived_merges(tok)
    known = vocab.keys()
    decoders = [*_DECODER["decoders"], _STRIP_ONE] if prefix else _DECODER["decoders"]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [_PREPEND, _TO_UNDERLINE]}
        if prefix
        else _TO_UNDERLINE,
        "pre_tokenizer": _lines() if gemma else None,
        "decoder": {**_DECODER, "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unk,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [[a, b] for a, b in halves if a in known and b in known and a + b in known],
        },
    }


def _lines() -> dict[str, Any]:
    """Gemma 4's only split: runs of line ends and what stands between them."""
    return {"type": "Split", "pattern": {"Regex": "[^\\n]+|[\\n]+"}, "behavior": "Isolated", "invert": False}


def _check_bytes(tok: Tokenizer) -> None:
    missing = {f"<0x{n:02X}>" for n in range(256)} - set(tok.tokens)
    if missing:
        raise UnsupportedError(
            f"a {tok.model} tokenizer without the byte token {min(missing)} cannot be written as tokenizer.json",
            hint="give the original tokenizer with --tokenizer",
        )


def _vocab(tok: Tokenizer) -> dict[str, int]:
    """Id by text without the pads; of equal texts llama.cpp finds the last."""
    kinds = tok.types or [int(TokenType.NORMAL)] * len(tok.tokens)
    return {text: i for i, text in enumerate(tok.tokens) if kinds[i] != TokenType.UNUSED}


def _halves(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    return (merge[:cut], merge[cut + 1 :]) if cut > 0 else (merge, "")


def derived_merges(tok: Tokenizer) -> Iterator[tuple[str, str]]:
    """The merges that scores stand for, best first; equal ones by the ids of their halves."""
    vocab = _vocab(tok)
    scores = tok.scores or [0.0] * len(tok.tokens)
    found = []
    for text, i in vocab.items():
        for cut in range(1, len(text)):
            left, right = vocab.get(text[:cut]), vocab.get(text[cut:])
            if left is not None and right is not None:
                found.append((-scores[i], i, left, right))
    found.sort()
    return ((tok.tokens[left], tok.tokens[right]) for _, _, left, right in found)


def unigram_parts(tok: Tokenizer) -> dict[str, Any]:
    """normalizer, pre_tokenizer, decoder and model of a Unigram tokenizer.

    Raises UnsupportedError without scores, or with one that is no number.
    """
    if len(tok.scores) != len(tok.tokens) or not all(map(math.isfinite, tok.scores)):
        raise UnsupportedError(
            "a t5 tokenizer without a score for each token cannot be written as tokenizer.json",
            hint="give the original tokenizer with --tokenizer",
        )
    kinds = tok.types or [int(TokenType.NORMAL)] * len(tok.tokens)
    unk = tok.special.get("unk", 2)
    normal = [s for s, kind in zip(tok.scores, kinds, strict=True) if kind == TokenType.NORMAL]
    worst = min(normal, default=0.0)
    end = max((i + 1 for i, kind in enumerate(kinds) if kind != TokenType.UNUSED), default=0)
    # What is no normal piece must not lower the score of unknown text, which hangs on the worst one.
    pieces = [
        [text, score if kind == TokenType.NORMAL else max(score, worst)]
        for text, score, kind in zip(tok.tokens[:end], tok.scores, kinds, strict=False)
    ]
    prefix = tok.flags.get("add_space_prefix", True)
    return {
        "normalizer": {"type": "Sequence", "normalizers": _unigram_normalizers(tok, prefix)},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Metaspace",
            "replacement": UNDERLINE,
            "prepend_scheme": "always" if prefix else "never",
        },
        "model": {
            "type": "Unigram",
            "unk_id": unk if unk < end else None,
            "vocab": pieces,
            "byte_fallback": False,
        },
    }


def _unigram_normalizers(tok: Tokenizer, prefix: bool) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    if CHARSMAP in tok.extra:
        charsmap = base64.b64encode(bytes(tok.extra[CHARSMAP][1])).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    merge = tok.flags.get("remove_extra_whitespaces", False)
    if merge:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if prefix or merge:  # merged spaces include one before the first word
        steps.append(_PREPEND)
    return [*steps, _TO_UNDERLINE]


def _text(tok: Tokenizer, role: str, default: int) -> str | None:
    i = tok.special.get(role, default)
    return tok.tokens[i] if i < len(tok.tokens) else None
