"""A tokenizer.json that makes endlessly much of a text is refused before a text is given to it."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from aprfmt.errors import LimitError
from aprfmt.limits import MAX_TEXT_GROWTH
from aprfmt.tokenizer import fast, growth, pre

DOUBLE = {"type": "Replace", "pattern": {"Regex": "."}, "content": "aa"}
CHARSMAP = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"x" * 5000 + b"\0").decode()


def chain(inner: str, steps: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", inner: steps}


def tokenizer(**parts: Any) -> bytes:
    empty = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model, **empty, **parts}).encode()


BOMBS: dict[str, dict[str, Any]] = {
    "a regex that doubles": {"normalizer": chain("normalizers", [DOUBLE] * 40)},
    "chains in chains": {"normalizer": chain("normalizers", [chain("normalizers", [DOUBLE] * 5)] * 8)},
    "a text that doubles": {
        "normalizer": chain(
            "normalizers", [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"} for _ in range(40)]
        )
    },
    "a long content": {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 100_000}},
    "letters of bytes": {
        "pre_tokenizer": chain(
            "pretokenizers", [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}] * 40
        )
    },
    "marks before pieces": {
        "pre_tokenizer": chain(
            "pretokenizers", [{"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}] * 40
        )
    },
    "a charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}},
    "templates": {
        "post_processor": chain(
            "processors",
            [
                {
                    "type": "TemplateProcessing",
                    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
                    "pair": [],
                    "special_tokens": {},
                }
            ]
            * 40,
        )
    },
    "a decoder": {
        "decoder": chain("decoders", [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40)
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_doubles_again_and_again_is_refused(name: str) -> None:
    data = tokenizer(**BOMBS[name])
    with pytest.raises(
        LimitError, match=f"{next(iter(BOMBS[name]))} can expand a text more than {MAX_TEXT_GROWTH}-fold"
    ):
        fast.load(data)
    assert pre.hash_name(data) is None


@pytest.mark.parametrize(
    ("steps", "most"),
    [
        ([{"type": "Prepend", "prepend": "_"}, {"type": "Replace", "pattern": {"String": " "}, "content": "_"}], 1),
        (
            [{"type": "Replace", "pattern": {"String": "``"}, "content": '"'}, {"type": "NFKD"}, {"type": "Lowercase"}],
            1,
        ),
        ([{"type": "Precompiled", "precompiled_charsmap": ""}, DOUBLE], 3),
    ],
    ids=["llama", "albert", "t5"],
)
def test_what_tokenizers_have_is_small(steps: list[Any], most: int) -> None:
    assert growth.growth(chain("normalizers", steps)) == most
