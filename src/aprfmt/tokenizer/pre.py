"""Detects llama.cpp's pre-tokenizer for a tokenizer.json: by the hash of a probe text, else by structure.

A byte-level BPE in a GGUF names its splitting rules (`tokenizer.ggml.pre`); the regexes themselves are compiled into
llama.cpp. The hash identifies tokenizers that llama.cpp knows; the structure of `pre_tokenizer` also finds the many
fine-tunes and new vocabularies with one of the same rule lists.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.errors import UsageError
from aprfmt.tokenizer.growth import check_growth
from aprfmt.tokenizer.known import is_known, spell
from aprfmt.tokenizer.rules import IGNORE_MERGES, RULES, PreTokenizerRule, rule
from aprfmt.types import Json, JsonObject

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DATA = json.loads(Path(__file__).with_suffix(".json").read_bytes())

PROBE: str = _DATA["probe"]
"""Text that distinguishes the known pre-tokenizers: whitespace runs, emoji, digits, scripts, contractions. It and the
digests are constants of llama.cpp's Hugging Face converter.
"""

HASHES: dict[str, str] = _DATA["hashes"]
"""SHA-256 of the str() of the list of the probe's ids, special tokens included -> value of `tokenizer.ggml.pre`."""

PRE_NAMES: frozenset[str] = frozenset(_DATA["names"])
"""The values of `tokenizer.ggml.pre` for byte-level BPE that llama.cpp knows; it refuses models with any other. Other
algorithms ignore the name.
"""


def check_name(name: str) -> None:
    """Raises UsageError, with similar names, unless llama.cpp knows `name`."""
    if name not in PRE_NAMES:
        near = difflib.get_close_matches(name.lower(), sorted(PRE_NAMES), n=3, cutoff=0.5) or ["default"]
        raise UsageError(
            f"llama.cpp has no pre-tokenizer {name!r}",
            hint=f"nearest known: --pre {near[0]}" + (f" (also {', '.join(near[1:])})" if len(near) > 1 else ""),
        )


def age_note(name: str | None) -> str | None:
    """What users of an older llama.cpp should know about a name; None if all versions in use load it."""
    if name not in _SINCE:
        return None
    build, older = _SINCE[name]
    return (
        f"the pre-tokenizer {name} needs llama.cpp b{build} or newer; for an older one use --pre {older}, "
        "which splits words before combining marks"
    )


@dataclass(frozen=True, slots=True)
class PreChoice:
    """The result of `detect`: llama.cpp's name or None, how it was found, and one sentence for the user."""

    name: str | None
    how: str
    detail: str


_SHOWN = 60
_EXACT = {"gpt-4o": "granite-embed-multi-97m"}
"""llama.cpp's rule of the first name excludes combining marks from words, unlike the tokenizers' regex; the rule of the
second includes them. It takes whole tokens before merges, so it is correct if every token is also the result of its
merges. tests/tokenizer/test_tokenizer_ids.py counts both.
"""
_SINCE = {"granite-embed-multi-97m": (9484, "gpt-4o")}
"""Names that only newer llama.cpp versions know: the first build that loads them, and the nearest older name."""


def detect(tokenizer_json: bytes, parsed: JsonObject | None = None) -> PreChoice:
    """Finds llama.cpp's name for the pre-tokenizer of a tokenizer.json.

    Args:
        tokenizer_json: the file's bytes.
        parsed: the same, parsed, if available.

    Returns:
        how = "hash" (known tokenizer), "structure" (same rules as a known one), or "none" with name None: not
        a byte-level BPE, or rules that llama.cpp does not have.
    """
    if parsed is None:
        try:
            parsed = json.loads(tokenizer_json)
        except (ValueError, RecursionError) as error:
            return PreChoice(None, "none", f"tokenizer.json is not JSON text: {error}")
    model = parsed.get("model") if isinstance(parsed, dict) else None
    if not isinstance(parsed, dict) or not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        return PreChoice(None, "none", "only byte-level BPE tokenizers have a pre-tokenizer in GGUF")
    if model.get("byte_fallback") is True and _steps(parsed.get("pre_tokenizer")) is None:
        return PreChoice(None, "none", "a SentencePiece-style BPE needs no pre-tokenizer name")
    return _choose(tokenizer_json, parsed, model.get("ignore_merges") is True)


