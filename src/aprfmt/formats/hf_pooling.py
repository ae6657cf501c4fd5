"""Pooling of sentence-transformers folders: modules.json names a Pooling module, its folder says how it pools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

MODULES = "modules.json"
FOLDERS = "[0-9]_*"
"""What the folders of modules are called; of each the config.json belongs to the model."""
CONFIG_KEY = "pooling"
"""Key of the pooling mode among the config's keys; config.json itself never has it."""

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_WORDS = {"lasttoken": "last"}
_TYPE = "sentence_transformers.models."


def read(text_file: Callable[[str], bytes | None]) -> str | None:
    """How the folder pools: "mean", "cls", "last", another word, several joined by "+"; None where nothing says.

    `text_file` gives a file of the folder by its name, None where there is none. What is not JSON says nothing.
    """
    modules = _json(text_file(MODULES))
    for module in modules if isinstance(modules, list) else []:
        if isinstance(module, dict) and str(module.get("type")).endswith("Pooling"):
            found = _json(text_file(f"{module.get('path')}/config.json"))
            return _word(found) if isinstance(found, dict) else None
    return None


def _json(raw: bytes | None) -> object:
    try:
        return None if raw is None else json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _word(config: Mapping[str, object]) -> str | None:
    words = [word for key, word in _MODES.items() if config.get(key) is True]
    mode = config.get("pooling_mode")
    if not words and isinstance(mode, str):
        words = [_WORDS.get(mode, mode)]
    return "+".join(words) or None


def files(word: str, width: int) -> dict[str, bytes]:
    """The files of a folder that pools so (`width` values); {} for what sentence-transformers has no word for."""
    if word not in _MODES.values():
        return {}
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{_TYPE}Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{_TYPE}Pooling"},
    ]
    pooling = {"word_embedding_dimension": width, **{key: mode == word for key, mode in _MODES.items()}}
    return {MODULES: _text(modules), "1_Pooling/config.json": _text(pooling)}


def _text(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
