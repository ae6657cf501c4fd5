"""Choosing llama.cpp's pre-tokenizer name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pre_table
from aprfmt.errors import UsageError
from aprfmt.tokenizer import pre
from aprfmt.tokenizer.pre import HASHES, PRE_NAMES, PROBE, check_name
from aprfmt.tokenizer.rules import NAMES, RULES, SUFFIX, SUFFIX_BY_CLASSES


def byte_level(*steps: Any, use_regex: bool = False) -> dict[str, Any]:
    final = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}
    return {"type": "Sequence", "pretokenizers": [*steps, final]}


def parsed(steps: Any, **model: Any) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], **model}, "pre_tokenizer": steps}


def test_data_is_whole() -> None:
    assert len(PROBE) == 350
    assert len(HASHES) == 95
    assert all(len(digest) == 64 for digest in HASHES)
    assert HASHES["b6dc8df998e1cfbdc4eac8243701a65afe638679230920b50d6f17d81c098166"] == "olmo"


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "expected", "how"),
    [
        ("qwen2_5", "qwen2", "hash"),
        ("qwen3", "qwen2", "hash"),
        ("llama3", "llama-bpe", "structure"),
        ("gpt4o", "granite-embed-multi-97m", "structure"),
    ],
)
def test_real_tokenizers(real_tokenizers: dict[str, Path], name: str, expected: str, how: str) -> None:
    text = (real_tokenizers[name] / "tokenizer.json").read_bytes()
    choice = pre.detect(text)
    assert (choice.name, choice.how) == (expected, how)


@pytest.mark.parametrize(("name", "expected"), [("qwen2_5", "qwen2"), ("llama3", "llama-bpe")])
def test_structure_agrees_with_the_hash(
    real_tokenizers: dict[str, Path], name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (real_tokenizers[name] / "tokenizer.json").read_bytes()
    monkeypatch.setattr(pre, "HASHES", {})
    choice = pre.detect(text)
    assert (choice.name, choice.how) == (expected, "structure")


def test_llama_with_bos_is_found_by_hash(real_tokenizers: dict[str, Path]) -> None:
    data = json.loads((real_tokenizers["llama3"] / "tokenizer.json").read_bytes())
    bos = {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [128000], "tokens": ["<|begin_of_text|>"]}
        },
    }
    choice = pre.detect(json.dumps(data).encode(), data)
    assert (choice.name, choice.how) == ("llama-bpe", "hash")


@pytest.mark.parametrize("name", [name for name, row in RULES.items() if row.letters == "bytes"])
def test_every_rule_is_found_by_its_own_steps(name: str) -> None:
    row = RULES[name]
    steps = [
        {"type": "Digits", "individual_digits": True}
        if split == "digits"
        else {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in row.splits
    ]
    data = parsed(byte_level(*steps, use_regex=row.gpt2_regex), ignore_merges=row.ignore_merges)
    if name in ("gpt-4o", "llama4"):  # a token that no merge gives, so that the better rule does not fit
        data["model"]["vocab"] = {"a": 0, "b": 1, "ab": 2}
    choice = pre.detect(json.dumps(data).encode(), data)
    assert choice.how == "structure"
    assert choice.name is not None
    found = RULES[choice.name]
    assert (found.splits, found.gpt2_regex, found.ignore_merges) == (row.splits, row.gpt2_regex, row.ignore_merges)


def test_spellings_of_the_same_rule() -> None:
    split = RULES["qwen2"].splits[0]
    spelled = split.replace(SUFFIX, SUFFIX_BY_CLASSES).replace(r"\r\n", "\r\n")
    assert spelled != split
    step = {"type": "Split", "pattern": {"Regex": spelled}, "behavior": "Removed", "invert": True}
    data = parsed(byte_level(step))
    assert pre.detect(json.dumps(data).encode()).name == "qwen2"


@pytest.mark.parametrize(
    "data",
    [
        parsed(None),
        parsed(byte_level({"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated"})),
        parsed(byte_level({"type": "Whitespace"}, use_regex=True)),
        parsed({"type": "Sequence", "pretokenizers": []}),
        parsed({"type": "Sequence", "pretokenizers": [4]}),
        parsed({"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}),
        {**parsed(byte_level(use_regex=True)), "normalizer": {"type": "Lowercase"}},
        parsed(None, type="WordPiece"),
        parsed({"type": "Metaspace"}, byte_fallback=True),
        {},
        [],
    ],
)
def test_unknown_rules_have_no_name(data: Any) -> None:
    choice = pre.detect(json.dumps(data).encode(), data)
    assert (choice.name, choice.how) == (None, "none")
    assert choice.detail


def test_no_json_has_no_name() -> None:
    assert pre.detect(b"{").how == "none"


@pytest.mark.parametrize("change", [
    {"truncation": {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}},
    {"padding": {"strategy": {"Fixed": 1 << 40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
    "pad_type_id": 0, "pad_token": "!"}},
], ids=["truncation", "padding"])  # fmt: skip
def test_truncation_and_padding_do_not_count(real_tokenizers: dict[str, Path], change: dict[str, Any]) -> None:
    data = json.loads((real_tokenizers["qwen2_5"] / "tokenizer.json").read_text("utf-8"))
    choice = pre.detect(json.dumps({**data, **change}).encode())
    assert (choice.name, choice.how) == ("qwen2", "hash")


@pytest.mark.parametrize("change", [
    {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 100}] * 9}},
    {"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
    "single": [{"SpecialToken": {"id": "<none>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}},
], ids=["text that multiplies", "panic of the package"])  # fmt: skip
def test_crafted_files_have_no_name(change: dict[str, Any]) -> None:
    data: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": None,
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    }
    assert pre.detect(json.dumps({**data, **change}).encode()).name is None


def test_structure_overrules_a_hash_whose_rule_is_another_one(real_tokenizers: dict[str, Path]) -> None:
    """The probe text has no letters with combining marks: Qwen 3.5's rules give Qwen 2's ids of it."""
    data = json.loads((real_tokenizers["qwen2_5"] / "tokenizer.json").read_bytes())
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = RULES["qwen35"].splits[0]
    text = json.dumps(data).encode()
    assert pre.hash_name(text) == "qwen2"
    assert (pre.detect(text).name, pre.detect(text).how) == ("qwen35", "structure")


def test_every_name_that_llama_cpp_knows_has_a_rule() -> None:
    assert NAMES == PRE_NAMES
    assert len(PRE_NAMES) == 91
    check_name("qwen2")
    with pytest.raises(UsageError, match="no pre-tokenizer 'lama-bpe'") as caught:
        check_name("lama-bpe")
    assert caught.value.hint
    assert "--pre llama-bpe" in caught.value.hint


@pytest.mark.parametrize(
    ("steps", "normalizer", "detail"),
    [
        (byte_level({"type": "Whitespace"}, use_regex=True), None, "the nearest is gpt-2: it lacks `type=Whitespace`"),
        (byte_level(use_regex=True), {"type": "Lowercase"}, "no normalizer Lowercase"),
        (None, None, "no splitting rules"),
    ],
)
def test_an_unknown_one_names_the_nearest(steps: Any, normalizer: Any, detail: str) -> None:
    data = {**parsed(steps), "normalizer": normalizer}
    assert detail in pre.detect(json.dumps(data).encode()).detail


@pytest.mark.turns(first=False)
def test_the_committed_table_is_what_the_tool_gives(real_tokenizers: dict[str, Path]) -> None:
    lines = (Path(pre_table.TABLE)).read_text("utf-8").splitlines()
    for row in pre_table.real_rows():
        assert "| " + " | ".join(row) + " |" in lines
    assert pre_table.HEAD in "\n".join(lines)
    assert len(real_tokenizers) == 5
