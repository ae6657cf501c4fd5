"""Decides which tokenizer.json may run in this process: one whose every step is linear in the text and cannot panic.

All others run in a process with limits (`tokenizer.fast`). A regex is trusted by its exact text: slow ones cannot be
told by their form, and known models nest repetitions too.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from aprfmt.tokenizer.growth import growth
from aprfmt.tokenizer.rules import RULES, SUFFIX, SUFFIX_BY_CLASSES
from aprfmt.types import Json, JsonObject

_INNER = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
_MOST_STEPS = 32
_MOST_GROWTH = 8
_MOST_WORD = 256
"""Maximum characters of a word for WordPiece, and of a piece for Unigram: their time is quadratic."""

_SLOW = frozenset((
    r"\s+$", r"(?=(\d{3})+(?!\d))", r"(?=([0-9]{3})+(?![0-9]))", r"[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
))  # fmt: skip
"""Known patterns that take quadratic time on a long run of white space, digits or letters."""


def spell(pattern: str) -> str:
    """Normalizes the spellings in use: contractions by flag or by class, line ends literal or escaped."""
    spelled = pattern.replace(SUFFIX_BY_CLASSES, SUFFIX).replace("\r", r"\r").replace("\n", r"\n")
    return "digits" if spelled == r"\p{N}" else spelled


_PATTERNS = frozenset((
    *(spell(pattern) for row in RULES.values() for pattern in (*row.splits, *row.llama) if pattern not in _SLOW),
    " ", " {2,}", r"\s", r"\s+", r"\d", "[0-9]",
))  # fmt: skip


def load_unique(text: bytes) -> tuple[Json, bool]:
    """The parsed text, and whether no object has a duplicate key: readers differ in which one they use.

    Raises ValueError, RecursionError.
    """
    unique = True

    def build(pairs: list[tuple[str, Json]]) -> JsonObject:
        nonlocal unique
        made = dict(pairs)
        unique = unique and len(made) == len(pairs)
        return made

    return json.loads(text, object_pairs_hook=build), unique


def is_known(parsed: Json) -> bool:
    """Whether every part of a parsed tokenizer.json is known to be fast and not to panic."""
    return (
        isinstance(parsed, dict)
        and _is_quick_model(parsed.get("model"))
        and all(_are_known(key, parsed.get(key)) for key in _INNER)
    )


def _is_quick_model(model: Json) -> bool:
    if not isinstance(model, dict) or not isinstance(model.get("type", "BPE"), str):
        return False
    if "type" not in model and not _BPE_KEYS.issuperset(model):
        return False
    check = _MODELS.get(str(model.get("type", "BPE")))
    return check is not None and check(model)


def _are_known(key: str, step: Json) -> bool:
    if step is None:
        return True
    if growth(step) > _MOST_GROWTH:
        return False
    left: list[Json] = [step]
    n_steps = 0
    while left:
        step, n_steps = left.pop(), n_steps + 1
        if not isinstance(step, dict) or n_steps > _MOST_STEPS:
            return False
        if step.get("type") == "Sequence":
            inner = step.get(_INNER[key])
            if not isinstance(inner, list):
                return False
            left += inner
        elif (check := _STEPS[key].get(str(step.get("type")))) is None or not check(step):
            return False
    return True


def _any(step: JsonObject) -> bool:
    return True


def _has_known_pattern(step: JsonObject) -> bool:
    pattern = step.get("pattern")
    if not isinstance(pattern, dict) or len(pattern) != 1:
        return False
    literal, regex = pattern.get("String"), pattern.get("Regex")
    if isinstance(literal, str):
        return bool(literal)
    return isinstance(regex, str) and spell(regex) in _PATTERNS


def _is_plain_template(step: JsonObject) -> bool:
    """Whether the template names only listed special tokens and only the first text."""
    single, listed = step.get("single"), step.get("special_tokens")
    if not isinstance(single, list) or not isinstance(listed, dict):
        return False
    for piece in single:
        special, text = (piece.get(key) for key in ("SpecialToken", "Sequence")) if isinstance(piece, dict) else (0, 0)
        if isinstance(special, dict):
            named = listed.get(str(special.get("id")))
            ids, tokens = (named.get(key) for key in ("ids", "tokens")) if isinstance(named, dict) else (None, None)
            if not isinstance(ids, list) or not isinstance(tokens, list) or len(ids) != len(tokens):
                return False
        elif not isinstance(text, dict) or text.get("id") != "A":
            return False
    return True


def _is_small(value: Json, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _has_short_pieces(model: JsonObject) -> bool:
    vocab = model.get("vocab")
    return isinstance(vocab, list) and all(
        isinstance(entry, list) and entry and isinstance(entry[0], str) and len(entry[0]) <= _MOST_WORD
        for entry in vocab
    )


_BPE_KEYS = frozenset((
    "type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges", "vocab", "merges",
))  # fmt: skip
_MODELS: dict[str, Callable[[JsonObject], bool]] = {
    "BPE": lambda model: not model.get("continuing_subword_prefix"),
    "Unigram": _has_short_pieces,
    "WordLevel": _any,
    "WordPiece": lambda model: _is_small(model.get("max_input_chars_per_word", 100), _MOST_WORD),
}
_STEPS: dict[str, dict[str, Callable[[JsonObject], bool]]] = {
    "normalizer": {
        **dict.fromkeys(
            ("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Strip",
             "StripAccents"), _any,
        ),
        "Replace": _has_known_pattern,
    },
    "pre_tokenizer": {
        **dict.fromkeys(
            ("BertPreTokenizer", "ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit"),
            _any,
        ),
        "Split": _has_known_pattern,
    },
    "post_processor": {
        **dict.fromkeys(("BertProcessing", "ByteLevel", "RobertaProcessing"), _any),
        "TemplateProcessing": _is_plain_template,
    },
    "decoder": {
        **dict.fromkeys(("BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "WordPiece"), _any),
        "Replace": _has_known_pattern,
        "Strip": lambda step: _is_small(step.get("start"), 1) and _is_small(step.get("stop"), 0),
    },
}  # fmt: skip
