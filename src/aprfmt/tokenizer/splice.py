"""Stores tokenizer files without the lists that the tokenizer already has, and rebuilds them byte for byte.

A tokenizer.json is split into literal text and references to runs of the vocabulary or the merges, with the file's own
punctuation and indentation. vocab.json and merges.txt likewise.

    "..."                                          literal text
    {"list": "vocabulary", "runs", "colon", "between", "ascii", "patch"}       "text": id, ...
    {"list": "vocabulary", "form": "scored", "open", "comma", "close", ...}    ["text", score], ...
    {"list": "vocabulary", "form": "line", "between", "patch"}                 text (newline) ...
    {"list": "merges", "form": "text", "between", "ascii", "patch"}            "a b", ...
    {"list": "merges", "form": "pair", "open", "comma", "close", ...}          ["a", "b"], ...
    {"list": "merges", "form": "line", "between", "patch"}                     a b (newline) ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import TypeAlias, TypeVar

from aprfmt.errors import CorruptError
from aprfmt.tokenizer.hf_write import from_phantom
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import Json

_T = TypeVar("_T")
Piece: TypeAlias = str | Mapping[str, object]

_MAX_RUNS = 4096
_MAX_PLACES = 16
"""Positions of a file that are tried for a list: each costs as much as writing the list."""

_STRING = r'"(?:[^"\\]|\\.)*"'
_VOCAB_ENTRY = re.compile(rf"{_STRING}(?P<colon>\s*:\s*)\d+(?P<between>\s*,\s*)?")
_TEXT_ENTRY = re.compile(rf"{_STRING}(?P<between>\s*,\s*)?")
_PAIR_ENTRY = re.compile(rf"(?P<open>\[\s*){_STRING}(?P<comma>\s*,\s*){_STRING}(?P<close>\s*\])(?P<between>\s*,\s*)?")
_SCORED_ENTRY = re.compile(
    rf"(?P<open>\[\s*){_STRING}(?P<comma>\s*,\s*)[-+0-9.eE]+(?P<close>\s*\])(?P<between>\s*,\s*)?"
)
_PUNCTUATION = re.compile(r"[\s,:\[\]]{0,256}")


def split(text: bytes, tok: Tokenizer) -> list[tuple[Piece, int]] | None:
    """The pieces of a tokenizer.json, vocab.json, merges.txt or vocab.txt, each with its length in the file; None if
    `tok` cannot
    reproduce the file: other lists, or an unusual layout.
    """
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError:
        return None
    try:
        parsed = json.loads(decoded)
    except (ValueError, RecursionError):
        parts = [_lines(decoded, tok)]
    else:
        parts = _json_parts(decoded, parsed, tok)
    found = sorted((part for part in parts if part is not None), key=lambda part: part[0])
    if len(found) < len(parts):
        return None
    pieces: list[tuple[Piece, int]] = []
    at = 0
    for start, stop, piece in [*found, (len(decoded), len(decoded), "")]:
        pieces += [(decoded[at:start], len(decoded[at:start].encode()))]
        if piece:  # compared at its position in the text
            pieces += [(piece, len(decoded[start:stop].encode()))]
        at = stop
    return pieces


def join(pieces: Sequence[Piece], tok: Tokenizer) -> bytes:
    """Rebuilds the file that `split` took apart. Raises CorruptError for pieces that `split` cannot have made."""
    try:
        return "".join(piece if isinstance(piece, str) else _render(piece, tok) for piece in pieces).encode()
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"the stored parts of a tokenizer file are invalid: {error!r}") from error


_Part = tuple[int, int, Piece]


def _json_parts(text: str, parsed: Json, tok: Tokenizer) -> list[_Part | None]:
    """The location of the vocabulary and the merges in a JSON file, and how to write them; None for lists of others."""
    model = parsed.get("model") if isinstance(parsed, dict) else None
    holder = model if isinstance(model, dict) else {"vocab": parsed}
    vocab, merges = holder.get("vocab"), holder.get("merges")
    if isinstance(vocab, list) and len(vocab) <= len(tok.tokens) == len(tok.scores):
        return [_scored_part(text, vocab, tok)]
    opening = r'"vocab"\s*:\s*\{\s*' if holder is model else r"\s*\{\s*"
    ids = {key: i for key, i in vocab.items() if type(i) is int} if isinstance(vocab, dict) else {}
    if not isinstance(vocab, dict) or len(ids) < len(vocab):
        return [None]
    parts = [_vocabulary_part(text, opening, ids, tok)] if vocab else []
    return parts + ([_merges_part(text, merges, tok)] if isinstance(merges, list) and merges else [])


def _vocabulary_part(text: str, opening: str, vocab: dict[str, int], tok: Tokenizer) -> _Part | None:
    ids, tokens = list(vocab.values()), _texts(tok)
    runs, patch = [[0, len(ids)]], {}
    if ids != list(range(len(ids))) or list(vocab) != list(tokens[: len(ids)]):  # rarely
        starts = [0, *(n for n in range(1, len(ids)) if ids[n] != ids[n - 1] + 1)]
        if len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= len(tokens) or len(starts) > _MAX_RUNS:
            return None
        runs = [[ids[a], ids[b - 1] + 1] for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]
        patch = {str(i): key for key, i in vocab.items() if tokens[i] != key}
    return _locate(text, opening, _VOCAB_ENTRY, {"list": "vocabulary", "runs": runs, "patch": patch}, tok)


def _texts(tok: Tokenizer) -> Sequence[str]:
    """The texts as spelled in Hugging Face files."""
    if tok.model != "bert" or len(tok.types) != len(tok.tokens):
        return tok.tokens
    return [from_phantom(text, kind) for text, kind in zip(tok.tokens, tok.types, strict=True)]


def _scored_part(text: str, vocab: list[Json], tok: Tokenizer) -> _Part | None:
    """A Unigram vocabulary: pieces with scores, by id."""
    patch = {}
    for i, entry in enumerate(vocab):
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)):
            return None
        if entry != [tok.tokens[i], tok.scores[i]] or type(entry[1]) is not float:
            patch[str(i)] = entry
    piece: dict[str, object] = {"list": "vocabulary", "form": "scored", "n": len(vocab), "patch": patch}
    return _locate(text, r'"vocab"\s*:\s*\[\s*', _SCORED_ENTRY, piece, tok)


def _merges_part(text: str, merges: list[Json], tok: Tokenizer) -> _Part | None:
    if len(merges) != len(tok.merges):
        return None
    paired = isinstance(merges[0], list)
    patch = {}
    if merges != tok.merges:
        for n, (merge, known) in enumerate(zip(merges, tok.merges, strict=True)):
            if merge != (known.split(" ") if paired else known):
                patch[str(n)] = merge
    piece: dict[str, object] = {"list": "merges", "form": "pair" if paired else "text", "patch": patch}
    entry = _PAIR_ENTRY if paired else _TEXT_ENTRY
    return _locate(text, r'"merges"\s*:\s*\[\s*', entry, piece, tok)


def _locate(text: str, opening: str, entry: re.Pattern[str], piece: dict[str, object], tok: Tokenizer) -> _Part | None:
    """The piece with the file's own punctuation, if it reproduces the text at its position."""
    found = ((m, f) for m in re.finditer(opening, text) if (f := entry.match(text, m.end())) is not None)
    for match, first in islice(found, _MAX_PLACES):
        for ascii_only in (False, True):
            styled = {**piece, **first.groupdict(default=""), "ascii": ascii_only}
            try:
                body = _render(styled, tok)
            except ValueError:
                return None
            if text.startswith(body, match.end()):
                return match.end(), match.end() + len(body), styled
        if opening.startswith(r"\s"):
            break
    return None