def _choose(tokenizer_json: bytes, parsed: JsonObject, ignore_merges: bool) -> PreChoice:
    """The hash's result if it is compatible with the merge rule, else the structure's, else the hash's anyway."""
    alike = _by_structure(parsed, ignore_merges)
    if alike in _EXACT and _merges_give_every_token(parsed):
        detail = f"its splitting rules match {_EXACT[alike]}, and its merges produce every token"
        return PreChoice(_EXACT[alike], "structure", detail)
    hashed = hash_name(tokenizer_json, parsed)
    row = rule(hashed)
    # The probe text does not distinguish all rules: the structure may match another one than the hash.
    contradicts = alike is not None and row is not None and row.splits != RULES[alike].splits
    if hashed is not None and ignore_merges == (hashed in IGNORE_MERGES) and not contradicts:
        return PreChoice(hashed, "hash", f"its ids of the probe text match {hashed}")
    if alike is not None:
        return PreChoice(alike, "structure", f"its splitting rules match {alike}")
    if hashed is not None:
        detail = f"its ids of the probe text match {hashed}, but its merge rule differs"
        return PreChoice(hashed, "hash", detail)
    return PreChoice(None, "none", _unknown(parsed, ignore_merges))


def _unknown(parsed: JsonObject, ignore_merges: bool) -> str:
    """Why no known rule matches: the nearest one and how it differs."""
    own = _spell_steps(parsed.get("pre_tokenizer"))
    if not own:
        return "it has no splitting rules, which llama.cpp requires of a byte-level BPE"
    known = {name: [*map(spell, row.splits), _final(row)] for name, row in RULES.items() if row.letters == "bytes"}
    mine = [part for step in own for part in _alternatives(step)]
    parts = {name: [part for step in steps for part in _alternatives(step)] for name, steps in known.items()}
    # Count equal alternatives first, then compare the spellings.
    name = max(parts, key=lambda name: (_alike(mine, parts[name]), _alike("".join(mine), "".join(parts[name]))))
    difference = _difference(mine, parts[name])
    if (normalizer := parsed.get("normalizer")) and not _is_nfc(normalizer):
        kind = normalizer.get("type") if isinstance(normalizer, dict) else normalizer
        difference += f"; llama.cpp also has no normalizer {kind}"
    elif own == known[name] and ignore_merges != RULES[name].ignore_merges:
        difference = "only one of the two matches whole tokens before merging"
    return f"llama.cpp lacks its splitting rules; the nearest is {name}: {difference}"


def _final(row: PreTokenizerRule) -> str:
    return "byte-level-regex" if row.gpt2_regex else "byte-level"


def _is_nfc(normalizer: Json) -> bool:
    return isinstance(normalizer, dict) and normalizer.get("type") == "NFC"


def _merges_give_every_token(parsed: JsonObject) -> bool:
    """Whether merging the characters of each token yields that token; False without `tokenizers`."""
    try:
        from tokenizers import Tokenizer, models

        vocab, merges = _lists(parsed)
        ids = {text: i for text, i in vocab.items() if isinstance(i, int)}
        plain = Tokenizer(models.BPE(vocab=ids, merges=[_halves(merge) for merge in merges]))
        added = _added_texts(parsed)
        texts = [text for text in vocab if text not in added]
        return all(len(found.ids) == 1 for found in plain.encode_batch_fast(texts))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException:  # as in hash_name
        return False


