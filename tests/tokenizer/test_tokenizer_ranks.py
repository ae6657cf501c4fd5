"""tiktoken files, tekken.json and RWKV vocabularies: read, carried, written as GGUF and as tokenizer.json."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from converter_peer import ConverterPeer
from rank_files import ranks_of, remote_folder, rwkv_file, tekken_file, tiktoken_file
from texts import make_texts
from token_ids_peer import as_read, compare
from tokenizer_folders import write_folder

import aprfmt
from aprfmt.errors import AprError, UnsupportedError
from aprfmt.tokenizer import hf, hf_write, ranks, rwkv
from aprfmt.tokenizer.byte_letters import in_letters
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.tokenizer.rules import RULES

SMALL = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256, b"abc": 257, b"bc": 258, b"\xff\xfe": 259}


def read(files: Mapping[str, bytes], config: Any = None) -> Tokenizer:
    tok = hf.read_files(files, config)
    assert tok is not None
    return tok


def settings(**values: Any) -> dict[str, bytes]:
    return {"tokenizer_config.json": json.dumps(values).encode()}


@pytest.mark.turns(first=False, of=16)
def test_a_tiktoken_file_gives_the_lists_of_the_tokenizer_json(real_tokenizers: dict[str, Path]) -> None:
    from tokenizers import Tokenizer as Fast

    text = (real_tokenizers["qwen2_5"] / "tokenizer.json").read_bytes()
    known = ranks_of(text)
    tok, real = read({"qwen.tiktoken": tiktoken_file(known)}), read({"tokenizer.json": text})
    assert tok.tokens[: len(known)] == real.tokens[: len(known)]
    assert (tok.merges, tok.pre) == (real.merges, real.pre)
    assert tok.tokens[len(known) : len(known) + 4] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>"]
    assert len(tok.tokens) == len(known) + 3 + 205
    assert tok.special == dict.fromkeys(("bos", "eos", "unk"), len(known))
    made, own = hf_write.to_hf_files(replace(tok, files={})), Fast.from_buffer(text)
    fast = Fast.from_buffer(made["tokenizer.json"])
    assert [t for t in make_texts(1000, ["<|endoftext|>"]) if fast.encode(t).ids != own.encode(t).ids] == []


@pytest.mark.parametrize(
    ("name", "tokenizer_class", "pre", "special"),
    [
        ("tiktoken.model", "TikTokenTokenizer", "kimi-k2", {260: "[BOS]", 261: "<|reserved_token_261|>"}),
        ("tokenizer.model", "TikTokenTokenizer", "kimi-k2", {260: "[BOS]", 515: "<|reserved_token_515|>"}),
        ("tokenizer.model", "ChatGLM4Tokenizer", "chatglm-bpe", {260: "[BOS]"}),
        ("hy.tiktoken", "HYTokenizer", "hunyuan", {260: "[BOS]", 261: "<|startoftext|>", 262: "<|bos|>"}),
        ("hy.tiktoken", "", "hunyuan", {262: "<|bos|>"}),
        ("other.tiktoken", "", None, {260: "[BOS]"}),
    ],
)
def test_special_tokens_are_those_of_the_class(
    name: str, tokenizer_class: str, pre: str | None, special: dict[int, str]
) -> None:
    body = {"added_tokens_decoder": {"260": {"content": "[BOS]", "special": True}}, "bos_token": "[BOS]"}
    tok = read({name: tiktoken_file(SMALL), **settings(tokenizer_class=tokenizer_class, **body)})
    assert tok.pre == pre
    assert {i: tok.tokens[i] for i in special} == special
    assert all(tok.types[i] == 3 for i in special)
    assert tok.special["bos"] == (262 if pre == "hunyuan" else 260)
    assert bool(tok.pre_note) == (pre is None)
    assert tok.tokens[259] == in_letters(b"\xff\xfe")
    assert tok.merges[:3] == ["a b", "ab c", "b c"]


def test_llama_3_is_known_by_its_model_and_size() -> None:
    family = ranks.family_of("tokenizer.model", "", "llama", 128000)
    assert family is not None
    assert family.pre == "llama-bpe"
    specials = family.specials(128000)
    assert len(specials) == len(set(specials)) == 256
    ids = {text: i for i, text in enumerate(specials, 128000)}
    wanted = {"<|end_of_text|>": 128001, "<|start_header_id|>": 128006, "<|eot_id|>": 128009, "<|python_tag|>": 128010}
    assert {text: ids[text] for text in wanted} == wanted
    assert ids["<|reserved_special_token_247|>"] == 128255
    assert ranks.family_of("tokenizer.model", "", "llama", 200000) is None
    assert ranks.family_of("tokenizer.model", "", "qwen2", 128000) is None


def test_special_tokens_beyond_the_models_vocabulary_are_left_out_and_said() -> None:
    tok = read({"tiktoken.model": tiktoken_file(SMALL)}, {"vocab_size": 300})
    assert len(tok.tokens) == 300
    assert tok.notes == ["special tokens from id 300 on exceed the model's vocabulary and are dropped"]


def test_a_token_that_no_merges_reach_has_none() -> None:
    known = {b"x": 0, b"y": 1, b"z": 2, b"xyz": 3, b"zx": 4, b"yzx": 5, b"xyzx": 6}
    assert ranks.merges_of_ranks(known) == ["z x", "y zx", "x yzx"]
    assert ranks.merges_of_ranks(known, every_cut=True) == ["z x", "y zx", "x yzx", "xyz x"]


def test_a_sentencepiece_model_is_not_taken_for_ranks() -> None:
    assert ranks.looks_like_ranks(tiktoken_file(SMALL))
    assert not ranks.looks_like_ranks(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    assert not ranks.looks_like_ranks(b"")


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"YQ== 0\nY? 1\n", "line 2 is not base64"),
        (b"YQ== 0\nYg== x\n", "line 2 has no usable rank"),
        (b"YQ== 0\nYg== 99999999\n", "line 2 has no usable rank"),
        (b"YQ== 0\nYg== 0\n", "the same rank"),
        (b"YQ== 0\n 1\n", "empty token"),
        (b"YQ== 0\n" + base64.b64encode(bytes(2000)) + b" 1\n", "2000 bytes"),
    ],
)
def test_damaged_tiktoken_files_are_named(data: bytes, what: str) -> None:
    with pytest.raises(AprError, match=what) as caught:
        read({"x.tiktoken": data})
    assert caught.value.path == "x.tiktoken"


# --- tekken.json ---


def tekken(**changed: Any) -> dict[str, bytes]:
    body = json.loads(tekken_file(SMALL, RULES["tekken"].splits[0], specials=22))
    return {"tekken.json": json.dumps(body | changed).encode()}


def test_tekken_ids_begin_with_the_special_tokens() -> None:
    tok = read(tekken())
    assert tok.tokens[:6] == ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"]
    assert tok.tokens[20:22] == ["<SPECIAL_20>", "<SPECIAL_21>"]
    assert tok.tokens[22 + 97] == "a"
    assert (tok.model, tok.pre, len(tok.tokens)) == ("gpt2", "tekken", 282)
    assert tok.types == [3] * 22 + [1] * 260
    assert tok.special == {"bos": 1, "eos": 2, "unk": 0, "pad": 11}
    assert tok.flags == {"add_bos": True, "add_eos": False}
    assert tok.merges[:4] == ["a b", "a bc", "ab c", "b c"]
    assert tok.chat_template == "mistral-v3-tekken"
    assert read(tekken(special_tokens=None)).tokens == tok.tokens
    assert read(tekken(special_tokens=[{"rank": 2, "token_str": "</s>"}])).special == {"eos": 2, "pad": 2}


def test_tekken_vocabularies_are_cut_to_the_size_that_they_name() -> None:
    config = {"default_vocab_size": 279, "default_num_special_tokens": 22, "version": "v11"}
    tok = read(tekken(config=config))
    assert len(tok.tokens) == 279
    assert tok.merges == ["a b"]
    assert tok.chat_template is None
    assert "v11" in tok.notes[0]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"config": 3}, "`config`"),
        ({"config": {"default_vocab_size": "x"}}, "default_vocab_size"),
        ({"config": {"default_vocab_size": 400, "default_num_special_tokens": 22}}, "260 \\+ 22 tokens"),
        ({"vocab": [{"rank": -1}]}, r"vocab\[0\] has no usable rank"),
        ({"vocab": [{"rank": 0, "token_bytes": "*"}]}, r"vocab\[0\].token_bytes is not base64"),
        ({"vocab": []}, "no tokens"),
        ({"special_tokens": [{"rank": 22, "token_str": "x"}]}, r"special_tokens\[0\]"),
        ({"special_tokens": [{"rank": 0, "token_str": "<SPECIAL_1>"}]}, "the same text"),
    ],
)
def test_damaged_tekken_files_are_named(changed: dict[str, Any], what: str) -> None:
    with pytest.raises(AprError, match=what) as caught:
        read(tekken(**changed))
    assert caught.value.path == "tekken.json"


# --- RWKV ---


def test_rwkv_vocabularies_are_read_and_written_again() -> None:
    data = rwkv_file([b"\n\n", b"'\"", b"\\n", "\u4f60\u597d".encode(), b"\xe4\xbd"])
    tok = read({rwkv.FILE_NAME: data, **settings(eos_token="x")}, {"vocab_size": 270, "eos_token_id": 5})
    assert (tok.model, tok.tokens[0], tok.types[0], len(tok.tokens)) == ("rwkv", "<s>", 3, 262)
    assert tok.tokens[257:262] == ["\\n\\n", "\\'\"", "\\\\n", "\\xe4\\xbd\\xa0\\xe5\\xa5\\xbd", "\\xe4\\xbd"]
    assert tok.special == {"bos": 0, "eos": 0, "eot": 257}
    made = hf_write.to_hf_files(replace(tok, files={}))
    assert made[rwkv.FILE_NAME] == data
    assert read(made, {"vocab_size": 270}).tokens == tok.tokens
    assert "chat_template.jinja" not in made
    tok.types[7] = 5  # with a pad inside, no vocabulary file can say the ids
    assert rwkv.to_vocabulary(tok) is None


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("1 'a' 2", "line 1"),
        ("1 a 1", "line 1"),
        ("2 'a' 1", "ids must be consecutive"),
        ("1 '' 0", "line 1"),
        ("1 f'a' 1", "line 1"),
        ("1 'a' 1\n2 b'a' 1", "duplicate token"),
        ("1 '\\ud800' 3", "line 1"),
        ("1 '" + "a" * 5000 + "' 5000", "line 1"),
    ],
)
def test_damaged_rwkv_vocabularies_are_named(line: str, what: str) -> None:
    with pytest.raises(AprError, match=what) as caught:
        read({rwkv.FILE_NAME: line.encode() + b"\n"})
    assert caught.value.path == rwkv.FILE_NAME


def test_texts_are_cut_where_no_token_reaches_across() -> None:
    found = rwkv.splits([b"ab", b" ab", b"\n\n", "a\u00e9".encode(), b"\xa9b"])
    assert "(?<=[A-Za-z])(?=[ ])" in found
    assert "(?<=[ ])(?=[A-Za-z])" not in found
    assert "(?<=[A-Za-z])(?=[^\\x00-\\x7f])" not in found
    assert "(?<=[^\\x00-\\x7f])(?=[A-Za-z])" not in found


def test_an_rwkv_tokenizer_without_all_bytes_has_no_tokenizer_json() -> None:
    with pytest.raises(UnsupportedError, match="byte 0x00"):
        hf_write.to_hf_files(Tokenizer("rwkv", ["<s>", "a"], types=[3, 1]))


# --- whole models ---

FILES: dict[str, Callable[[], dict[str, bytes]]] = {
    "qwen.tiktoken": lambda: {"qwen.tiktoken": tiktoken_file(SMALL)},
    "hy.tiktoken": lambda: {"hy.tiktoken": tiktoken_file(SMALL), **settings(tokenizer_class="HYTokenizer")},
    "tiktoken.model": lambda: {"tiktoken.model": tiktoken_file(SMALL)},
    "tokenizer.model": lambda: {
        "tokenizer.model": tiktoken_file(SMALL), **settings(tokenizer_class="ChatGLM4Tokenizer"),
    },
    "tekken.json": tekken,
    "rwkv": lambda: {rwkv.FILE_NAME: rwkv_file([b"\n\n", b"ab"])},
}  # fmt: skip


@pytest.mark.parametrize("kind", list(FILES))
def test_folders_come_back_and_ggufs_become_folders(tmp_path: Path, kind: str) -> None:
    folder = write_folder(tmp_path / "model", FILES[kind](), 600)
    aprfmt.import_model(folder, tmp_path / "m.apr")
    report = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out", format="hf")
    assert report.lossless
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in (tmp_path / "out").iterdir()}
    assert all((tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes() for name in names)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    aprfmt.convert_model(tmp_path / "m.gguf", tmp_path / "again", format="hf")
    with aprfmt.open(folder) as first, aprfmt.open(tmp_path / "again") as second:
        assert first.tokenizer is not None
        assert second.tokenizer is not None
        n = len(first.tokenizer.tokens)
        assert second.tokenizer.model == first.tokenizer.model
        assert second.tokenizer.tokens[:n] == first.tokenizer.tokens
        assert second.tokenizer.merges == first.tokenizer.merges


@pytest.mark.turns(of=16)
@pytest.mark.parametrize(
    ("architecture", "file", "name", "assumed"),
    [
        ("QWenLMHeadModel", "qwen.tiktoken", "QWenTokenizer", []),
        ("HunYuanDenseV1ForCausalLM", "hy.tiktoken", "HYTokenizer", ["bos_token_id"]),
    ],
)
def test_tiktoken_keys_are_those_of_llama_cpps_converter(
    llama_cpp_converter: Path, real_tokenizers: dict[str, Path], tmp_path: Path,
    architecture: str, file: str, name: str, assumed: list[str],
) -> None:  # fmt: skip
    fast = real_tokenizers["qwen2_5"] / "tokenizer.json"
    known = ranks_of(fast.read_bytes(), 3_000)
    data = {file: tiktoken_file(known)}
    size = 3_300
    folder = write_folder(tmp_path / "model", data, size, rows=1, architectures=[architecture], n_head=2, n_embed=16)
    tok = read(data, {"vocab_size": size})
    specials = {text: i for i, text in enumerate(tok.tokens) if i >= len(known)}
    remote_folder(folder, name, file, specials, fast, size)
    ConverterPeer().convert_once(folder, tmp_path / "peer.gguf", "f16", ["--vocab-only"])
    from aprfmt.tokenizer import ggml

    ours = {key: value for key, _, value in ggml.to_gguf(tok, vocab_size=size)}
    with aprfmt.open(tmp_path / "peer.gguf") as theirs:
        kv = {key: theirs.metadata[key] for key in theirs.metadata if key.startswith("tokenizer.")}
    pre = "tokenizer.ggml.pre"
    assert (ours.pop(pre), kv.pop(pre)) == (tok.pre, "qwen2")
    kv |= {f"tokenizer.ggml.{key}": ours[f"tokenizer.ggml.{key}"] for key in assumed}
    assert {key: list(v) if isinstance(v, list) else v for key, v in kv.items()} == ours


def test_rwkv_keys_are_those_of_llama_cpps_converter(llama_cpp_converter: Path, tmp_path: Path) -> None:
    # The converter takes id 261 for the end of a turn, which it is in the published vocabulary.
    order = [b"a b", b"\xe4\xbd", b"'\"", b"\\", b"\n\n"]
    data = rwkv_file([*order[:-1], b"x" * 9, order[-1]])
    config: dict[str, Any] = {
        "architectures": ["Rwkv6ForCausalLM"],
        "head_size": 8,
        "layer_norm_epsilon": 1e-5,
        "rescale_every": 6,
    }
    folder = write_folder(tmp_path / "model", {rwkv.FILE_NAME: data}, 600, **config)
    ConverterPeer().convert_once(folder, tmp_path / "peer.gguf", "f16", ["--vocab-only"])
    from aprfmt.tokenizer import ggml

    tok = read({rwkv.FILE_NAME: data}, {"vocab_size": 600})
    ours = {key: value for key, _, value in ggml.to_gguf(tok, vocab_size=600)}
    with aprfmt.open(tmp_path / "peer.gguf") as theirs:
        kv = {key: theirs.metadata[key] for key in theirs.metadata if key.startswith("tokenizer.")}
    assert {key: list(v) if isinstance(v, list) else v for key, v in kv.items()} == ours


@pytest.mark.turns(of=16)
@pytest.mark.llama
@pytest.mark.parametrize(
    "kind",
    ["rwkv", "tekken.json", "deepseek-llm", "tiny_aya", "whitespace"]
    + [pytest.param(kind, marks=pytest.mark.slow) for kind in ("tiktoken, Kimi", "bloom", "superbpe", "afmoe")],
)
def test_llama_cpp_gives_the_ids_of_the_written_tokenizer_json(
    real_tokenizers: dict[str, Path], llama_cpp_models: Path, kind: str
) -> None:
    """A share of what tools/token_ids.py does: no difference without a reason."""
    outcome = compare(kind, 200)
    assert outcome.texts == 200
    assert outcome.unexplained == []
    assert len(outcome.different) < 40


def test_invalid_bytes_are_read_as_llama_cpp_reads_them() -> None:
    assert as_read("a\udcff\udce4b") == "a\ufffd\ufffdb"
    assert as_read("\udcf0\udc80\udc9f\udc9a\udc80") == "\u07da\udc80".replace("\udc80", "\ufffd")
