"""What a model that knows one tokenizer has for the tokens of another one."""

from __future__ import annotations

from dataclasses import dataclass

from aprfmt.errors import RefusedError
from aprfmt.tokenizer.alignment import is_control, match, meanings, token_bytes
from aprfmt.tokenizer.encoding import loaded
from aprfmt.tokenizer.model import Tokenizer

_READABLE = ("gpt2", "llama", "gemma4", "t5")
"""Algorithms whose tokens are bytes of a text. The others normalize it."""


@dataclass(frozen=True, slots=True)
class Counterparts:
    """The tokens of an old tokenizer for each id of a new one.

    Attributes:
        same: the old id of each new id that means the same: by role (EOS, BOS, padding, end of a turn), else by bytes;
            of several new ids for an old one, the one that `match` pairs with it precedes.
        pieces: the old ids of the text of each other one; padding, holes and bytes without an old token have neither.
        control: the texts of control tokens without a counterpart, whose pieces are those of their names.
    """

    same: dict[int, int]
    pieces: dict[int, list[int]]
    control: list[str]


def counterparts(old: Tokenizer, new: Tokenizer, n_rows: int) -> Counterparts:
    """The counterparts among the first `n_rows` tokens of `old`: those that have a row.

    Raises:
        RefusedError: a tokenizer whose tokens are not the bytes of a text (WordPiece, RWKV), or none.
        AprError: the old tokenizer cannot be run.
    """
    for side, tokenizer in (("model's", old), ("new", new)):
        if tokenizer.model not in _READABLE:
            raise RefusedError(
                f"the tokens of the {side} tokenizer ({tokenizer.model}) cannot be compared as bytes",
                hint="use byte-level BPE or SentencePiece tokenizers",
            )
    same = {i: found for i, found in match(old, new).items() if found < n_rows}
    texts = {i: text for i in range(len(new.tokens)) if i not in same and (text := token_bytes(new, i))}
    names = [text.decode("utf-8", "replace") for text in texts.values()]
    meant, ids_of = dict[int, bytes](), dict[bytes, int]()
    for i, (is_marker, text) in meanings(old):
        if i < n_rows:
            meant[i] = text
            if not is_marker:
                ids_of.setdefault(text, i)
    longest = max(map(len, ids_of), default=0)
    pieces = {}
    for (i, text), encoded in zip(texts.items(), loaded(old).encode(names), strict=True):
        ids = encoded.ids
        # A tokenizer may normalize a text or put a space before it, and part of a character is no text.
        is_exact = b"".join(meant.get(piece, b"") for piece in ids) == text and meant.keys() >= {*ids}
        if is_exact and len(ids) == 1:
            same[i] = ids[0]
        elif found := ids if is_exact else _longest_first(text, ids_of, longest):
            pieces[i] = found
    return Counterparts(same, pieces, [new.tokens[i] for i in texts if i not in same and is_control(new, i)])


def _longest_first(text: bytes, ids_of: dict[bytes, int], longest: int) -> list[int]:
    """Tokens that spell `text`, the longest that fits each time; bytes without a token are left out."""
    found, at = list[int](), 0
    while at < len(text):
        ends = range(min(len(text), at + longest), at, -1)
        end = next((end for end in ends if text[at:end] in ids_of), None)
        if end is not None:
            found.append(ids_of[text[at:end]])
        at = end if end is not None else at + 1
    return found
