"""Writes Hugging Face tokenizer files for a tokenizer without any, such as a GGUF's."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from aprfmt.errors import UnsupportedError
from aprfmt.tokenizer import generation, rwkv
from aprfmt.tokenizer.data import CHARSMAP, NAMED_TEMPLATES, UNDERLINE, TokenizerData, TokenType
from aprfmt.tokenizer.rules import LINES, UNNAMED, PreTokenizerRule, rule

Parts: TypeAlias = dict[str, object]
"""normalizer, pre_tokenizer, decoder and model of a tokenizer.json."""

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTE_TOKENS = {f"<0x{n:02X}>" for n in range(256)}
_ADDED = {int(TokenType.CONTROL): True, int(TokenType.UNKNOWN): True, int(TokenType.USER_DEFINED): False}
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

# llama.cpp's defaults: special ids, add_bos, add_eos.
_ASSUMED: dict[str, tuple[dict[str, int], bool, bool]] = {
    "llama": ({"bos": 1, "eos": 2, "unk": 0}, True, False),
    "gemma4": ({}, True, False),
    "t5": ({"eos": 1, "unk": 2, "pad": 0}, False, True),
    "bert": ({"bos": 101, "sep": 102, "unk": 100, "pad": 0, "mask": 103}, True, True),
}


def to_hf_files(tok: TokenizerData, *, max_length: int | None = None, name: str | None = None) -> dict[str, bytes]:
    """The tokenizer's files by name: its original ones, else built from its lists.

    Built files encode as llama.cpp does with the same tokenizer. Those of a byte-level BPE have NFC normalization if
    the original tokenizers of that pre-tokenizer have it; llama.cpp has none, so text that is not in NFC differs.

    Args:
        tok: the tokenizer.
        max_length: context length for tokenizer_config.json.
        name: the model's name, from which llama.cpp infers that special tokens swallow following spaces.

    Raises:
        UnsupportedError: an algorithm or splitting rules that tokenizer.json cannot express, or missing lists.
    """
    if tok.files:
        return dict(tok.files)
    if not tok.tokens:
        raise UnsupportedError(
            "the tokenizer has no tokens, so tokenizer.json cannot be written",
            hint="set the original tokenizer with --tokenizer",
        )
    tok = _add_assumed(tok)
    added = _list_added(tok, name or "")
    files = {
        "tokenizer.json": _tokenizer_json(tok, added),
        "tokenizer_config.json": _tokenizer_config(tok, added, max_length),
        "special_tokens_map.json": {f"{role}_token": _content(tok, role) for role in _ROLES if _content(tok, role)},
    }
    result = {name: _dump(value) for name, value in files.items()}
    if tok.model == "rwkv" and (vocabulary := rwkv.to_vocabulary(tok)) is not None:
        result[rwkv.FILE_NAME] = vocabulary.encode()
    if (generated := generation.to_file(tok)) is not None:
        result[generation.FILE_NAME] = generated
    if tok.chat_template is not None and not tok.chat_templates and tok.chat_template not in NAMED_TEMPLATES:
        result["chat_template.jinja"] = tok.chat_template.encode("utf-8", "replace")
    return result


def _add_assumed(tok: TokenizerData) -> TokenizerData:
    """The tokenizer with llama.cpp's defaults made explicit."""
    known = rule(tok.pre or UNNAMED)
    ids, add_bos, add_eos = _ASSUMED.get(tok.model, ({}, known is not None and known.add_bos, False))
    special = {role: i for role, i in {**ids, **tok.special}.items() if i < len(tok.tokens)}
    if tok.model == "bert":  # always put around a text, whatever the flags say
        special["bos"] = tok.special.get("bos", tok.special.get("cls", special.get("bos", 0)))
        special["eos"] = special.get("sep", 0)
        return replace(tok, special=special, flags={**tok.flags, "add_bos": True, "add_eos": True})
    flags = {"add_bos": add_bos, "add_eos": add_eos, **tok.flags}
    if tok.model in ("gpt2", "gemma4") and known is not None and known.always_bos and "bos" in special:
        flags["add_bos"] = True
    return replace(tok, special=special, flags=flags)


def _dump(value: object) -> bytes:
    """Indented JSON; text that is not Unicode cannot be stored in Hugging Face files and becomes question marks."""
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "replace")


def _content(tok: TokenizerData, role: str) -> str | None:
    i = tok.special.get(role)
    return tok.tokens[i] if i is not None and i < len(tok.tokens) else None


def _tokens_and_types(tok: TokenizerData) -> list[tuple[str, int]]:
    """Text and type of each id."""
    types = tok.types or [int(TokenType.NORMAL)] * len(tok.tokens)
    return list(zip(tok.tokens, types, strict=True))


