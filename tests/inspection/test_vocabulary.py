"""What `apr vocab` says: ids as llama.cpp has them, text that comes back, and what two tokenizers differ in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from arch_models import write_tokenizers

import aprfmt
from aprfmt.errors import CorruptError, RefusedError, UsageError
from aprfmt.inspection.vocabulary import Vocabulary
from aprfmt.tokenizer.encoding import hard_texts
from aprfmt.tokenizer.fast import load

_BETWEEN = "\n__ggml_vocab_test__\n"

# Of llama.cpp's vocabularies, with ids that it tests itself by.
LLAMA_CPP = (
    *("bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt"),
    *("phi-3", "qwen2", "refact", "starcoder"),
)


def differences(found: Vocabulary) -> dict[str, tuple[int, str]]:
    return {one.what: (one.count, one.first) for one in found.differences}


@pytest.mark.turns(of=16)
@pytest.mark.parametrize("name", LLAMA_CPP)
def test_ids_are_those_that_llama_cpp_tests_itself_by(name: str, llama_cpp_models: Path) -> None:
    path = llama_cpp_models / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{path}.inp").read_text("utf-8").split(_BETWEEN)[:-1]
    wanted = [[int(i) for i in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]
    found = aprfmt.vocab(path, texts, special=False)
    assert len(found.texts) == len(wanted) > 20
    assert [tokens.text for tokens in found.texts if tokens.ids != wanted[texts.index(tokens.text or "")]] == []


def test_text_comes_back(smollm2_gguf: Path) -> None:
    found = aprfmt.vocab(smollm2_gguf, "Hello, world!\n<|im_end|>")
    (tokens,) = found.texts
    assert tokens.decoded == tokens.text
    assert [token.piece for token in tokens.tokens] == ["Hello", ",", "Ġworld", "!", "Ċ", "<|im_end|>"]
    assert [token.text for token in tokens.tokens] == ["Hello", ",", " world", "!", "\n", "<|im_end|>"]
    for ids in (tokens.ids, " ".join(map(str, tokens.ids)), json.dumps(tokens.ids)):
        (back,) = aprfmt.vocab(smollm2_gguf, ids=ids).texts
        assert back.decoded == tokens.text
        assert [token.piece for token in back.tokens] == [token.piece for token in tokens.tokens]
    assert found.facts.pre == "smollm"
    assert found.facts.special["eos"] == 2


@pytest.mark.turns(first=False, of=16)
def test_what_stands_around_a_text(real_tokenizers: dict[str, Path]) -> None:
    (with_it,) = aprfmt.vocab(real_tokenizers["gemma3"], "a").texts
    (without,) = aprfmt.vocab(real_tokenizers["gemma3"] / "tokenizer.json", "a", special=False).texts
    assert with_it.ids == [2, *without.ids]


@pytest.mark.turns(first=False, of=16)
def test_the_same_tokenizer_in_every_container(smollm2_short: Path, tmp_path: Path) -> None:
    aprfmt.import_model(smollm2_short, tmp_path / "m.apr")
    aprfmt.export_model(smollm2_short, tmp_path / "hf", format="hf")
    for other in ("m.apr", "hf"):
        found = aprfmt.vocab(smollm2_short, against=tmp_path / other)
        assert found.identical, differences(found)
        assert found.compared > 80


@pytest.mark.turns(first=False, of=16)
def test_a_folder_and_llama_cpps_vocabulary_of_it(real_tokenizers: dict[str, Path], llama_cpp_models: Path) -> None:
    found = aprfmt.vocab(real_tokenizers["llama3"], against=llama_cpp_models / "ggml-vocab-llama-bpe.gguf")
    assert differences(found) == {"tokens added around text": (1, "[], not [128000]")}


@pytest.mark.turns(first=False, of=16)
def test_what_two_versions_differ_in(real_tokenizers: dict[str, Path]) -> None:
    found = differences(aprfmt.vocab(real_tokenizers["qwen2_5"], against=real_tokenizers["qwen3"]))
    assert found["number of tokens"] == (4, "151665, not 151669")
    alike = aprfmt.vocab(real_tokenizers["qwen2_5"], ["def f(x): return x"], against=real_tokenizers["qwen3"])
    assert alike.compared == 1
    assert [*differences(alike)] == ["number of tokens"]


Edit = Callable[[dict[str, Any]], None]


def _swap_tokens(parsed: dict[str, Any]) -> None:
    vocab = parsed["model"]["vocab"]
    vocab["Ġthe"], vocab["Ġof"] = vocab["Ġof"], vocab["Ġthe"]


def _swap_merges(parsed: dict[str, Any]) -> None:
    merges = parsed["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def _split_otherwise(parsed: dict[str, Any]) -> None:
    parsed["normalizer"] = {"type": "Lowercase"}


def _more_control(parsed: dict[str, Any]) -> None:
    next(token for token in parsed["added_tokens"] if token["content"] == "<tool_call>")["special"] = True


def _without_settings(folder: Path) -> None:
    """tokenizer_config.json lists the added tokens once more."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["added_tokens_decoder"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.turns(of=16)
