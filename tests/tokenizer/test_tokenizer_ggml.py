"""Tokenizers to and from GGUF keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from natives import gguf_parts

from aprfmt.errors import CorruptError, RefusedError, UsageError
from aprfmt.tokenizer import ggml
from aprfmt.tokenizer.model import Tokenizer

P = "tokenizer.ggml."


def small() -> Tokenizer:
    return Tokenizer(
        model="gpt2",
        tokens=["a", "b", "ab", "<s>"],
        merges=["a b"],
        types=[1, 1, 1, 3],
        pre="gpt-2",
        special={"bos": 3, "eos": 3, "fim_pre": 2, "unk": 0, "pad": 1},
        flags={"add_space_prefix": False, "add_bos": True, "lowercase": False},
        chat_template="T",
        chat_templates={"rag": "R"},
    )


def values(keys: list[ggml.KV]) -> dict[str, Any]:
    assert len({key for key, _, _ in keys}) == len(keys)
    return {key: value for key, _, value in keys}


def gguf_keys(path: Path) -> list[tuple[str, Any, Any]]:
    """Tokenizer keys of a file in its order, types in our notation."""
    from aprfmt.formats import gguf

    with gguf.open_model(path) as model:
        part = gguf_parts(model)[0]
        return [
            (
                key,
                entry.type.name if entry.elem_type is None else (entry.type.name, entry.elem_type.name),
                part.kv[key] if entry.elem_type is None else list(part.kv[key]),
            )
            for key, entry in part.kv.entries.items()
            if key.startswith("tokenizer.")
        ]


def test_order_and_types() -> None:
    keys = ggml.to_gguf(small(), vocab_size=None)
    assert [key.removeprefix(P) for key, _, _ in keys] == [
        "add_space_prefix", "model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id",
        "fim_pre_token_id", "unknown_token_id", "padding_token_id", "add_bos_token", "normalizer.lowercase",
        "tokenizer.chat_template.rag", "tokenizer.chat_templates", "tokenizer.chat_template",
    ]  # fmt: skip
    kinds = {key.removeprefix(P): kind for key, kind, _ in keys}
    assert kinds["tokens"] == kinds["merges"] == ("ARRAY", "STRING")
    assert kinds["token_type"] == ("ARRAY", "INT32")
    assert (kinds["model"], kinds["bos_token_id"], kinds["add_bos_token"]) == ("STRING", "UINT32", "BOOL")


def test_round_trip() -> None:
    tok = small()
    assert ggml.from_gguf(values(ggml.to_gguf(tok, vocab_size=None))) == tok
    assert ggml.from_gguf({"general.name": "x"}) is None


def test_scores_round_trip_and_merges_stay_out_of_sentencepiece() -> None:
    tok = Tokenizer(model="llama", tokens=["a", "b", "ab"], scores=[0.0, 0.5, -1.0], types=[1, 1, 1], merges=["a b"])
    got = values(ggml.to_gguf(tok, vocab_size=4))
    assert got[P + "scores"] == [0.0, 0.5, -1.0, -10000.0]
    assert P + "merges" not in got
    tok.gguf_keys = [P + "merges"]
    assert values(ggml.to_gguf(tok, vocab_size=4))[P + "merges"] == ["a b"]


@pytest.mark.parametrize(("style", "name"), [("llama.cpp", "[PAD{}]"), ("apr", "<|pad_{}|>")])
def test_padding(style: str, name: str) -> None:
    got = values(ggml.to_gguf(small(), vocab_size=6, pad_style=style))
    assert got[P + "tokens"] == ["a", "b", "ab", "<s>", name.format(4), name.format(5)]
    assert got[P + "token_type"] == [1, 1, 1, 3, 5, 5]


def test_never_truncates() -> None:
    with pytest.raises(RefusedError, match="4 tokens"):
        ggml.to_gguf(small(), vocab_size=3)
    with pytest.raises(UsageError, match="pad style"):
        ggml.to_gguf(small(), vocab_size=8, pad_style="x")
    with pytest.raises(RefusedError, match="types"):
        ggml.to_gguf(Tokenizer(model="gpt2", tokens=["a", "b"], types=[1]), vocab_size=2)


def test_repeated_texts_and_taken_pad_names_become_unique() -> None:
    tok = Tokenizer(model="gpt2", tokens=["<unk>", "a", "<unk>", "[PAD2]"], types=[2, 1, 2, 1])
    got = values(ggml.to_gguf(tok, vocab_size=5))
    assert got[P + "tokens"] == ["<unk>", "a", "[PAD2]_", "[PAD2]", "[PAD4]"]
    assert got[P + "token_type"] == [2, 1, 5, 1, 5]
    assert tok.tokens[2] == "<unk>"


def test_short_types_are_filled_and_none_ids_dropped() -> None:
    kv = {P + "model": "gpt2", P + "tokens": ["a", "b"], P + "token_type": [1], P + "bos_token_id": -1}
    tok = ggml.from_gguf(kv)
    assert tok is not None
    assert (tok.types, tok.special) == ([1, 5], {})


@pytest.mark.parametrize(
    "kv",
    [
        {"model": 3},
        {"tokens": "abc"},
        {"tokens": [1, 2]},
        {"tokens": 5},
        {"tokens": ["a"], "token_type": [1, 1]},
        {"tokens": ["a"], "token_type": [True]},
        {"tokens": ["a"], "scores": ["x"]},
        {"merges": [1]},
        {"pre": 4},
        {"bos_token_id": "1"},
        {"bos_token_id": True},
        {"add_bos_token": 1},
    ],
)
def test_wrong_types_are_corrupt(kv: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match=r"tokenizer\.ggml"):
        ggml.from_gguf({P + "model": "gpt2", **{P + key: value for key, value in kv.items()}})


@pytest.mark.parametrize(
    "kv",
    [
        {"tokenizer.chat_template": 1},
        {"tokenizer.chat_template.x": []},
        {"tokenizer.chat_templates": "ab"},
        {"tokenizer.chat_templates": [3]},
    ],
)
def test_wrong_templates_are_corrupt(kv: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match="chat_template"):
        ggml.from_gguf({P + "model": "gpt2", **kv})


def test_real_model_gives_back_the_same_keys(smollm2_gguf: Path) -> None:
    source = gguf_keys(smollm2_gguf)
    tok = ggml.from_gguf({key: value for key, _, value in source})
    assert tok is not None
    assert ggml.to_gguf(tok, vocab_size=49152) == source
    assert ggml.from_gguf(values(ggml.to_gguf(tok, vocab_size=None))) == tok


@pytest.mark.parametrize("name", ["llama-bpe", "llama-spm", "deepseek-coder", "aquila", "falcon"])
def test_real_vocabularies_give_back_the_same_keys(llama_cpp_models: Path, name: str) -> None:
    source = gguf_keys(llama_cpp_models / f"ggml-vocab-{name}.gguf")
    tok = ggml.from_gguf({key: value for key, _, value in source})
    assert tok is not None
    assert ggml.to_gguf(tok, vocab_size=len(tok.tokens)) == source
