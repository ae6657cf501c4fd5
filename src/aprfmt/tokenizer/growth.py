"""How much a tokenizer.json can expand a text: a file of a kilobyte may contain forty steps that each double it."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable

from aprfmt.errors import LimitError
from aprfmt.limits import MAX_TEXT_GROWTH
from aprfmt.types import Json, JsonObject

_KEYS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_INNER = ("normalizers", "pretokenizers", "processors", "decoders")
_FEW = 16
"""Characters or ids that count as one more text if they are added to each."""


def check_growth(parsed: Json, path: str = "tokenizer.json") -> None:
    """Raises LimitError if a part of a tokenizer.json can make more than MAX_TEXT_GROWTH characters of one."""
    for key in _KEYS:
        if isinstance(parsed, dict) and growth(parsed.get(key)) > MAX_TEXT_GROWTH:
            raise LimitError(
                f"its {key} can expand a text more than {MAX_TEXT_GROWTH}-fold",
                path=path,
                hint="download the tokenizer from the model's publisher",
            )


def growth(step: Json) -> int:
    """The upper bound for a step with its inner steps; beyond MAX_TEXT_GROWTH any larger number."""
    total, left = 1, [step]
    while left and total <= MAX_TEXT_GROWTH:
        step = left.pop()
        if isinstance(step, dict):
            for key in _INNER:
                inner = step.get(key)
                left += inner if isinstance(inner, list) else []
            total *= _own(step)
    return total


def _own(step: JsonObject) -> int:
    measure = _MEASURES.get(str(step.get("type")))
    return 1 if measure is None else max(1, measure(step))


def _replaced(step: JsonObject) -> int:
    content, pattern = step.get("content"), step.get("pattern")
    length = len(content) if isinstance(content, str) else 0
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(literal, str) and literal:
        return -(-length // len(literal))
    return 1 + length  # a regex may match between any two characters


def _prepended(step: JsonObject) -> int:
    text = step.get("prepend")
    return 1 + (len(text) if isinstance(text, str) else 0) // _FEW


def _longest_text(step: JsonObject) -> int:
    """Bytes of the longest text in a charsmap: u32 length of a trie, trie, zero-terminated texts."""
    stored = step.get("precompiled_charsmap")
    try:
        data = base64.b64decode(stored if isinstance(stored, str) else "")
    except (binascii.Error, ValueError):
        return 1  # the library uses none of it
    return max(map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))


def _pieces(step: JsonObject, key: str) -> int:
    """How often a template contains the text, and its additions as a number of texts."""
    pieces, tokens = step.get(key), step.get("special_tokens")
    texts = added = 0
    for piece in pieces if isinstance(pieces, list) else []:
        if isinstance(piece, dict) and isinstance(special := piece.get("SpecialToken"), dict):
            found = tokens.get(str(special.get("id"))) if isinstance(tokens, dict) else None
            ids = found.get("ids") if isinstance(found, dict) else None
            added += len(ids) if isinstance(ids, list) else 1
        else:
            texts += 1
    return texts + added // _FEW


_MEASURES: dict[str, Callable[[JsonObject], int]] = {
    "Replace": _replaced,
    "Prepend": _prepended,
    "Precompiled": _longest_text,
    "TemplateProcessing": lambda step: max(_pieces(step, "single"), _pieces(step, "pair")),
    "ByteLevel": lambda step: 2,  # each byte of a character beyond ASCII becomes a letter
    "Metaspace": lambda step: 2,  # a prefix is put before each piece
}
