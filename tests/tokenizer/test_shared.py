"""Two models with one vocabulary hold it once."""

from __future__ import annotations

import gc

from arch_models import tokenizer_files

from aprfmt.tokenizer import hf
from aprfmt.tokenizer.hf import read_files


def _files(limit: int) -> dict[str, bytes]:
    files = tokenizer_files("smollm2", limit)
    return {name: files[name] for name in ("tokenizer.json", "tokenizer_config.json")}


def test_tokens_are_shared_and_settings_are_not() -> None:
    files = _files(512)
    one, two = read_files(files, {"eos_token_id": 5}), read_files(dict(files), {"eos_token_id": 5})
    assert one is not None
    assert two is not None
    assert one == two
    assert one.tokens is two.tokens
    one.extra["tokenizer.x"] = ("STRING", "mine")
    one.special["eos"] = 1
    one.flags.clear()
    one.notes.append("mine")
    one.files.clear()
    assert two == read_files(files, {"eos_token_id": 5})
    assert two.extra.keys().isdisjoint({"tokenizer.x"})
    assert two.notes == []
    assert two.files == files


def test_other_files_and_other_configs_are_read_anew() -> None:
    files = _files(600)
    one = read_files(files)
    other = read_files(files, {"eos_token_id": 5})
    changed = read_files(files | {"tokenizer_config.json": b'{"chat_template": "x"}'})
    assert one is not None
    assert other is not None
    assert changed is not None
    assert one.tokens is not other.tokens
    assert one.tokens is not changed.tokens
    assert (one.chat_template, changed.chat_template) == (None, "x")


def test_nothing_is_held_that_nobody_has() -> None:
    tokenizer = read_files(_files(700))
    assert tokenizer is not None
    assert len(hf._KNOWN) >= 1
    known = set(hf._KNOWN)
    del tokenizer
    gc.collect()
    assert len(hf._KNOWN) < len(known)
