"""Encodes and decodes with a tokenizer value through `tokenizers`: its tokenizer.json, its own or one built from its
lists.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from weakref import finalize

from aprfmt.tokenizer.data import TokenizerData
from aprfmt.tokenizer.fast import FastTokenizer, load
from aprfmt.tokenizer.hf_write import to_hf_files

TOKENIZER_JSON = "tokenizer.json"


_loaded: dict[int, FastTokenizer] = {}
"""Loaded tokenizers by the identity of their Tokenizer."""


def loaded(tokenizer: TokenizerData) -> FastTokenizer:
    """The tokenizer, loaded once for as long as the value lives. Raises as `load` and `tokenizer_json`."""
    key = id(tokenizer)
    if key not in _loaded:
        _loaded[key] = load(tokenizer_json(tokenizer))
        finalize(tokenizer, _loaded.pop, key, None)
    return _loaded[key]


def tokenizer_json(tokenizer: TokenizerData) -> bytes:
    """Its tokenizer.json; without one, built from its lists. Raises UnsupportedError as to_hf_files."""
    files = to_hf_files(tokenizer)
    if TOKENIZER_JSON not in files:
        files = to_hf_files(replace(tokenizer, files={}))
    return files[TOKENIZER_JSON]


def hard_texts() -> list[str]:
    """Texts on which similar tokenizers differ.

    Spaces, digits, contractions, scripts, normal forms, joiners, controls, texts of special tokens, long runs.
    """
    found: list[str] = json.loads(Path(__file__).with_name("hard_texts.json").read_bytes())
    return found
