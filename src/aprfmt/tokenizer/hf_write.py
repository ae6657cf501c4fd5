"""Hugging Face tokenizer files out of a tokenizer that has none, as a GGUF describes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aprfmt.errors import UnsupportedError
from aprfmt.tokenizer.hf_write_pieces import llama_parts, unigram_parts
from aprfmt.tokenizer.hf_write_words import wordpiece_parts
from aprfmt.tokenizer.model import Tokenizer, TokenType
from aprfmt.tokenizer.pre import Rule, rule

__all__ = ["to_hf_files"]

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_ADDED = {int(TokenType.CONTROL): True, int(TokenType.UNKNOWN): True, int(TokenType.USER_DEFINED): False}
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


# What llama.cpp assumes where a file says nothing: special ids, add_bos, add_eos.
_ASSUMED: dict[str, tuple[dict[str, int], bool, bool]] = {
    "llama": ({"bos": 1, "eos": 2, "unk": 0}, True, False),
    "gemma4": ({}, True, False),
    "t5": ({"eos": 1, "unk": 2, "pad": 0}, False, True),
    "bert": ({"bos": 101, "sep": 102, "unk": 100, "pad": 0, "mask": 103}, True, True),
}
_PARTS: dict[str, Callable[[Tokenizer], dict[str, Any]]] = {
    "llama": llama_parts,
    "gemma4": llama_parts,
    "t5": unigram_parts,
    "bert": wordpiece_parts,
}


def to_hf_files(
    tok: Tokenizer, *, max_length: int | None = None, name: str | None = None
) -> dict[str, bytes]:
    """The tokenizer's files by name: the ones it came with, else ones made from its lists.

    Made files encode as llama.cpp encodes with the same tokenizer. Those of a byte-level BPE have NFC
    normalisation where the original tokenizers of that pre-tokenizer have it; llama.cpp has none, so text that
    is not in NFC differs.

    Args:
        tok: the tokenizer.
        max_length: context length for tokenizer_config.json.
        name: the model's name; llama.cpp knows by it that special tokens swallow the spaces behind them.

    Raises:
        UnsupportedError: an algorithm or splitting rules that have no tokenizer.json form, or lists without
            what the algorithm needs.
    """
    if tok.files:
        return dict(tok.files)
    tok = _with_assumed(tok)
    added = _added(tok, name or "")
    files = {
        "tokenizer.json": _tokenizer_json(tok, added),
        "tokenizer_config.json": _tokenizer_config(tok, added, max_length),
        "special_tokens_map.json": {
            f"{role}_token": _content(tok, role) for role in _ROLES if _content(tok, role)
        },
    }
    result = {name: _dump(value) for name, value in files.items()}
    if tok.chat_template is not None and not tok.chat_templates:
        result["chat_template.jinja"] = tok.chat_template.encode("utf-8", "replace")
    return result


def _with_assumed(tok: Tokenizer) -> Tokenizer:
    """The tokenizer with what llama.cpp takes for granted said outright."""
    known = rule(tok.pre)
    ids, add_bos, add_eos = _ASSUMED.get(tok.model, ({}, known is not None and known.add_bos, False))
    special = {role: i for role, i in {**ids, **tok.special}.items() if i < len(tok.tokens)}
    if tok.model == "bert":  # always put around a text, whatever the flags say
        special["bos"] = tok.special.get("bos", tok.special.get("cls", special.get("bos", 0)))
        special["eos"] = special.get("sep", 0)
        return replace(tok, special=special, flags={**tok.flags, "add_bos": True, "add_eos": True})
    return replace(tok, special=special, flags={"add_bos": add_bos, "add_eos": add_eos, **tok.flags})


def _dump(value: object) -> bytes:
    """Indented JSON; texts that are no Unicode cannot be told to Hugging Face and become question marks."""
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "replace")


def _content(tok: Tokenizer, role: str) -> str | None:
    i = tok.special.get(role)
    return tok.tokens[i] if i is not None and i < len(tok.tokens) else None


def _types(tok: Tokenizer) -> list[int]:
    return tok.types or [int(TokenType.NORMAL)] * len(tok.tokens)


def _added(tok: Tokenizer, name: str) -> list[dict[str, Any]]:
    """Entries of added_tokens: every token that is looked for in the text before it is split."""
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
        for i, (text, kind) in enumerate(zip(tok.tokens, _types(tok), strict=True))
        if kind in _ADDED
    ]


def _tokenizer_json(tok: Tokenizer, added: list[dict[str, Any]]) -> dict[str, Any]:
    parts = _PARTS.get(tok.model, _byte_level_parts)(tok)
    bare = {**_BYTE_LEVEL, "trim_offsets": False} if tok.model not in _PARTS else None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": _post_processor(tok) or bare,
        "decoder": parts["decoder"],
        "model": parts["model"],
    }


def _byte_level_parts(tok: Tokenizer) -> dict[str, Any]:
    known = rule(tok.pre)
    if tok.model != "gpt2" or known is None:
        what = f"the pre-tokenizer {tok.pre}" if tok.pre else "a tokenizer that names no pre-tokenizer"
        what = what if tok.model == "gpt2" else f"a {tok.model} tokenizer"
        raise UnsupportedError(
            f"{what} cannot be written as tokenizer.json",
            hint="give the original tokenizer with --tokenizer, or the pre-tokenizer with --pre",
        )
    kinds = _types(tok)
    # The first of equal texts keeps its id; pads that only fill the embedding are no tokens.
    vocab = {tok.tokens[i]: i for i in reversed(range(len(tok.tokens))) if kinds[i] != TokenType.UNUSED}
    return {
        "normalizer": {"type": "NFC"} if known.nfc else None,
        "pre_tokenizer": _pre_tokenizer(known),
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": known.ignore_merges,
            "vocab": dict(sorted(vocab.items(), key=lambda entry: entry[1])),
            "merges": [list(halves) for halves in map(_halves, tok.merges) if "".join(halves) in vocab],
        },
    }


def _halves(merge: str) -> tuple[str, str]:
    """A merge's two tokens: llama.cpp cuts at the first space after the first character."""
    cut = merge.find(" ", 1)
    return (merge[:cut], merge[cut + 1 :]) if cut > 0 else (merge, "")


def _pre_tokenizer(known: Rule) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Digits", "individual_digits": True}
        if split == "digits"
        else {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in known.splits
    ]
    steps.append({**_BYTE_LEVEL, "use_regex": known.gpt2_regex})
    return {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0]


def _post_processor(tok: Tokenizer) -> dict[str, Any] | None:
    bos = _content(tok, "bos") if tok.flags["add_bos"] else None
    eos = _content(tok, "eos") if tok.flags["add_eos"] else None
    if bos is None and eos is None:
        return None

    def around(name: str, type_id: int) -> list[dict[str, Any]]:
        parts = [("SpecialToken", bos), ("Sequence", name), ("SpecialToken", eos)]
        return [{kind: {"id": text, "type_id": type_id}} for kind, text in parts if text is not None]

    used = {text: tok.special[role] for role, text in (("bos", bos), ("eos", eos)) if text is not None}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in used.items()},
    }


def _tokenizer_config(tok: Tokenizer, added: list[dict[str, Any]], max_length: int | None) -> dict[str, Any]:
    config: dict[str, Any] = {
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
        config["chat_template"] = [
            {"name": n, "template": text} for n, text in named.items() if text is not None
        ]
    return config
