"""Tokenizers inside APR metadata."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.errors import CorruptError, RefusedError
from aprfmt.tokenizer import apr
from aprfmt.tokenizer.model import Tokenizer

BYTES_TEXT = st.binary(max_size=6).map(lambda data: data.decode("utf-8", "surrogateescape"))


def through_json(tok: Tokenizer) -> Tokenizer:
    text = json.dumps(apr.to_metadata(tok), ensure_ascii=False, allow_nan=False, sort_keys=True)
    back = apr.from_metadata(json.loads(text.encode()))
    assert back is not None
    return back


def full() -> Tokenizer:
    return Tokenizer(
        model="gpt2",
        tokens=["a", "b", "ab", "<s>"],
        merges=["a b"],
        types=[1, 1, 1, 3],
        pre="qwen2",
        special={"bos": 3, "eos": 2, "pad": 1, "unk": 0, "eot": 2},
        flags={"add_bos": True, "add_eos": False},
        chat_template="T",
        chat_templates={"rag": "R"},
        n_added=1,
    )


def test_reference_keys() -> None:
    values = apr.to_metadata(full())
    own = values["aprfmt.tokenizer"]
    assert isinstance(own, dict)
    assert values == {
        "tokenizer.model": "gpt2",
        "tokenizer.vocabulary": ["a", "b", "ab", "<s>"],
        "tokenizer.vocab_size": 4,
        "tokenizer.merges": ["a b"],
        "tokenizer.pre_type": "qwen2",
        "tokenizer.token_type": [1, 1, 1, 3],
        "tokenizer.add_bos_token": True,
        "tokenizer.bos_token_id": 3,
        "tokenizer.eos_token_id": 2,
        "tokenizer.padding_token_id": 1,
        "chat_template": "T",
        "aprfmt.tokenizer": {
            "special": {"unk": 0, "eot": 2},
            "flags": {"add_eos": False},
            "chat_templates": {"rag": "R"},
            "n_added": 1,
            "gguf_keys": own["gguf_keys"],
        },
    }
    assert "tokenizer.model_type" not in values


def test_round_trip() -> None:
    assert through_json(full()) == full()
    bare = Tokenizer(model="none", tokens=["x"])
    assert through_json(bare) == bare
    assert apr.from_metadata({"architecture": "llama"}) is None


@given(
    st.lists(BYTES_TEXT, min_size=1, max_size=8),
    st.lists(BYTES_TEXT, max_size=4),
    st.none() | BYTES_TEXT,
    st.floats(width=32),
)
def test_any_bytes_come_back(tokens: list[str], merges: list[str], template: str | None, score: float) -> None:
    tok = Tokenizer(
        model="gpt2",
        tokens=tokens,
        merges=merges,
        scores=[score] * len(tokens),
        chat_template=template,
        chat_templates={"a": template or ""},
    )
    back = through_json(tok)
    if math.isnan(score):
        assert all(math.isnan(value) for value in back.scores)
        back.scores = tok.scores
    assert back == tok


def test_bytes_stand_as_replacement_characters() -> None:
    values = apr.to_metadata(Tokenizer(model="gpt2", tokens=["a\udcff", "ok"]))
    assert values["tokenizer.vocabulary"] == ["a\ufffd", "ok"]
    own = values["aprfmt.tokenizer"]
    assert isinstance(own, dict)
    assert own["patches"] == {"vocabulary": {"0": "61ff"}}


def test_names_must_be_text() -> None:
    with pytest.raises(RefusedError, match="not Unicode"):
        apr.to_metadata(Tokenizer(model="gpt2", tokens=["a"], pre="\udc80"))
    with pytest.raises(RefusedError, match="nor encoded bytes"):
        apr.to_metadata(Tokenizer(model="gpt2", tokens=["\ud800"]))


@pytest.mark.parametrize(
    ("extra", "model"),
    [
        ({"tokenizer.model_type": "BPE"}, "gpt2"),
        ({"tokenizer.model": "bpe"}, "gpt2"),
        ({"tokenizer.model_type": "Unigram"}, "llama"),
        ({"tokenizer.merges": ["a b"]}, "gpt2"),
        ({"tokenizer.scores": [0.5, 1, 0, 0, 0, 0]}, "llama"),
        ({}, "none"),
    ],
)
def test_files_of_other_writers(extra: dict[str, Any], model: str) -> None:
    vocabulary = ["a", "<|im_end|>", "<unk>", "<unk>", "<think>", "<|>"]
    tok = apr.from_metadata({"tokenizer.vocabulary": vocabulary, "tokenizer.chat_template": "T", **extra})
    assert tok is not None
    assert (tok.model, tok.chat_template) == (model, "T")
    assert tok.types == [1, 3, 3, 5, 3, 1]


@pytest.mark.parametrize(
    "bad",
    [
        {"tokenizer.vocabulary": "abc"},
        {"tokenizer.vocabulary": ["a", 1]},
        {"tokenizer.merges": [["a", "b"]]},
        {"tokenizer.token_type": [1, 2, 3]},
        {"tokenizer.token_type": [True]},
        {"tokenizer.scores": ["x"]},
        {"tokenizer.model": 1},
        {"tokenizer.pre_type": []},
        {"tokenizer.bos_token_id": "1"},
        {"tokenizer.bos_token_id": 1.5},
        {"tokenizer.add_bos_token": 1},
        {"chat_template": 7},
        {"aprfmt.tokenizer": 5},
        {"aprfmt.tokenizer": {"special": []}},
        {"aprfmt.tokenizer": {"flags": {"add_eos": 1}}},
        {"aprfmt.tokenizer": {"n_added": "1"}},
        {"aprfmt.tokenizer": {"chat_templates": {"a": 1}}},
        {"aprfmt.tokenizer": {"patches": {"vocabulary": {"1": "00"}}}},
        {"aprfmt.tokenizer": {"patches": {"vocabulary": {"-1": "00"}}}},
        {"aprfmt.tokenizer": {"patches": {"vocabulary": {"0": "zz"}}}},
        {"aprfmt.tokenizer": {"patches": {"scores": {"0": "00"}}}},
        {"aprfmt.tokenizer": {"patches": 1}},
    ],
)
def test_wrong_types_are_corrupt(bad: dict[str, Any]) -> None:
    with pytest.raises(CorruptError):
        apr.from_metadata({"tokenizer.vocabulary": ["a"], **bad})


def test_ids_that_no_token_can_have_stand_for_none() -> None:
    values = {
        "tokenizer.vocabulary": ["a"],
        "tokenizer.bos_token_id": -1,
        "tokenizer.eos_token_id": 0,
        "tokenizer.padding_token_id": 1 << 32,
    }
    tok = apr.from_metadata(values)
    assert tok is not None
    assert tok.special == {"eos": 0}
