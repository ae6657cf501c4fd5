"""The probe's ids from a small part of a tokenizer are those of the whole one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from aprfmt.tokenizer.pre import PROBE, probe_ids


def whole(parsed: dict[str, Any]) -> list[int]:
    tokenizer = Tokenizer.from_str(json.dumps(parsed))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return list(tokenizer.encode(PROBE).ids)


@pytest.mark.turns
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3", "gpt4o"])
def test_real_tokenizers(name: str, real_tokenizers: dict[str, Path]) -> None:
    parsed = json.loads((real_tokenizers[name] / "tokenizer.json").read_bytes())
    assert probe_ids(parsed) == whole(parsed)
    parsed["model"]["merges"] = [
        merge.split(" ") if isinstance(merge, str) else " ".join(merge) for merge in parsed["model"]["merges"]
    ]
    parsed["model"]["ignore_merges"] = not parsed["model"].get("ignore_merges")
    parsed["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    assert probe_ids(parsed) == whole(parsed)


SPLITTERS = {
    "byte level": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "with a space before": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "digits first": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "words": pre_tokenizers.Whitespace(),
    "underlines": pre_tokenizers.Metaspace(),
}
NORMALISERS = {
    "none": None,
    "NFKC": normalizers.NFKC(),
    "lower case": normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]),
}


@pytest.mark.parametrize("splitter", SPLITTERS)
@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_trained_tokenizers(splitter: str, normaliser: str) -> None:
    dice = random.Random(f"{splitter} {normaliser}")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=dice.random() < 0.5))
    tokenizer.pre_tokenizer = SPLITTERS[splitter]
    if NORMALISERS[normaliser] is not None:
        tokenizer.normalizer = NORMALISERS[normaliser]
    tokenizer.decoder = decoders.ByteLevel()
    words = [*PROBE.split(), "hello", "world", "lower", "newest", "widest", "1234", "😀😀", "ñandú"]
    texts = [" ".join(dice.choices(words, k=40)) for _ in range(60)]
    special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    )
    parsed = json.loads(tokenizer.to_str())
    ids = whole(parsed)
    assert probe_ids(parsed) == ids
    assert len(set(ids)) > 20


def test_what_it_does_not_serve(real_tokenizers: dict[str, Path]) -> None:
    parsed = json.loads((real_tokenizers["qwen2_5"] / "tokenizer.json").read_bytes())
    added = {"id": 151_665, "content": PROBE[100:104], "single_word": False, "lstrip": False, "rstrip": False}
    added |= {"normalized": False, "special": False}
    assert probe_ids(parsed | {"added_tokens": [*parsed["added_tokens"], added]}) is None
    longer = {"type": "Replace", "pattern": {"String": " "}, "content": "a" * 40}
    assert probe_ids(parsed | {"pre_tokenizer": None, "normalizer": longer}) is None
    assert probe_ids(parsed | {"pre_tokenizer": None}) is None  # without bytes, characters are in no token
    assert probe_ids(parsed | {"model": parsed["model"] | {"end_of_word_suffix": "</w>"}}) is None
    assert probe_ids(parsed | {"model": {"type": "Unigram"}}) is None
    assert probe_ids({}) is None