def _list_added(tok: TokenizerData, name: str) -> list[dict[str, object]]:
    """Entries of added_tokens: every token that is searched for in the text before it is split."""
    swallows = any(word in name.lower() for word in ("phi-3", "phi3"))
    return [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": swallows and text not in ("<unk>", "<s>", "<|endoftext|>"),
            "normalized": False,
            "special": _ADDED[kind],
        }
        for i, (text, kind) in enumerate(_tokens_and_types(tok))
        if kind in _ADDED
    ]


def _tokenizer_json(tok: TokenizerData, added: list[dict[str, object]]) -> dict[str, object]:
    parts = _PARTS.get(tok.model, _bpe_parts)(tok)
    decoder = parts["decoder"]
    of_bytes = isinstance(decoder, dict) and decoder["type"] == "ByteLevel"
    bare = {**_BYTE_LEVEL, "trim_offsets": False} if of_bytes else None
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"], "post_processor": _post_processor(tok) or bare,
        "decoder": parts["decoder"], "model": parts["model"],
    }  # fmt: skip


def _bpe_parts(tok: TokenizerData) -> Parts:
    """normalizer, pre_tokenizer, decoder and model of a tokenizer with ranked merges, by its pre-tokenizer's rule."""
    known = rule(tok.pre or UNNAMED)
    if tok.model not in ("gpt2", "whitespace") or known is None:
        what = f"the pre-tokenizer {tok.pre}" if tok.model == "gpt2" else f"a {tok.model} tokenizer"
        raise UnsupportedError(
            f"{what} cannot be written as tokenizer.json: its rules are unknown",
            hint="set the original tokenizer with --tokenizer, or the pre-tokenizer with --pre",
        )
    if tok.model == "whitespace":
        return _words_parts(tok, {"type": "WhitespaceSplit"})
    if known.letters == "pieces":
        return _pieces_parts(tok)
    return _words_parts(tok, _split(known.splits[0])) if known.letters == "words" else _byte_level_parts(tok, known)


def _words_parts(tok: TokenizerData, step: dict[str, object]) -> Parts:
    """Merges of the characters of words; a character that is not a token is dropped."""
    vocab = _last_ids(tok)
    lower = tok.model == "whitespace" and tok.flags.get("lowercase", False)
    return {
        "normalizer": {"type": "Lowercase"} if lower else None,
        "pre_tokenizer": step,
        "decoder": None,
        "model": _bpe_model(vocab, _known_merges(map(_halves, tok.merges), vocab), pieces=_has_bytes(tok)),
    }


def _has_bytes(tok: TokenizerData) -> bool:
    return not _BYTE_TOKENS - set(tok.tokens)


def _known_merges(halves: Iterable[tuple[str, str]], vocab: Mapping[str, int]) -> list[list[str]]:
    return [[a, b] for a, b in halves if a in vocab and b in vocab and a + b in vocab]


def _byte_level_parts(tok: TokenizerData, known: PreTokenizerRule) -> Parts:
    # The first of equal texts keeps its id; padding ids are not tokens.
    entries = [(i, text) for i, (text, kind) in enumerate(_tokens_and_types(tok)) if kind != TokenType.UNUSED]
    vocab = dict(sorted({text: i for i, text in reversed(entries)}.items(), key=lambda entry: entry[1]))
    merges = _known_merges(map(_halves, tok.merges), vocab)
    digits = {"type": "Digits", "individual_digits": True}
    steps = [digits if split == "digits" else _split(split) for split in known.splits]
    steps.append({**_BYTE_LEVEL, "use_regex": known.gpt2_regex})
    return {
        "normalizer": {"type": "NFC"} if known.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0],
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True},
        "model": _bpe_model(vocab, merges, ignore_merges=known.ignore_merges),
    }


def _bpe_model(
    vocab: dict[str, int],
    merges: list[list[str]],
    unk: str | None = None,
    *,
    pieces: bool = False,
    ignore_merges: bool = False,
) -> dict[str, object]:
    """A BPE of the byte alphabet, or of pieces with byte fallback."""
    return {
        "type": "BPE", "dropout": None, "unk_token": unk, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": pieces, "byte_fallback": pieces, "ignore_merges": ignore_merges, "vocab": vocab, "merges": merges,
    }  # fmt: skip


def _halves(merge: str) -> tuple[str, str]:
    """A merge's two tokens: llama.cpp cuts at the first space after the first character."""
    cut = merge.find(" ", 1)
    return (merge[:cut], merge[cut + 1 :]) if cut > 0 else (merge, "")