@pytest.mark.parametrize(
    ("edit", "what", "count"),
    [
        (_swap_tokens, "vocabulary", 2),
        (_swap_merges, "merges", 2),
        (_split_otherwise, "ids of", None),
        (_more_control, "control tokens", 1),
    ],
)
def test_each_kind_of_difference_is_found(
    edit: Edit, what: str, count: int | None, real_tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(real_tokenizers["qwen2_5"], tmp_path / "t")
    _without_settings(tmp_path / "t")
    parsed = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    edit(parsed)
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(parsed))
    found = differences(aprfmt.vocab(real_tokenizers["qwen2_5"], against=tmp_path / "t"))
    (key,) = (key for key in found if key.startswith(what))
    assert count is None or found[key][0] == count


def test_another_end_token_is_a_difference(smollm2_short: Path, tmp_path: Path) -> None:
    aprfmt.stamp(smollm2_short, tmp_path / "m.gguf", set={"tokenizer.ggml.eos_token_id": 0})
    found = aprfmt.vocab(smollm2_short, against=tmp_path / "m.gguf")
    assert differences(found) == {"special tokens": (1, "eos is 2 ('<|im_end|>'), not 0 ('<|endoftext|>')")}


def test_the_hard_texts_are_hard() -> None:
    texts = hard_texts()
    assert len(set(texts)) == len(texts)
    assert {"", " ", "\r\n", "\u200b"} <= set(texts)


@pytest.mark.parametrize("ids", ["", "a", "1 -2", "1.5", [1.5], [True], 7, ["1"]])
def test_what_is_no_id(ids: Any, smollm2_gguf: Path) -> None:
    with pytest.raises(UsageError):
        aprfmt.vocab(smollm2_gguf, ids=ids)


def test_ids_that_are_not_there(smollm2_gguf: Path) -> None:
    with pytest.raises(UsageError, match="unknown token id 49152"):
        aprfmt.vocab(smollm2_gguf, ids="49152")
    with pytest.raises(UsageError, match="unknown token id"):
        aprfmt.vocab(smollm2_gguf, ids="9" * 5000)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    import numpy as np

    aprfmt.save_file({"a": np.zeros(4, np.float32)}, tmp_path / "m.apr")
    with pytest.raises(RefusedError, match="no tokenizer"):
        aprfmt.vocab(tmp_path / "m.apr", "a")


def test_what_is_no_tokenizer_json() -> None:
    for text in (b"", b"{}", b'{"model": 1}', b"\xff"):
        with pytest.raises(CorruptError, match="cannot be loaded"):
            load(text)


def test_truncation_and_padding_are_not_done(smollm2_gguf: Path, tmp_path: Path) -> None:
    folder = write_tokenizers(tmp_path, ["smollm2"])["smollm2"]
    parsed = json.loads((folder / "tokenizer.json").read_text())
    parsed["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 100}, "direction": "Right", "pad_to_multiple_of": None}
    parsed["padding"] = padding | {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer.json").write_text(json.dumps(parsed))
    (tokens,) = aprfmt.vocab(folder, "one two three four").texts
    assert len(tokens.ids) == 4


def test_a_text_that_is_no_utf8(smollm2_gguf: Path) -> None:
    with pytest.raises(UsageError, match="not valid Unicode"):
        aprfmt.vocab(smollm2_gguf, ["a\udcff"])