def _lines(text: str, tok: Tokenizer) -> _Part | None:
    """merges.txt (perhaps a version line, then one merge a line) or vocab.txt (one token a line)."""
    words = tok.model == "bert"
    start = text.index("\n") + 1 if text.startswith("#version") and "\n" in text and not words else 0
    name, own = ("vocabulary", _texts(tok)) if words else ("merges", tok.merges)
    for between in ("\n", "\r\n"):
        lines = text[start:].removesuffix(between).split(between) if words else list(own)
        patch = {str(i): line for i, line in enumerate(lines) if i < len(own) and line != own[i]}
        piece: Piece = {"list": name, "form": "line", "between": between, "patch": patch}
        body = between.join(_apply_patch(own, patch, str))
        if body and len(patch) <= len(own) // 2 and text.startswith(body, start):
            return start, start + len(body), piece
    return None


def _render(piece: Mapping[str, object], tok: Tokenizer) -> str:
    """The text of a reference. Raises what `join` catches for an invalid piece."""
    quote: Callable[[str], str] = encode_basestring_ascii if piece.get("ascii") else encode_basestring
    between, form, patch = _punctuation(piece, "between"), piece.get("form"), _checked(piece["patch"], dict)
    if form in ("scored", "pair"):
        opening, comma, closing = (_punctuation(piece, name) for name in ("open", "comma", "close"))
        if form == "scored":
            scored = zip(tok.tokens, tok.scores, strict=True)
            pairs: Sequence[list[object]] = _apply_patch([[text, score] for text, score in scored], patch, list)
            pairs = pairs[: _checked(piece["n"], int)]
        else:
            pairs = _apply_patch([[*merge.split(" ")] for merge in tok.merges], patch, list)
        second: Callable[[object], str] = repr if form == "scored" else lambda right: quote(_checked(right, str))
        return between.join(
            f"{opening}{quote(_checked(left, str))}{comma}{second(right)}{closing}" for left, right in pairs
        )
    is_vocabulary = piece["list"] == "vocabulary"
    texts = _apply_patch(_texts(tok) if is_vocabulary else tok.merges, patch, str)
    if form is not None or not is_vocabulary:
        return between.join(map(quote, texts) if form == "text" else texts)
    colon, runs, total = _punctuation(piece, "colon"), _checked(piece["runs"], list), 0
    for start, stop in runs:
        total += stop - start
        if not 0 <= start < stop <= len(texts) or total > len(texts):
            raise ValueError(f"run {start} to {stop} of {len(texts)} tokens")
    return between.join(f"{quote(texts[i])}{colon}{i}" for start, stop in runs for i in range(start, stop))


def _checked(value: object, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.60} is not of type {kind.__name__}")
    return value


def _punctuation(piece: Mapping[str, object], name: str) -> str:
    """Ensures that a crafted piece adds only short punctuation between the entries."""
    text = _checked(piece[name], str)
    if not _PUNCTUATION.fullmatch(text):
        raise ValueError(f"{name} is not punctuation")
    return text


def _apply_patch(items: Sequence[_T], patch: Mapping[str, object], kind: type[_T]) -> Sequence[_T]:
    """The items with some of them replaced, by position."""
    if not patch:
        return items
    changed = list(items)
    for i, value in patch.items():
        changed[int(i)] = _checked(value, kind)
    return changed