def hash_name(tokenizer_json: bytes, parsed: JsonObject | None = None) -> str | None:
    """llama.cpp's own choice, by the ids of the probe text; None if unknown or without `tokenizers`.

    With `parsed`, the same as an object with verified tokens and merges, only the relevant part of it is built.
    """
    try:
        check_growth(json.loads(tokenizer_json) if parsed is None else parsed)
        ids = probe_ids(parsed) if parsed is not None and is_known(parsed) else None
        if ids is None:
            from aprfmt.tokenizer.fast import load

            ids = load(tokenizer_json).encode([PROBE], special=True)[0].ids
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException:  # a bare Exception for a file that it cannot use, its own class for a Rust panic
        return None
    return HASHES.get(hashlib.sha256(str(ids).encode()).hexdigest())


def _by_structure(parsed: JsonObject, ignore_merges: bool) -> str | None:
    """The first rule with the same steps, or None; a normalizer other than NFC changes the ids."""
    if parsed.get("normalizer") and not _is_nfc(parsed.get("normalizer")):
        return None
    steps = _steps(parsed.get("pre_tokenizer"))
    if steps is None:
        return None
    for name, row in RULES.items():
        known = [*map(spell, row.splits), _final(row)]
        if steps == known and row.ignore_merges == ignore_merges and row.letters == "bytes":
            return name
    return None


def _parts(pre_tokenizer: Json) -> list[JsonObject]:
    """The steps of a pre-tokenizer, [] for another structure."""
    if not isinstance(pre_tokenizer, dict):
        return []
    inner = pre_tokenizer.get("pretokenizers") if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    parts = [part for part in inner if isinstance(part, dict)] if isinstance(inner, list) else []
    return parts if isinstance(inner, list) and len(parts) == len(inner) else []


def _spell_steps(pre_tokenizer: Json) -> list[str]:
    """The steps in canonical form; unknown ones by their name and settings."""
    return [
        _step(part) or " ".join(f"{key}={value}" for key, value in sorted(part.items(), key=str))[:400]
        for part in _parts(pre_tokenizer)
    ]


def _steps(pre_tokenizer: Json) -> list[str] | None:
    """The steps in canonical form, ending in the byte-level one; None for unknown steps."""
    parts = _parts(pre_tokenizer)
    if not parts:
        return None
    steps = [_step(part) for part in parts]
    known = [step for step in steps if step is not None]
    if len(known) < len(steps) or not known[-1].startswith("byte-level"):
        return None
    return known if not any(step.startswith("byte-level") for step in known[:-1]) else None


def _step(part: JsonObject) -> str | None:
    kind = part.get("type")
    if kind == "ByteLevel" and part.get("add_prefix_space") is not True:
        return "byte-level" if part.get("use_regex") is False else "byte-level-regex"
    if kind == "Digits" and part.get("individual_digits") is True:
        return "digits"
    pattern = part.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    # Removing the text between matches equals isolating the matches if the regex covers every text.
    isolates = (part.get("behavior"), part.get("invert")) in (("Isolated", False), ("Removed", True))
    return spell(regex) if kind == "Split" and isinstance(regex, str) and isolates else None


# --- the nearest known rule ---


def _alike(a: Sequence[str], b: Sequence[str]) -> float:
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()


def _difference(mine: Sequence[str], theirs: Sequence[str]) -> str:
    """A clause about the first alternative in which llama.cpp's rule differs."""
    for kind, a, b, c, d in difflib.SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
        here, there = _shorten(mine[a:b]), _shorten(theirs[c:d])
        if kind == "replace":
            return f"it has {there} where this tokenizer has {here}"
        if kind == "delete":
            return f"it lacks {here}, which this tokenizer has"
        if kind == "insert":
            return f"it has {there}, which this tokenizer lacks"
    return "its splitting rules are the same"


def _shorten(parts: Sequence[str]) -> str:
    text = "|".join(parts)
    return f"`{text if len(text) <= _SHOWN else text[: _SHOWN - 1] + '…'}`"


