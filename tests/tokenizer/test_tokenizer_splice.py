"""Tokenizer files cut into pieces and joined again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.errors import CorruptError
from aprfmt.tokenizer import hf, splice
from aprfmt.tokenizer.model import Tokenizer

VOCAB = {"a": 0, "b": 1, '"q\\\n': 3, "é\u2028": 4, "\x1f": 5, "ab": 6, "bb": 2}
PARSED = {
    "added_tokens": [{"id": 7, "content": '"vocab": {', "special": True}],
    "model": {"type": "BPE", "vocab": VOCAB, "merges": ["a b", "b b"]},
    "end": 1,
}


def tokenizer() -> Tokenizer:
    tok = hf.read_files({"tokenizer.json": json.dumps(PARSED).encode()})
    assert tok is not None
    return tok


def pieces_of(text: bytes, tok: Tokenizer) -> list[splice.Piece] | None:
    found = splice.split(text, tok)
    return None if found is None else [piece for piece, _ in found]


def literal_size(pieces: list[Any]) -> int:
    return sum(len(piece) if isinstance(piece, str) else len(json.dumps(piece)) for piece in pieces)


@pytest.mark.parametrize("ensure_ascii", [True, False])
@pytest.mark.parametrize("indent", [None, 0, 2, "\t"])
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("compact", [True, False])
def test_every_layout(ensure_ascii: bool, indent: Any, paired: bool, compact: bool) -> None:
    merges = [["a", "b"], ["b", "b"]] if paired else ["a b", "b b"]
    parsed = {**PARSED, "model": {**PARSED["model"], "merges": merges}}  # type: ignore[dict-item]
    separators = (",", ":") if compact else None
    text = json.dumps(parsed, indent=indent, ensure_ascii=ensure_ascii, separators=separators).encode()
    pieces = pieces_of(text, tokenizer())
    assert pieces is not None
    assert [piece["list"] for piece in pieces if isinstance(piece, dict)] == ["vocabulary", "merges"]
    assert splice.join(json.loads(json.dumps(pieces)), tokenizer()) == text


def test_old_files_are_spliced_too() -> None:
    tok = tokenizer()
    for text in (json.dumps(VOCAB).encode(), b"#version: 0.2\na b\nb b\n", b"a b\r\nb b", b"a b\nb b"):
        pieces = pieces_of(text, tok)
        assert pieces is not None
        assert any(isinstance(piece, dict) for piece in pieces)
        assert splice.join(pieces, tok) == text


def test_changed_texts_are_patched() -> None:
    tok = tokenizer()
    tok.tokens[0] = "changed"
    text = json.dumps(PARSED).encode()
    pieces = pieces_of(text, tok)
    assert pieces is not None
    assert splice.join(pieces, tok) == text


@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        b"{",
        b"[]",
        b'{"model": {"vocab": {"a": 99}}}',
        b'{"model": {"vocab": {"a": 0, "b": 0}}}',
        b'{"model": {"vocab": {"a": 0}, "merges": ["a b"]}}',
        b'{"model": {"vocab": {"a": 0 , "b":1}}}',
        b'{"model": {"vocab": {"\\u0061": 0}}}',
    ],
)
def test_files_of_other_lists_or_layouts_stay_as_they_are(text: bytes) -> None:
    assert splice.split(text, tokenizer()) is None


GOOD = {"list": "vocabulary", "runs": [[0, 2]], "colon": ":", "between": ",", "ascii": False, "patch": {}}


@pytest.mark.parametrize(
    "piece",
    [
        3,
        {},
        {**GOOD, "runs": [[0, 99]]},
        {**GOOD, "runs": [[-1, 2]]},
        {**GOOD, "runs": [[0, 8]] * 1000},
        {**GOOD, "runs": 7},
        {**GOOD, "between": "," * 1000},
        {**GOOD, "between": "x"},
        {**GOOD, "colon": 4},
        {**GOOD, "patch": {"x": "y"}},
        {**GOOD, "patch": {"99": "y"}},
        {"list": "merges", "form": "pair", "between": ",", "patch": {}},
        {"list": "merges", "form": "text", "between": ",", "patch": {"0": 5}},
    ],
)
def test_pieces_that_split_never_made(piece: Any) -> None:
    assert splice.join([GOOD], tokenizer()) == b'"a":0,"b":1'
    with pytest.raises(CorruptError):
        splice.join([piece], tokenizer())


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), st.integers(0, 9)))
def test_any_vocabulary(vocab: dict[str, int]) -> None:
    tok = Tokenizer(model="gpt2", tokens=[f"t{i}" for i in range(10)])
    text = json.dumps({"model": {"vocab": vocab}}, ensure_ascii=False).encode()
    pieces = pieces_of(text, tok)
    assert pieces is None or splice.join(pieces, tok) == text


@pytest.mark.turns
@pytest.mark.parametrize(("name", "most"), [("qwen2_5", 7000), ("qwen3", 8000), ("llama3", 60_000), ("gpt4o", 3000)])
def test_real_tokenizers(real_tokenizers: dict[str, Path], name: str, most: int) -> None:
    text = (real_tokenizers[name] / "tokenizer.json").read_bytes()
    tok = hf.read_files({"tokenizer.json": text})
    assert tok is not None
    pieces = pieces_of(text, tok)
    assert pieces is not None
    assert literal_size(pieces) < most
    assert splice.join(pieces, tok) == text


@pytest.mark.turns(first=False)
@pytest.mark.slow
def test_the_largest_real_tokenizer(real_tokenizers: dict[str, Path]) -> None:
    text = (real_tokenizers["gemma3"] / "tokenizer.json").read_bytes()
    tok = hf.read_files({"tokenizer.json": text})
    assert tok is not None
    pieces = pieces_of(text, tok)
    assert pieces is not None
    assert literal_size(pieces) < 1_300_000  # 6,415 added tokens
    assert splice.join(pieces, tok) == text


def test_a_crafted_file_does_not_make_every_place_cost_a_whole_list(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = {"x": [{"vocab": {"a": 0}}] * 1000, "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}
    text = json.dumps(parsed).encode()
    tok = hf.read_files({"tokenizer.json": text})
    assert tok is not None
    calls, render = [], splice._render

    def counted(*args: Any) -> str:
        calls.append(1)
        return render(*args)

    monkeypatch.setattr(splice, "_render", counted)
    splice.split(text, tok)
    assert len(calls) < 100
