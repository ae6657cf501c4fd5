"""Generation settings in configs that a GGUF stores with its vocabulary: suppressed tokens, ends of turns.

generation_config.json    suppress_tokens: ids
config.json               eos_token_id: in some families a list, whose further ids end turns
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from aprfmt.limits import MAX_TOKEN_ID
from aprfmt.tokenizer.data import KvType, TokenizerData
from aprfmt.types import Json

FILE_NAME = "generation_config.json"
SUPPRESSED = "tokenizer.ggml.suppress_tokens"
"""Key of the ids, in `Tokenizer.extra`."""
_TURNS_END_BY_LIST = ("laguna",)
"""Model types whose end-of-turn token llama.cpp does not recognize by its text."""


def suppressed(generation: bytes | None) -> dict[str, tuple[KvType, object]]:
    """The entry of `Tokenizer.extra` for a generation_config.json; {} if it suppresses nothing, or is damaged."""
    try:
        value = json.loads(generation or b"{}")
    except (ValueError, RecursionError):
        return {}
    ids = value.get("suppress_tokens") if isinstance(value, dict) else None
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i <= MAX_TOKEN_ID for i in ids):
        return {}
    return {SUPPRESSED: (("ARRAY", "INT32"), ids)}


def to_file(tok: TokenizerData) -> bytes | None:
    """A generation_config.json with the suppressed tokens and the ids that it overrides; None without any."""
    _, ids = tok.extra.get(SUPPRESSED, ("", None))
    if not isinstance(ids, list):
        return None
    special = {f"{role}_token_id": tok.special[role] for role in ("bos", "eos", "pad") if role in tok.special}
    return (json.dumps(special | {"suppress_tokens": ids}, indent=2) + "\n").encode()


def turn_end(config: Mapping[str, Json]) -> int | None:
    """The end-of-turn id in a config.json, if the family has one besides EOS."""
    ids = config.get("eos_token_id")
    if config.get("model_type") not in _TURNS_END_BY_LIST or not isinstance(ids, list):
        return None
    return next((i for i in ids if type(i) is int and i != config.get("bos_token_id")), None)
