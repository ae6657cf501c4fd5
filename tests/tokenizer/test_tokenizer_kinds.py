"""Unigram, WordPiece and SentencePiece files, whole and damaged."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_folders import message, sentencepiece

from aprfmt.errors import AprError, CorruptError, UnsupportedError
from aprfmt.tokenizer import apr, ggml, hf, hf_write, splice
from aprfmt.tokenizer import sentencepiece as spm
from aprfmt.tokenizer.model import Tokenizer

CHARSMAP = (8).to_bytes(4, "little") + bytes(8) + b"a\0"
PIECES = [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["\u2581", -2.5], ["\u2581a", -3.0], ["b", -3.25]]
UNIGRAM: dict[str, Any] = {
    "added_tokens": [
        {"id": 0, "content": "<pad>", "special": True},
        {"id": 1, "content": "</s>", "special": True},
        {"id": 2, "content": "<unk>", "special": True},
        {"id": 7, "content": "\u2581tool", "special": False},
    ],
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(CHARSMAP).decode()},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "Metaspace", "add_prefix_space": True}],
    },
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
        "pair": [],
    },
    "model": {"type": "Unigram", "unk_id": 2, "vocab": PIECES},
}
WORDS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "play": 5, "##ing": 6, ".": 7}
WORDPIECE: dict[str, Any] = {
    "added_tokens": [{"id": i, "content": t, "special": True} for t, i in WORDS.items() if t[0] == "["],
    "normalizer": {"type": "BertNormalizer", "lowercase": False, "strip_accents": None},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": WORDS},
}
BERT_SETTINGS = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
SPM_PIECES = [
    ("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<0x41>", 0.0, 6), ("\u2581x", 0.0, 4),
    ("a", -1.0, 1), ("b", -2.0, 1), ("ab", -3.0, 1), ("dead", -4.0, 5),
]  # fmt: skip


def pieces_of(text: bytes, tok: Tokenizer) -> list[splice.Piece] | None:
    found = splice.split(text, tok)
    return None if found is None else [piece for piece, _ in found]


def read(parsed: Any, settings: Any = None, config: Any = None) -> Tokenizer:
    files = {"tokenizer.json": json.dumps(parsed).encode()}
    if settings is not None:
        files["tokenizer_config.json"] = json.dumps(settings).encode()
    tok = hf.read_files(files, config)
    assert tok is not None
    return tok


def keys(tok: Tokenizer) -> dict[str, Any]:
    return {key.removeprefix("tokenizer.ggml."): value for key, _, value in ggml.to_gguf(tok, vocab_size=None)}


def test_unigram_becomes_t5() -> None:
    tok = read(UNIGRAM, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"})
    assert (tok.model, tok.pre) == ("t5", "default")
    assert tok.tokens == ["<pad>", "</s>", "<unk>", "\u2581", "\u2581a", "b", "[PAD6]", " tool"]
    assert tok.types == [3, 3, 2, 1, 1, 1, 5, 4]
    assert tok.scores == [0.0, 0.0, 0.0, -2.5, -3.0, -3.25, -10000.0, -1000.0]
    assert tok.special == {"unk": 2, "eos": 1, "pad": 0}
    got = keys(tok)
    assert got["precompiled_charsmap"] == list(CHARSMAP)
    assert (got["add_space_prefix"], got["remove_extra_whitespaces"]) == (True, True)
    assert (got["add_bos_token"], got["add_eos_token"]) == (False, True)


def test_unigram_with_bytes_becomes_llama_and_says_what_that_means() -> None:
    parsed = {**UNIGRAM, "model": {**UNIGRAM["model"], "byte_fallback": True, "vocab": [*PIECES, ["<0x41>", 0.0]]}}
    tok = read(parsed)
    assert (tok.model, tok.types[6]) == ("llama", 6)
    assert "ids can differ" in tok.notes[0]


def test_wordpiece_becomes_bert() -> None:
    tok = read(WORDPIECE, BERT_SETTINGS, {"type_vocab_size": 2})
    assert tok.model == "bert"
    assert tok.tokens[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tok.tokens[5:] == ["\u2581play", "ing", "\u2581."]
    assert tok.flags == {"lowercase": False, "strip_accents": False}
    assert tok.special == {"unk": 1, "bos": 2, "eos": 3, "cls": 2, "sep": 3, "mask": 4}
    assert keys(tok)["token_type_count"] == 2


@pytest.mark.parametrize("settings", [{}, {"tokenizer_class": "DistilBertTokenizer", "do_lower_case": True}])
def test_vocab_txt_alone(settings: dict[str, Any]) -> None:
    files = {"vocab.txt": "\r\n".join(WORDS).encode() + b"\r\n", "tokenizer_config.json": json.dumps(settings).encode()}
    tok = hf.read_files(files)
    assert tok is not None
    assert tok.tokens == read(WORDPIECE).tokens
    assert tok.types == read(WORDPIECE).types
    assert tok.flags == {"lowercase": True, "strip_accents": True}
    assert (tok.special["bos"], tok.special["sep"], tok.special["unk"]) == (2, 3, 1)
    pieces = pieces_of(files["vocab.txt"], tok)
    assert pieces is not None
    assert "play" not in json.dumps(pieces)
    assert splice.join(pieces, tok) == files["vocab.txt"]


def test_vocab_txt_of_another_kind_is_refused() -> None:
    files = {"vocab.txt": b"a\n", "tokenizer_config.json": b'{"tokenizer_class": "EsmTokenizer"}'}
    with pytest.raises(UnsupportedError, match="EsmTokenizer") as caught:
        hf.read_files(files)
    assert caught.value.hint


def test_sentencepiece_merges() -> None:
    data = sentencepiece(SPM_PIECES, [(3, 2), (35, 1), (41, 1), (42, 2), (43, -1)], [(3, 0)])
    files = {
        "tokenizer.model": data,
        "added_tokens.json": b'{"<tool>": 10, "<|end|>": 9}',
        "tokenizer_config.json": json.dumps(
            {"added_tokens_decoder": {"9": {"content": "<|end|>", "special": True}}, "eos_token": "<|end|>"}
        ).encode(),
    }
    tok = hf.read_files(files)
    assert tok is not None
    assert (tok.model, tok.pre) == ("llama", "default")
    assert tok.tokens == ["<unk>", "<s>", "</s>", "<0x41>", " x", "a", "b", "ab", "dead", "<|end|>", "<tool>"]
    assert tok.types == [2, 3, 3, 6, 4, 1, 1, 1, 5, 3, 4]
    assert tok.scores == [0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -1000.0, -1000.0]
    assert tok.special == {"unk": 0, "bos": 1, "eos": 9}
    assert tok.flags["add_space_prefix"] is False


def test_sentencepiece_unigram() -> None:
    normalizer: list[tuple[int, int | float | bytes]] = [(1, b"nmt_nfkc"), (2, CHARSMAP), (4, 0)]
    tok = hf.read_files({"spiece.model": sentencepiece(SPM_PIECES, [(3, 1)], normalizer)})
    assert tok is not None
    assert tok.model == "t5"
    assert (tok.flags["add_space_prefix"], tok.flags["remove_extra_whitespaces"]) == (True, False)
    assert keys(tok)["precompiled_charsmap"] == list(CHARSMAP)


def test_same_as_the_package_would_read() -> None:
    """The protobuf fields of a model as it is on disk, unknown ones and defaults included."""
    data = sentencepiece(SPM_PIECES, [(3, 2), (10, b"x"), (7, 1.5), (24, 0)]) + message((99, b"later"))
    model = spm.read(data, "tokenizer.model")
    assert [(p.text, p.score, p.type) for p in model.pieces] == SPM_PIECES
    assert model.ids == {"unk": 0, "bos": 1, "eos": 2}
    assert model.add_dummy_prefix
    assert model.escape_whitespaces


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "no pieces"),
        (b"\n", "needs 1 bytes"),
        (b"\n\x7f", "127 bytes"),
        (b"\x0b", "wire type 3"),
        (b"\x00\x00", "field number 0"),
        (b"\xff" * 11, "ten bytes"),
        (message((1, 5)), "wire type 0"),
        (message((1, message((1, b"\xff")))), "UTF-8"),
        (message((1, message((1, b"a"), (3, 9)))), "type 9"),
        (message((1, message((1, b"a"), (2, float("inf"))))), "score"),
        (message((1, message((1, b"a"))), (2, b"\x18")), "needs 1 bytes"),
    ],
)
def test_damaged_models_are_named_with_their_offset(data: bytes, what: str) -> None:
    with pytest.raises(CorruptError, match=what) as caught:
        hf.read_files({"tokenizer.model": data})
    assert caught.value.path == "tokenizer.model"


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for content in (data, sentencepiece(SPM_PIECES)[: len(data)] + data):
        with contextlib.suppress(AprError):
            hf.read_files({"tokenizer.model": content})


@pytest.mark.parametrize(
    ("pieces", "trainer", "normalizer", "what"),
    [
        (SPM_PIECES, [(3, 3)], [], "type 3"),
        (SPM_PIECES, [(3, 1), (24, 1)], [], "whitespace as suffix"),
        (SPM_PIECES, [(3, 1)], [(2, b"\xff\xff\xff\xff\0\0")], "charsmap"),
    ],
)
def test_models_that_llama_cpp_has_no_algorithm_for(pieces: Any, trainer: Any, normalizer: Any, what: str) -> None:
    with pytest.raises(AprError, match=what):
        hf.read_files({"tokenizer.model": sentencepiece(pieces, trainer, normalizer)})


def unigram(**model: Any) -> dict[str, Any]:
    return {**UNIGRAM, "model": {**UNIGRAM["model"], **model}}


def wordpiece(**model: Any) -> dict[str, Any]:
    return {**WORDPIECE, "model": {**WORDPIECE["model"], **model}}


@pytest.mark.parametrize(
    ("parsed", "entry"),
    [
        (unigram(vocab={"a": 0}), "not an array"),
        (unigram(vocab=[["a"]]), r"vocab\[0\]"),
        (unigram(vocab=[["a", "0"]]), r"vocab\[0\]"),
        (unigram(vocab=[["a", True]]), r"vocab\[0\]"),
        (unigram(vocab=[["a", float("nan")]]), r"vocab\[0\]"),
        (unigram(vocab=[["\ud800", 0.0]]), "surrogate"),
        (unigram(unk_id=6), "unk_id"),
        (unigram(unk_id="2"), "unk_id"),
        ({**UNIGRAM, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "*"}}, "base64"),
        ({**UNIGRAM, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "trie"),
        (wordpiece(unk_token="none"), "unk_token"),
        (wordpiece(vocab=[["a", 0.0]]), "not a JSON object"),
        (wordpiece(continuing_subword_prefix=""), "prefix"),
        (unigram(type="WordLevel"), "WordLevel"),
    ],
)
def test_bad_models_are_named(parsed: Any, entry: str) -> None:
    with pytest.raises(AprError, match=entry) as caught:
        read(parsed)
    assert caught.value.path == "tokenizer.json"


@pytest.mark.parametrize("parsed", [UNIGRAM, WORDPIECE], ids=["unigram", "wordpiece"])
@pytest.mark.parametrize("indent", [None, 2])
def test_the_vocabulary_is_stored_once(parsed: Any, indent: int | None) -> None:
    text = json.dumps(parsed, indent=indent, ensure_ascii=False).encode()
    tok = hf.read_files({"tokenizer.json": text})
    assert tok is not None
    back = apr.from_metadata(json.loads(json.dumps(apr.to_metadata(tok))))
    assert back is not None
    pieces = pieces_of(text, tok)
    assert pieces is not None
    assert sum(isinstance(piece, dict) for piece in pieces) == 1
    assert splice.join(pieces, back) == text


@pytest.mark.parametrize(
    "piece",
    [
        {"list": "vocabulary", "form": "scored", "n": "x"},
        {"list": "vocabulary", "form": "scored", "n": 2, "patch": {"0": 5}},
        {"list": "vocabulary", "form": "scored", "n": 2, "patch": {"0": [5, 1.0]}},
    ],
)
def test_scored_pieces_that_split_never_made(piece: dict[str, Any]) -> None:
    whole = {"open": "[", "comma": ",", "close": "]", "between": ",", "ascii": False, "patch": {}, **piece}
    assert splice.join([{**whole, "n": 1, "patch": {}}], read(UNIGRAM)) == b'["<pad>",0.0]'
    with pytest.raises(CorruptError):
        splice.join([whole], read(UNIGRAM))


def test_made_files_of_every_kind_are_read_again() -> None:
    for parsed, settings in ((UNIGRAM, {"eos_token": "</s>"}), (WORDPIECE, BERT_SETTINGS)):
        tok = read(parsed, settings)
        tok.files = {}
        again = hf.read_files(hf_write.to_hf_files(tok))
        assert again is not None
        assert (again.model, again.extra) == (tok.model, tok.extra)
        assert {role: again.special[role] for role in tok.special} == tok.special


@pytest.mark.parametrize(
    ("tok", "what"),
    [
        (Tokenizer(model="llama", tokens=["<unk>", "a"], scores=[0.0, 0.0]), "byte token <0x00>"),
        (Tokenizer(model="t5", tokens=["a"]), "score"),
        (Tokenizer(model="t5", tokens=["a"], scores=[float("nan")]), "score"),
        (Tokenizer(model="bert", tokens=["a"]), "unknown token"),
        (Tokenizer(model="rwkv", tokens=["a"]), "byte 0x00"),
        (Tokenizer(model="none", tokens=[]), "no tokens"),
        (Tokenizer(model="gpt2", tokens=["a"], pre="chamaeleon"), "chamaeleon"),
    ],
)
def test_what_has_no_tokenizer_json_is_refused_by_name(tok: Tokenizer, what: str) -> None:
    with pytest.raises(UnsupportedError, match=what) as caught:
        hf_write.to_hf_files(tok)
    assert caught.value.hint
