"""The ids that a BPE tokenizer gives the probe text, from the few tokens and merges that can matter for it.

A library that builds the whole tokenizer takes longer for it than everything else that an import does before it
moves bytes. Pieces of the probe text are what the tokenizer's own normaliser and pre-tokenizer make of it; only
tokens that are parts of them, and merges whose result is one, can take part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aprfmt.tokenizer.pre_hashes import PROBE

_MOST_PARTS = 200_000
"""Parts of all pieces; a normaliser that makes the text longer, before no splitter, leaves millions."""


def probe_ids(parsed: Mapping[str, Any]) -> list[int] | None:
    """Ids of the probe text by the BPE tokenizer `parsed` (tokenizer.json); None where this way does not serve."""
    model = parsed.get("model")
    if not isinstance(model, Mapping) or model.get("type", "BPE") != "BPE":
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    pieces = _pieces(parsed, model)
    if pieces is None or sum(len(piece) * (len(piece) + 1) // 2 for piece in set(pieces)) > _MOST_PARTS:
        return None
    parts = {
        piece[i:j] for piece in set(pieces) for i in range(len(piece)) for j in range(i + 1, len(piece) + 1)
    }
    vocab, merges = model["vocab"], model["merges"]
    if model.get("unk_token") is None and not all(char in vocab for piece in pieces for char in piece):
        return None  # what is in no token is left out, and its neighbours may merge
    kept = [merge for merge in merges if _whole(merge) in parts]
    small = _with_model(parsed, model, {text: vocab[text] for text in parts if text in vocab}, kept)
    ids: list[int] = small.encode(PROBE).ids
    return ids


def _pieces(parsed: Mapping[str, Any], model: Mapping[str, Any]) -> list[str] | None:
    """What the model sees of the probe text; None where added tokens cut it."""
    shell = _with_model(parsed, model, {}, [])
    text = PROBE if shell.normalizer is None else shell.normalizer.normalize_str(PROBE)
    for token in parsed.get("added_tokens") or []:
        if token["content"] in PROBE or token["content"] in text:
            return None
    if shell.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in shell.pre_tokenizer.pre_tokenize_str(text)]


def _whole(merge: Any) -> str:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return str(left + right)


def _with_model(
    parsed: Mapping[str, Any], model: Mapping[str, Any], vocab: dict[str, int], merges: list[Any]
) -> Any:
    """The tokenizer with another vocabulary, and without truncation and padding: the probe is short."""
    from tokenizers import Tokenizer

    always = [model.get("unk_token"), *(f"<0x{byte:02X}>" for byte in range(256))]
    own = model["vocab"]
    vocab |= {text: own[text] for text in always if isinstance(text, str) and text in own}
    small = {**model, "vocab": vocab, "merges": merges}
    return Tokenizer.from_str(json.dumps({**parsed, "model": small, "truncation": None, "padding": None}))
