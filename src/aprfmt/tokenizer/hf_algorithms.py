"""A tokenizer.json or tokenizer.model by its algorithm: BPE, Unigram, WordPiece, SentencePiece."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from operator import add, methodcaller

from aprfmt.errors import CorruptError, UnsupportedError
from aprfmt.tokenizer import pre, rwkv, sentencepiece
from aprfmt.tokenizer.data import CHARSMAP, TOKEN_TYPE_COUNT, UNDERLINE, KvType, TokenType
from aprfmt.tokenizer.hf_documents import (
    Added,
    Document,
    added_decoder,
    adds_space_prefix,
    check_unicode,
    is_byte_level,
    named_specials,
    place_added,
    read_added,
    read_object,
    steps_of,
)
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import Json, JsonObject

ADDED_SCORE = -1000.0


HOLE_SCORE = -10000.0


_REACHED_BY_NO_MERGE = -1e6


_MERGE_SPACE = "\u0120"
"""Replaces a space inside half of a merge, which is itself written as two halves around a space."""


_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


_PRE_BY_CLASS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
_CLASS_BY_MODEL_TYPE = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt"), "GPT2Tokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
}
"""AutoTokenizer's default if tokenizer_config.json names no class."""


_GREEDY_NOTE = (
    "a Unigram model with byte tokens: llama.cpp lacks this algorithm and uses SentencePiece merges, so ids can differ"
)