def _split(regex: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _post_processor(tok: TokenizerData) -> dict[str, object] | None:
    bos = _content(tok, "bos") if tok.flags["add_bos"] else None
    eos = _content(tok, "eos") if tok.flags["add_eos"] else None
    if bos is None and eos is None:
        return None

    def around(name: str, type_id: int) -> list[dict[str, object]]:
        parts = [("SpecialToken", bos), ("Sequence", name), ("SpecialToken", eos)]
        return [{kind: {"id": text, "type_id": type_id}} for kind, text in parts if text is not None]

    used = {text: tok.special[role] for role, text in (("bos", bos), ("eos", eos)) if text is not None}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in used.items()},
    }


def _tokenizer_config(tok: TokenizerData, added: list[dict[str, object]], max_length: int | None) -> dict[str, object]:
    config: dict[str, object] = {
        "add_bos_token": tok.flags["add_bos"],
        "add_eos_token": tok.flags["add_eos"],
        "add_prefix_space": tok.flags.get("add_space_prefix", False),
        "added_tokens_decoder": {
            str(entry["id"]): {key: value for key, value in entry.items() if key != "id"} for entry in added
        },
    }
    config |= {f"{role}_token": _content(tok, role) for role in _ROLES if _content(tok, role) is not None}
    config["clean_up_tokenization_spaces"] = False
    if max_length:
        config["model_max_length"] = max_length
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if tok.chat_templates:
        named = {"default": tok.chat_template, **tok.chat_templates}
        config["chat_template"] = [{"name": n, "template": text} for n, text in named.items() if text is not None]
    return config


# --- pieces: SentencePiece merges and Unigram ---

_TO_UNDERLINE: dict[str, object] = {"type": "Replace", "pattern": {"String": " "}, "content": UNDERLINE}
_PREPEND: dict[str, object] = {"type": "Prepend", "prepend": UNDERLINE}
_DECODERS: tuple[dict[str, object], ...] = (
    {"type": "Replace", "pattern": {"String": UNDERLINE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
)
_STRIP_ONE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _llama_parts(tok: TokenizerData) -> Parts:
    """normalizer, pre_tokenizer, decoder and model of a tokenizer that merges pieces, with byte fallback.

    llama.cpp joins the two neighbours whose text has the best score; as ranked merges that is every way to cut a token
    into two tokens, best score first.

    Raises UnsupportedError unless all 256 byte tokens are present.
    """
    missing = _BYTE_TOKENS - set(tok.tokens)
    if missing:
        raise UnsupportedError(
            f"a {tok.model} tokenizer without the byte token {min(missing)} cannot be written as tokenizer.json",
            hint="set the original tokenizer with --tokenizer",
        )
    prefix = tok.flags.get("add_space_prefix", True)
    vocab = _last_ids(tok)
    merges = _known_merges(_merges_of_scores(tok, vocab), vocab)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [_PREPEND, _TO_UNDERLINE]} if prefix else _TO_UNDERLINE,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*_DECODERS, *([_STRIP_ONE] if prefix else [])]},
        "model": _bpe_model(vocab, merges, tok.tokens[tok.special.get("unk", 0)], pieces=True),
    }


def _pieces_parts(tok: TokenizerData) -> Parts:
    """Parts for ranked merges of SentencePiece pieces, as in Gemma 4.

    Without all byte tokens, unknown characters are dropped.
    """
    vocab = _last_ids(tok)
    unk = tok.tokens[tok.special.get("unk", 0)] if tok.model == "gemma4" else None
    return {
        "normalizer": _TO_UNDERLINE,
        "pre_tokenizer": _split(LINES),
        "decoder": {"type": "Sequence", "decoders": list(_DECODERS)},
        "model": _bpe_model(vocab, _known_merges(map(_halves, tok.merges), vocab), unk, pieces=_has_bytes(tok)),
    }


def _last_ids(tok: TokenizerData) -> dict[str, int]:
    """Ids by text without the pads; of equal texts llama.cpp finds the last."""
    return {text: i for i, (text, kind) in enumerate(_tokens_and_types(tok)) if kind != TokenType.UNUSED}


