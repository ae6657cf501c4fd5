"""A tokenizer value that encodes and decodes: its tokenizer.json, its own or one made of its lists, in `tokenizers`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.errors import AprError, CorruptError, MissingDependencyError
from aprfmt.tokenizer.growth import check_growth
from aprfmt.tokenizer.hf_write import to_hf_files
from aprfmt.tokenizer.model import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Fast

TOKENIZER_JSON = "tokenizer.json"


def tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """Its tokenizer.json; of one that came without, that of its lists. Raises UnsupportedError as to_hf_files."""
    files = to_hf_files(tokenizer)
    if TOKENIZER_JSON not in files:
        files = to_hf_files(replace(tokenizer, files={}))
    return files[TOKENIZER_JSON]


def load(text: bytes) -> Fast:
    """The tokenizer of a tokenizer.json, without truncation and padding.

    Raises CorruptError where it is none, LimitError where it makes endlessly much of a text.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise MissingDependencyError("text is encoded by tokenizers", hint="pip install tokenizers") from error
    try:
        check_growth(json.loads(text))
        fast = tokenizers.Tokenizer.from_buffer(text)
    except (KeyboardInterrupt, SystemExit, MemoryError, AprError):
        raise
    except BaseException as error:  # the library raises nothing more precise, and its panics are not Exceptions
        raise CorruptError(f"tokenizer.json cannot be loaded: {error}") from error
    # What a crafted file says of them would take any amount of memory.
    fast.no_truncation()
    fast.no_padding()
    return fast


def hard_texts() -> list[str]:
    """Texts on which tokenizers that are nearly the same come apart.

    Spaces, digits, contractions, scripts, normal forms, joiners, controls, texts of special tokens, long runs.
    """
    found: list[str] = json.loads(Path(__file__).with_name("hard_texts.json").read_bytes())
    return found