def _alternatives(pattern: str) -> Iterator[str]:
    """The top-level alternatives of a regex, split at every `|` outside of groups and classes."""
    start, depth, in_class, escaped = 0, 0, False, False
    for i, c in enumerate(pattern):
        if escaped:
            escaped = False
        elif c == "\\":
            escaped = True
        elif c == "[":
            in_class = True
        elif c == "]":
            in_class = False
        elif not in_class and c in "()":
            depth += 1 if c == "(" else -1
        elif c == "|" and depth == 0 and not in_class:
            yield pattern[start:i]
            start = i + 1
    yield pattern[start:]


# --- ids of the probe text ---


_MOST_PARTS = 200_000
"""Maximum parts of all pieces; a normalizer that expands the text, without a splitter, leaves millions."""


def probe_ids(parsed: JsonObject) -> list[int] | None:
    """Ids of the probe text by the BPE tokenizer `parsed` (tokenizer.json); None if this shortcut does not apply.

    Building the whole tokenizer takes longer than everything else that an import does before it moves bytes. The
    tokenizer's own normalizer and pre-tokenizer split the probe text; only tokens that are parts of the pieces, and
    merges whose result is one, can take part.
    """
    model = parsed.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    pieces = _pieces(parsed)
    if pieces is None or sum(len(piece) * (len(piece) + 1) // 2 for piece in set(pieces)) > _MOST_PARTS:
        return None
    parts = {piece[i:j] for piece in set(pieces) for i in range(len(piece)) for j in range(i + 1, len(piece) + 1)}
    vocab, merges = _lists(parsed)
    if model.get("unk_token") is None and not all(char in vocab for piece in pieces for char in piece):
        return None  # unknown characters are dropped, and their neighbours may merge
    kept = [merge for merge in merges if "".join(_halves(merge)) in parts]
    small = _with_model(parsed, {text: vocab[text] for text in parts if text in vocab}, kept)
    ids: list[int] = small.encode(PROBE).ids
    return ids


def _pieces(parsed: JsonObject) -> list[str] | None:
    """The model's input for the probe text; None if added tokens split it."""
    shell = _with_model(parsed, {}, [])
    text = PROBE if shell.normalizer is None else shell.normalizer.normalize_str(PROBE)
    if any(content in PROBE or content in text for content in _added_texts(parsed)):
        return None
    if shell.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in shell.pre_tokenizer.pre_tokenize_str(text)]


def _added_texts(parsed: JsonObject) -> set[str]:
    listed = parsed.get("added_tokens")
    entries = [token for token in listed if isinstance(token, dict)] if isinstance(listed, list) else []
    return {text for token in entries if isinstance(text := token.get("content"), str)}


def _lists(parsed: JsonObject) -> tuple[JsonObject, list[Json]]:
    """Vocabulary and merges of a BPE model; empty if they have another form."""
    model = parsed["model"]
    assert isinstance(model, dict)
    vocab, merges = model.get("vocab"), model.get("merges")
    return vocab if isinstance(vocab, dict) else {}, merges if isinstance(merges, list) else []


def _halves(merge: Json) -> tuple[str, str]:
    """The two tokens of a merge. Raises ValueError for another form."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge if isinstance(merge, list) else []
    return str(left), str(right)


def _with_model(parsed: JsonObject, vocab: JsonObject, merges: list[Json]) -> Tokenizer:
    """The tokenizer with another vocabulary, and without truncation and padding: the probe is short."""
    from tokenizers import Tokenizer

    model = parsed["model"]
    assert isinstance(model, dict)
    always = [model.get("unk_token"), *(f"<0x{byte:02X}>" for byte in range(256))]
    own, _ = _lists(parsed)
    vocab |= {text: own[text] for text in always if isinstance(text, str) and text in own}
    small = {**model, "vocab": vocab, "merges": merges}
    return Tokenizer.from_str(json.dumps({**parsed, "model": small, "truncation": None, "padding": None}))