def _merges_of_scores(tok: TokenizerData, vocab: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The merges equivalent to scores, best first; ties by the ids of their halves."""
    scores = tok.scores or [0.0] * len(tok.tokens)
    found = []
    for text, i in vocab.items():
        for cut in range(1, len(text)):
            left, right = vocab.get(text[:cut]), vocab.get(text[cut:])
            if left is not None and right is not None:
                found.append((-scores[i], i, left, right))
    found.sort()
    return ((tok.tokens[left], tok.tokens[right]) for _, _, left, right in found)


def _unigram_parts(tok: TokenizerData) -> Parts:
    """normalizer, pre_tokenizer, decoder and model of a Unigram tokenizer.

    Raises UnsupportedError without scores, or with one that is not a finite number.
    """
    if len(tok.scores) != len(tok.tokens) or not all(map(math.isfinite, tok.scores)):
        raise UnsupportedError(
            "a t5 tokenizer without a score for each token cannot be written as tokenizer.json",
            hint="set the original tokenizer with --tokenizer",
        )
    typed = _tokens_and_types(tok)
    unk = tok.special.get("unk", 2)
    normal = [score for score, (_, kind) in zip(tok.scores, typed, strict=True) if kind == TokenType.NORMAL]
    worst = min(normal, default=0.0)
    end = max((i + 1 for i, (_, kind) in enumerate(typed) if kind != TokenType.UNUSED), default=0)
    # Only normal pieces may lower the score of unknown text, which depends on the lowest one.
    pieces = [
        [text, score if kind == TokenType.NORMAL else max(score, worst)]
        for score, (text, kind) in zip(tok.scores, typed[:end], strict=False)
    ]
    prefix = tok.flags.get("add_space_prefix", True)
    return {
        "normalizer": {"type": "Sequence", "normalizers": _unigram_normalizers(tok, prefix)},
        "pre_tokenizer": None,
        "decoder": {"type": "Metaspace", "replacement": UNDERLINE, "prepend_scheme": "always" if prefix else "never"},
        "model": {"type": "Unigram", "unk_id": unk if unk < end else None, "vocab": pieces, "byte_fallback": False},
    }


def _unigram_normalizers(tok: TokenizerData, prefix: bool) -> list[dict[str, object]]:
    steps: list[dict[str, object]] = []
    _, charsmap = tok.extra.get(CHARSMAP, ("", None))
    if isinstance(charsmap, bytes):
        encoded = base64.b64encode(charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    merge = tok.flags.get("remove_extra_whitespaces", False)
    if merge:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if prefix or merge:  # merging spaces includes one before the first word
        steps.append(_PREPEND)
    return [*steps, _TO_UNDERLINE]


# --- WordPiece ---

_LONGEST_WORD = 10_000
"""llama.cpp has no limit; this one prevents quadratic time for a crafted text."""


def from_phantom(text: str, kind: int) -> str:
    """WordPiece's spelling of llama.cpp's token: continuations begin with ##, words with nothing."""
    if kind != TokenType.NORMAL:
        return text
    return text[len(UNDERLINE) :] if text.startswith(UNDERLINE) else "##" + text


def _wordpiece_parts(tok: TokenizerData) -> Parts:
    """normalizer, pre_tokenizer, decoder and model of a WordPiece tokenizer. Raises UnsupportedError without unk."""
    typed = _tokens_and_types(tok)
    vocab = {from_phantom(*entry): i for i, entry in enumerate(typed) if entry[1] != TokenType.UNUSED}
    unk = tok.special.get("unk", 100)
    if unk >= len(tok.tokens):
        raise UnsupportedError(
            "a bert tokenizer without an unknown token cannot be written as tokenizer.json",
            hint="set the original tokenizer with --tokenizer",
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
            "unk_token": from_phantom(*typed[unk]),
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": _LONGEST_WORD,
            "vocab": vocab,
        },
    }


# --- RWKV ---


def _rwkv_parts(tok: TokenizerData) -> Parts:
    """Parts for RWKV's tokenizer: WordPiece of bytes, without a prefix, also takes the longest token.

    Raises UnsupportedError if a byte is not a token.
    """
    vocab = rwkv.word_pieces(tok)
    if missing := rwkv.missing_bytes(vocab):
        raise UnsupportedError(
            f"an rwkv tokenizer without a token for the byte {missing[0]:#04x} cannot be written as tokenizer.json",
            hint="set the original tokenizer with --tokenizer",
        )
    regex = rwkv.splits([rwkv.from_escaped(text) for text in tok.tokens])
    steps = [*([_split(regex)] if regex else []), {**_BYTE_LEVEL, "use_regex": False}]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True},
        "model": {
            "type": "WordPiece",
            "unk_token": next(iter(vocab)),
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": _LONGEST_WORD * _LONGEST_WORD,
            "vocab": vocab,
        },
    }


_PARTS: dict[str, Callable[[TokenizerData], Parts]] = {
    "rwkv": _rwkv_parts, "llama": _llama_parts, "gemma4": _pieces_parts, "t5": _unigram_parts, "bert": _wordpiece_parts,
}  # fmt: skip
