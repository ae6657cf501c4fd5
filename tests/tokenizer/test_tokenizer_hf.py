"""Reading Hugging Face tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aprfmt import limits
from aprfmt.errors import AprError, CorruptError, LimitError, UnsupportedError
from aprfmt.tokenizer import hf
from aprfmt.tokenizer.data import TokenType
from aprfmt.tokenizer.hf_documents import adds_space_prefix, is_byte_level
from aprfmt.tokenizer.model import Tokenizer

BASE: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [
        {"id": 4, "content": "<|end|>", "special": False},
        {"id": 5, "content": "<think>", "special": False},
        {"id": 7, "content": "<s>", "special": True},
    ],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "abb": 3}, "merges": ["a b", "ab b"]},
}


def read(parsed: Any = BASE, settings: Any = None, config: Any = None, **more: bytes) -> Tokenizer:
    files = {"tokenizer.json": json.dumps(parsed).encode(), **more}
    if settings is not None:
        files["tokenizer_config.json"] = json.dumps(settings).encode()
    tok = hf.read_files(files, config)
    assert tok is not None
    return tok


def changed(**changes: Any) -> dict[str, Any]:
    return {**BASE, **changes}


def model(**changes: Any) -> dict[str, Any]:
    return {**BASE, "model": {**BASE["model"], **changes}}


def test_tokens_types_and_holes() -> None:
    tok = read()
    assert tok.tokens == ["a", "b", "ab", "abb", "<|end|>", "<think>", "[PAD6]", "<s>"]
    kinds = [TokenType(kind).name for kind in tok.types]
    assert kinds == ["NORMAL"] * 4 + ["CONTROL", "USER_DEFINED", "UNUSED", "CONTROL"]
    assert (tok.model, tok.pre, tok.n_added, tok.merges) == ("gpt2", "gpt-2", 3, ["a b", "ab b"])


def test_merges_as_pairs_and_spaces_in_them() -> None:
    paired = model(vocab={"a": 0, " ": 1, "a ": 2}, merges=[["a", " "]])
    assert read({**paired, "added_tokens": []}).merges == ["a \u0120"]


def test_special_ids_prefer_texts_and_take_first_of_list() -> None:
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "<|end|>", "pad_token": None}
    config = {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": [5, 4], "unk_token_id": 99}
    tok = read(settings=settings, config=config)
    assert tok.special == {"bos": 7, "eos": 4, "pad": 5}
    assert read(config={"eos_token_id": -1, "bos_token_id": True}).special == {}


def test_template_processing_adds_bos_and_moves_eos() -> None:
    def part(text: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": text, "type_id": 0}}

    single = [part("<s>"), {"Sequence": {"id": "A", "type_id": 0}}, part("<|end|>")]
    parsed = changed(post_processor={"type": "TemplateProcessing", "single": single, "pair": []})
    tok = read(parsed, {"eos_token": "<think>", "add_bos_token": False})
    assert tok.flags == {"add_bos": True, "add_eos": True}
    assert tok.special == {"bos": 7, "eos": 4, "eot": 5}


def test_byte_level_post_processor_and_small_code_vocabulary() -> None:
    parsed = changed(post_processor={"type": "ByteLevel"})
    assert read(parsed, {"add_bos_token": True}).flags == {"add_bos": False, "add_eos": False}
    config = {"model_type": "llama", "vocab_size": 49152}
    flags = read(settings={"add_prefix_space": False, "add_bos_token": True}, config=config).flags
    assert flags == {"add_bos": False, "add_space_prefix": False}


@pytest.mark.parametrize(
    ("files", "settings", "expected"),
    [
        ({}, {"chat_template": "T"}, ("T", {})),
        ({"chat_template.jinja": b"J"}, {"chat_template": "T"}, ("J", {})),
        ({"chat_template.json": b'{"chat_template": "S"}'}, {}, ("S", {})),
        ({"chat_template.jinja": b"J", "additional_chat_templates/rag.jinja": b"R"}, {}, ("J", {"rag": "R"})),
        (
            {},
            {"chat_template": [{"name": "default", "template": "D"}, {"name": "t", "template": "U"}]},
            ("D", {"t": "U"}),
        ),
        ({}, {"chat_template": None}, (None, {})),
    ],
)
def test_chat_templates(files: dict[str, bytes], settings: Any, expected: Any) -> None:
    tok = read(BASE, settings, None, **files)
    assert (tok.chat_template, tok.chat_templates) == expected


def test_added_tokens_only_in_the_settings() -> None:
    decoder = {"7": {"content": "<s>"}, "8": {"content": "<x>", "special": True}, "0": {"content": "zz"}}
    tok = read(settings={"added_tokens_decoder": decoder})
    assert tok.tokens[8] == "<x>"
    assert tok.tokens[0] == "a"


def test_same_text_under_two_ids_is_kept() -> None:
    tok = read(changed(added_tokens=[{"id": 4, "content": "ab", "special": True}]))
    assert tok.tokens[2] == tok.tokens[4] == "ab"


def test_old_files() -> None:
    files = {
        "vocab.json": json.dumps(BASE["model"]["vocab"]).encode(),
        "merges.txt": b"#version: 0.2\na b\nab b\n",
        "added_tokens.json": b'{"<|x|>": 4}',
        "tokenizer_config.json": b'{"tokenizer_class": "GPT2Tokenizer"}',
    }
    tok = hf.read_files(files)
    assert tok is not None
    assert (tok.tokens[4], tok.merges, tok.pre) == ("<|x|>", ["a b", "ab b"], "gpt-2")
    del files["tokenizer_config.json"]
    named = hf.read_files(files, {"model_type": "gpt2"})
    unnamed = hf.read_files(files, {"model_type": "llama"})
    assert named is not None
    assert unnamed is not None
    assert (named.pre, unnamed.pre) == ("gpt-2", None)


def test_sentencepiece_style_bpe_gets_scores_in_merge_order() -> None:
    vocab = {"<unk>": 0, "<0x0A>": 1, "a": 2, "b": 3, "ab": 4, "bb": 5, "\u2581\u2581": 6}
    parsed = {
        "added_tokens": [
            {"id": 0, "content": "<unk>", "special": True},
            {"id": 6, "content": "\u2581\u2581", "special": False},
        ],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}]},
        "model": {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "vocab": vocab, "merges": ["b b", "a b"]},
    }
    tok = read(parsed)
    assert (tok.model, tok.pre, tok.flags) == ("llama", "default", {"add_space_prefix": True})
    assert tok.scores == [0.0, 0.0, 0.0, 0.0, -1.0, 0.0, -1000.0]
    assert tok.types == [2, 6, 1, 1, 1, 1, 4]
    assert tok.tokens[6] == "  "


def test_no_tokenizer_and_foreign_ones() -> None:
    assert hf.read_files({"README.md": b"x", "config.json": b"{}"}) is None
    with pytest.raises(UnsupportedError, match=r"sentencepiece\.bpe\.model"):
        hf.read_files({"sentencepiece.bpe.model": b"\n"})
    with pytest.raises(UnsupportedError, match="WordLevel"):
        read(model(type="WordLevel"))
    with pytest.raises(UnsupportedError, match="continuing_subword_prefix"):
        read(model(continuing_subword_prefix="##"))


BAD_JSON = [b"", b"{", b"[]", b"\xff\xfe\x00", b"[" * 100_000, b"null", b'{"model": []}', b'{"model": {}}']


@pytest.mark.parametrize("data", BAD_JSON)
def test_no_json_is_corrupt_and_names_the_file(data: bytes) -> None:
    with pytest.raises(CorruptError) as caught:
        hf.read_files({"tokenizer.json": data})
    assert caught.value.path == "tokenizer.json"


@pytest.mark.parametrize(
    ("parsed", "entry"),
    [
        (model(vocab=["a"]), "model.vocab"),
        (model(vocab={}) | {"added_tokens": []}, "empty"),
        (model(vocab={"a": -1}), "'a'"),
        (model(vocab={"a": 1.0}), "'a'"),
        (model(vocab={"a": True}), "'a'"),
        (model(vocab={"a": "1"}), "'a'"),
        (model(vocab={"a": 1 << 60}), "'a'"),
        (model(vocab={"a": 0, "\ud800": 1}), "surrogate"),
        (model(merges="a b"), "merges"),
        (model(merges=["ab"]), r"merges\[0\]"),
        (model(merges=["a b", ["a", 1]]), r"merges\[1\]"),
        (model(merges=["a x"]), r"merges\[0\]"),
        (model(merges=["b a"]), r"merges\[0\]"),
        (model(merges=["a b b"]), r"merges\[0\]"),
        (changed(added_tokens={}), "added_tokens is"),
        (changed(added_tokens=[3]), r"added_tokens\[0\]"),
        (changed(added_tokens=[{"id": 0}]), r"added_tokens\[0\]"),
        (changed(added_tokens=[{"id": None, "content": "x"}]), r"added_tokens\[0\]"),
        (changed(added_tokens=[{"id": 4, "content": "\udc80"}]), r"added_tokens\[0\]"),
    ],
)
def test_bad_entries_are_corrupt_and_named(parsed: Any, entry: str) -> None:
    if parsed == changed(added_tokens={}):
        parsed = changed(added_tokens={"x": 1})
        entry = "added_tokens is not an array"
    with pytest.raises(CorruptError, match=entry) as caught:
        read(parsed)
    assert caught.value.path == "tokenizer.json"


def test_a_huge_id_is_refused_before_it_costs_memory() -> None:
    with pytest.raises(LimitError, match="ids reach"):
        read(model(vocab={"a": 0, "b": 1, "ab": 2, "abb": 3, "z": limits.MAX_TOKEN_ID}))


@pytest.mark.parametrize(
    "settings", [[], {"added_tokens_decoder": [1]}, {"added_tokens_decoder": {"x": {"content": "y"}}}]
)
def test_bad_settings_name_their_file(settings: Any) -> None:
    with pytest.raises(CorruptError) as caught:
        read(settings=settings)
    assert caught.value.path == "tokenizer_config.json"


def test_odd_settings_do_no_harm() -> None:
    odd = {"bos_token": 3, "eos_token": {"content": []}, "additional_special_tokens": {"a": 1}}
    assert read(settings=odd, config={"vocab_size": "x", "architectures": 5, "text_config": []}).special == {}
    posts: list[Any] = [3, [], {"type": "Sequence", "processors": 4}, {"type": "TemplateProcessing", "single": 1}]
    for post in posts:
        assert isinstance(read(changed(post_processor=post, pre_tokenizer=post)), Tokenizer)
    template = {"type": "TemplateProcessing", "single": [3, {}], "pair": [{"Sequence": 1}, None, 5]}
    assert read(changed(post_processor=template)).flags == {}


@pytest.mark.parametrize(
    ("name", "n_tokens", "kind", "special"),
    [
        ("qwen2_5", 151665, "gpt2", {"eos": 151645, "pad": 151643, "bos": 151643}),
        ("llama3", 128256, "gpt2", {"bos": 128000, "eos": 128001}),
    ],
)
def test_real_tokenizers(
    real_tokenizers: dict[str, Path], name: str, n_tokens: int, kind: str, special: dict[str, int]
) -> None:
    files = {path.name: path.read_bytes() for path in real_tokenizers[name].iterdir()}
    tok = hf.read_files(files, {"bos_token_id": special["bos"], "model_type": "x"})
    assert tok is not None
    assert (len(tok.tokens), tok.model, tok.special) == (n_tokens, kind, special)
    assert tok.types.count(TokenType.UNUSED) == 0
    assert tok.files["tokenizer.json"] == files["tokenizer.json"]


def test_every_cut_of_a_file_is_an_apr_error() -> None:
    text = json.dumps(BASE).encode()
    for cut in range(len(text)):
        with pytest.raises(AprError):
            hf.read_files({"tokenizer.json": text[:cut]})


def test_special_tokens_map_names_what_the_settings_do_not() -> None:
    roles = {"bos_token": {"content": "a"}, "eos_token": "b", "pad_token": "ab"}
    more = {"special_tokens_map.json": json.dumps(roles).encode()}
    tok = read(settings={"eos_token": "<s>", "pad_token": None}, **more)
    assert tok.special == {"bos": 0, "eos": 7}


def test_old_files_with_settings_and_unicode_line_ends() -> None:
    files = {
        "vocab.json": json.dumps({"a": 0, "\u2028": 1, "a\u2028": 2}).encode(),
        "merges.txt": "#version: 0.2\r\na \u2028\r\n".encode(),
        "added_tokens.json": b'{"<tool>": 3, "<end>": 4}',
        "tokenizer_config.json": json.dumps(
            {"added_tokens_decoder": {"3": {"content": "<tool>", "special": False}}}
        ).encode(),
    }
    tok = hf.read_files(files)
    assert tok is not None
    assert tok.merges == ["a \u2028"]
    assert tok.types[3:] == [TokenType.USER_DEFINED, TokenType.CONTROL]


def test_steps_nested_deeper_than_the_stack() -> None:
    step: dict[str, Any] = {"type": "ByteLevel"}
    for _ in range(5000):  # Python's newer JSON decoders accept such files
        step = {"type": "Sequence", "pretokenizers": [step]}
    assert is_byte_level(step)
    assert not adds_space_prefix({"pre_tokenizer": step})