def read_bpe(document: Document, vocab: Mapping[str, int], added: list[Added], named: set[str]) -> Tokenizer:
    """A BPE model: "gpt2", or "llama" if it works on pieces with byte fallback.

    Raises:
        CorruptError: merges of another form or of unknown tokens.
        UnsupportedError: affixes, which llama.cpp's algorithm does not have.
    """
    parsed, model, source = document.parsed, document.model, document.source
    affixes = [key for key in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if affixes:
        raise UnsupportedError(f"a BPE model with {affixes[0]} is not supported", path=source)
    tokens, types = place_added(vocab.items(), added, named, source)
    merges = _read_merges(model.get("merges", []), vocab.keys() | {token.content for token in added}, source)
    if model.get("byte_fallback") is True and not is_byte_level(parsed.get("pre_tokenizer")):
        unk = model.get("unk_token")
        for i, text in enumerate(tokens):
            if text == unk:
                types[i] = int(TokenType.UNKNOWN)
            elif _BYTE.fullmatch(text):
                types[i] = int(TokenType.BYTE)
        flags = {"add_space_prefix": adds_space_prefix(parsed)}
        scores = _scores_of_merges(tokens, types, merges)
        return Tokenizer("llama", tokens, merges, types, scores, pre="default", flags=flags)
    if "tokenizer.json" not in document.files:
        stated = document.settings.get("tokenizer_class")
        kind = str(stated or _CLASS_BY_MODEL_TYPE.get(str(document.config.get("model_type")))).removesuffix("Fast")
        name = _PRE_BY_CLASS.get(kind)
        note = "" if name else "vocab.json and merges.txt do not define a pre-tokenizer"
        return Tokenizer("gpt2", tokens, merges, types, pre=name, pre_note=note)
    choice = pre.detect(document.files["tokenizer.json"], parsed)
    return Tokenizer("gpt2", tokens, merges, types, pre=choice.name, pre_note=choice.detail)


def _read_merges(merges: Json, texts: set[str], source: str) -> list[str]:
    """Merges as "left right" however the file spells them; each half and the result must be a token."""
    if not isinstance(merges, list):
        raise CorruptError("model.merges is not an array", path=source)
    if (whole := _read_plain_merges(merges, texts)) is not None:
        return whole
    result = []
    for n, merge in enumerate(merges):
        halves = merge.split(" ") if isinstance(merge, str) else merge
        left, right = halves if isinstance(halves, list) and len(halves) == 2 else (None, None)
        if not isinstance(left, str) or not isinstance(right, str):
            raise CorruptError(f"model.merges[{n}] is not a pair of tokens: {merge!r}", path=source)
        if left not in texts or right not in texts or left + right not in texts:
            raise CorruptError(f"model.merges[{n}] names a token that is not in the vocabulary: {halves}", path=source)
        result.append(f"{left.replace(' ', _MERGE_SPACE)} {right.replace(' ', _MERGE_SPACE)}")
    return result


def _read_plain_merges(merges: list[Json], texts: set[str]) -> list[str] | None:
    """Merges of a valid list without spaces in tokens, hundreds of thousands at a time; None for any other list."""
    pairs = [merge for merge in merges if isinstance(merge, list)]
    lines = [merge for merge in merges if isinstance(merge, str)]
    if pairs and set(map(len, pairs)) == {2} and not any(" " in text for text in texts):
        try:
            lines = list(map(" ".join, pairs))  # type: ignore[arg-type]  # a TypeError where they are not texts
        except TypeError:
            return None
    if len(lines) < len(merges) or set(map(methodcaller("count", " "), lines)) != {1}:
        return None
    halves = " ".join(lines).split(" ")
    lefts, rights = halves[0::2], halves[1::2]
    if not texts.issuperset(lefts) or not texts.issuperset(rights):
        return None
    return lines if texts.issuperset(map(add, lefts, rights)) else None


def _scores_of_merges(tokens: list[str], types: list[int], merges: list[str]) -> list[float]:
    """Scores that make a best-score-first merger equal to the ranked merges: minus the rank.

    llama.cpp's SentencePiece merges the adjacent pair whose joined text has the best score; a text that several merges
    yield gets the rank of the first. Single characters and bytes need no merge and score 0.
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


def read_unigram(document: Document, added: list[Added], named: set[str]) -> Tokenizer:
    """A Unigram model: "t5" for llama.cpp, or "llama" with byte fallback.

    Raises CorruptError for entries of another form, LimitError for ids far beyond the pieces.
    """
    parsed, model, source = document.parsed, document.model, document.source
    pieces = _read_pieces(model.get("vocab"), source)
    tokens, types = place_added(((text, i) for i, (text, _) in enumerate(pieces)), added, named, source)
    unk = model.get("unk_id")
    if unk is not None:
        if type(unk) is not int or not 0 <= unk < len(pieces):
            raise CorruptError(f"model.unk_id is {unk!r}, but the vocabulary has {len(pieces)} tokens", path=source)
        types[unk] = int(TokenType.UNKNOWN)
    stored = [score for _, score in pieces] + [ADDED_SCORE] * (len(tokens) - len(pieces))
    greedy = model.get("byte_fallback") is True
    if greedy:
        for i, text in enumerate(tokens):
            if _BYTE.fullmatch(text):
                types[i] = int(TokenType.BYTE)
    tokenizer = Tokenizer(
        model="llama" if greedy else "t5", tokens=tokens, types=types,
        scores=[HOLE_SCORE if k == TokenType.UNUSED else s for k, s in zip(types, stored, strict=True)], pre="default",
        flags={"add_space_prefix": adds_space_prefix(parsed)}, special={} if unk is None else {"unk": unk},
    )  # fmt: skip
    if greedy:
        tokenizer.notes.append(_GREEDY_NOTE)
        return tokenizer
    tokenizer.flags["remove_extra_whitespaces"] = _merges_spaces(parsed)
    tokenizer.extra |= _read_charsmap(parsed, source) | _token_type_count(document.config)
    return tokenizer


def _read_pieces(vocab: Json, source: str) -> list[tuple[str, float]]:
    if not isinstance(vocab, list):
        raise CorruptError("model.vocab is not an array of tokens and scores", path=source)
    pieces = []
    for n, entry in enumerate(vocab):
        text, score = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        is_score = isinstance(score, int | float) and not isinstance(score, bool) and abs(score) < 1e30
        if not isinstance(text, str) or not isinstance(score, int | float) or not is_score:
            raise CorruptError(f"model.vocab[{n}] is not a token with a score: {entry!r}", path=source)
        pieces.append((text, float(score)))
    check_unicode("".join(text for text, _ in pieces), source)
    return pieces


def _read_charsmap(parsed: JsonObject, source: str) -> dict[str, tuple[KvType, object]]:
    """SentencePiece's compiled normalization, if the normalizer has one."""
    for step in steps_of(parsed.get("normalizer")):
        stored = step.get("precompiled_charsmap")
        if step.get("type") == "Precompiled" and stored:
            try:
                data = base64.b64decode(stored if isinstance(stored, str) else b"?", validate=True)
            except (binascii.Error, ValueError) as error:
                raise CorruptError(f"precompiled_charsmap is not base64: {error}", path=source) from error
            return _charsmap(data, source)
    return {}


def _charsmap(data: bytes, source: str) -> dict[str, tuple[KvType, object]]:
    """The entry for a charsmap. Raises CorruptError for one that llama.cpp would refuse: u32 length of a trie, trie,
    texts.
    """
    trie = int.from_bytes(data[:4], "little")
    if len(data) < 5 or trie + 4 >= len(data) or trie % 4:
        raise CorruptError(f"precompiled_charsmap has {len(data)} bytes, but declares a trie of {trie}", path=source)
    return {CHARSMAP: (("ARRAY", "UINT8"), data)}


def _merges_spaces(parsed: JsonObject) -> bool:
    """Whether runs of spaces are merged."""
    if any(step.get("type") == "WhitespaceSplit" for step in steps_of(parsed.get("pre_tokenizer"))):
        return True
    return any(
        step.get("type") == "Replace" and step.get("pattern") == {"Regex": " {2,}"}
        for step in steps_of(parsed.get("normalizer"))
    )


def _token_type_count(config: Mapping[str, Json]) -> dict[str, tuple[KvType, object]]:
    count = config.get("type_vocab_size")
    return {TOKEN_TYPE_COUNT: ("UINT32", count)} if type(count) is int and 0 <= count < 1 << 32 else {}


def to_phantom(text: str, kind: int, prefix: str = "##") -> str:
    """llama.cpp's spelling of a WordPiece token: words begin with U+2581, continuations with nothing."""
    if kind != TokenType.NORMAL:
        return text
    return text.removeprefix(prefix) if text.startswith(prefix) else UNDERLINE + text


def read_wordpiece(document: Document, vocab: Mapping[str, int], added: list[Added], named: set[str]) -> Tokenizer:
    """A WordPiece model: "bert". Raises CorruptError, UnsupportedError for rules that llama.cpp does not have."""
    source = document.source
    prefix = document.model.get("continuing_subword_prefix", "##")
    if not isinstance(prefix, str) or not prefix:
        raise UnsupportedError("a WordPiece model without a continuing subword prefix", path=source)
    unk = document.model.get("unk_token", "[UNK]")
    if not isinstance(unk, str) or unk not in vocab:
        raise CorruptError(f"model.unk_token {unk!r} is not in the vocabulary", path=source)
    tokens, types = place_added(vocab.items(), added, named, source)
    return Tokenizer(
        model="bert",
        tokens=[to_phantom(text, kind, prefix) for text, kind in zip(tokens, types, strict=True)],
        types=types,
        pre=pre.hash_name(document.files.get("tokenizer.json", b"")) or "default",
        flags=_bert_flags(document.parsed.get("normalizer")),
        special={"unk": vocab[unk]},
        extra=_token_type_count(document.config),
    )


def _bert_flags(normalizer: Json) -> dict[str, bool]:
    """Lower-casing and accent stripping; if unset, accents are stripped with lower-casing, as in BERT."""
    flags = {"lowercase": False, "strip_accents": False}
    for step in steps_of(normalizer):
        kind = step.get("type")
        if kind == "BertNormalizer":
            lowercase, accents = step.get("lowercase", True) is True, step.get("strip_accents")
            strips = lowercase if accents is None else accents is True
            flags = {"lowercase": lowercase, "strip_accents": strips}
        elif kind in ("Lowercase", "StripAccents"):
            flags["lowercase" if kind == "Lowercase" else "strip_accents"] = True
    return flags


def read_sentencepiece(files: Mapping[str, bytes], path: str, settings: JsonObject) -> tuple[Tokenizer, list[Added]]:
    """A tokenizer.model with added_tokens.json and tokenizer_config.json applied.

    Raises:
        CorruptError: not a SentencePiece model, or invalid added tokens.
        UnsupportedError: the algorithms "word" and "char", or spaces at the ends of words.
    """
    listed = read_object(files, "added_tokens.json")
    model = sentencepiece.read(files[path], path)
    if model.model_type not in (sentencepiece.UNIGRAM, sentencepiece.BPE) or model.suffix:
        kind = "with whitespace as suffix" if model.suffix else f"of type {model.model_type}"
        raise UnsupportedError(f"a SentencePiece model {kind} is not supported", path=path)
    special = [entry.get("content") for entry in added_decoder(settings) if entry.get("special") is True]
    entries: list[Json] = [{"content": t, "id": i, "special": t in special} for t, i in listed.items()]
    added = read_added({"added_tokens": entries}, settings, {}, "added_tokens.json")
    pieces = model.pieces
    vocab = ((piece.text, i) for i, piece in enumerate(pieces))
    tokens, types = place_added(vocab, added, named_specials(settings), path)
    changed = {token.id for token in added}
    for i, piece in enumerate(pieces):
        if piece.type != TokenType.NORMAL and (i not in changed or piece.type == TokenType.UNKNOWN):
            types[i] = piece.type
            if piece.type == TokenType.USER_DEFINED:
                tokens[i] = piece.text.replace(UNDERLINE, " ")
    scores = [
        HOLE_SCORE if i >= len(pieces) and kind == TokenType.UNUSED
        else ADDED_SCORE if i >= len(pieces) or (i in changed and kind != TokenType.UNKNOWN)
        else pieces[i].score
        for i, kind in enumerate(types)
    ]  # fmt: skip
    flags = {"add_space_prefix": model.add_dummy_prefix}
    ids = {role: i for role, i in model.ids.items() if i < len(pieces)}
    tokenizer = Tokenizer("llama", tokens, [], types, scores, pre="default", special=ids, flags=flags)
    if model.model_type == sentencepiece.UNIGRAM and model.byte_fallback:
        tokenizer.notes.append(_GREEDY_NOTE)
    elif model.model_type == sentencepiece.UNIGRAM:
        tokenizer.model = "t5"
        flags["remove_extra_whitespaces"] = model.remove_extra_whitespaces
        tokenizer.extra |= _charsmap(model.charsmap, path) if model.charsmap else {}
    return tokenizer, added


# --- RWKV ---

_RWKV_TURN_END = rwkv.to_escaped(b"\n\n")


def read_rwkv(text: str, path: str) -> Tokenizer:
    """The tokenizer of an RWKV vocabulary file. Raises as `rwkv.read_tokens`."""
    tokens = rwkv.read_tokens(text, path)
    types = [int(TokenType.CONTROL)] + [int(TokenType.NORMAL)] * (len(tokens) - 1)
    special = {"bos": 0, "eos": 0, **({"eot": tokens.index(_RWKV_TURN_END)} if _RWKV_TURN_END in tokens else {})}
    return Tokenizer("rwkv", tokens, types=types, special=special, n_added=1, chat_template="rwkv-world")
