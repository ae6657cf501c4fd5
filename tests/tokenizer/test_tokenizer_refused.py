"""Bad tokenizer files in whole models: refused and named, nothing written; or warned of, where harmless."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_folders import write_folder

import aprfmt
from aprfmt import limits
from aprfmt.errors import AprError, CorruptError, LimitError, RefusedError, UsageError

VOCAB = {"a": 0, "b": 1, "ab": 2, "c": 3, "<s>": 4, "</s>": 5}
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a small folder: `model` and `parsed` change tokenizer.json, `settings` is tokenizer_config.json."""

    def write(
        *,
        model: dict[str, Any] | None = None,
        parsed: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        vocab_size: int = 8,
        rows: int | None = None,
        **config: Any,
    ) -> Path:
        body = {
            "added_tokens": [{"id": i, "content": t, "special": True} for t, i in VOCAB.items() if i > 3],
            "pre_tokenizer": GPT2,
            "model": {"type": "BPE", "vocab": VOCAB, "merges": ["a b"], **(model or {})},
            **(parsed or {}),
        }
        files = {
            "tokenizer.json": json.dumps(body).encode(),
            "tokenizer_config.json": json.dumps(settings or {}).encode(),
        }
        return write_folder(tmp_path / "model", files, vocab_size, rows=rows, **config)

    return write


def refused(folder: Path, kind: type[AprError], what: str) -> AprError:
    """Imports and exports the folder; both must fail the same way and leave nothing."""
    out = folder.parent / "out"
    out.mkdir()
    with pytest.raises(kind, match=what):
        aprfmt.import_model(folder, out / "m.apr")
    with pytest.raises(kind, match=what) as caught:
        aprfmt.export_model(folder, out / "m.gguf")
    assert list(out.iterdir()) == []
    return caught.value


def test_an_id_out_of_range(make: Make) -> None:
    error = refused(make(model={"vocab": {**VOCAB, "z": 1 << 60}}), CorruptError, "'z'")
    assert error.path == "tokenizer.json"


def test_ids_with_holes_beyond_reason(make: Make) -> None:
    refused(make(model={"vocab": {**VOCAB, "z": limits.MAX_TOKEN_ID}}), LimitError, "ids reach")


def test_few_holes_become_unused_tokens(make: Make, tmp_path: Path) -> None:
    folder = make(model={"vocab": {**VOCAB, "z": 7}})
    aprfmt.export_model(folder, tmp_path / "m.gguf")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert model.tokenizer is not None
        assert model.tokenizer.tokens[6:] == ["[PAD6]", "z"]
        assert model.tokenizer.types[6:] == [5, 1]


def test_merges_of_unknown_tokens(make: Make) -> None:
    refused(make(model={"merges": ["a x"]}), CorruptError, r"merges\[0\].*not in the vocabulary")


def test_a_vocabulary_larger_than_the_embedding(make: Make) -> None:
    refused(make(vocab_size=4), RefusedError, "6 tokens")


def test_config_with_a_smaller_vocabulary_than_the_weights(make: Make) -> None:
    refused(make(vocab_size=4, rows=8), RefusedError, "embed_tokens|vocab")


def test_a_bos_that_every_text_gets_but_no_id(make: Make) -> None:
    error = refused(make(settings={"bos_token": "<none>", "add_bos_token": True}), RefusedError, "'<none>'")
    assert error.path == "tokenizer_config.json"
    assert error.hint


def test_a_pad_that_is_not_there_is_harmless(make: Make, tmp_path: Path) -> None:
    folder = make(settings={"pad_token": "<none>"}, eos_token_id=[5, 99], bos_token_id=77)
    report = aprfmt.import_model(folder, tmp_path / "m.apr")
    assert any("pad token '<none>' is not in the vocabulary" in warning for warning in report.warnings)
    assert any("bos_token_id 77" in warning for warning in report.warnings)
    with aprfmt.open(tmp_path / "m.apr") as model:
        assert model.tokenizer is not None
        assert model.tokenizer.special == {"eos": 5}  # the first of the list


def test_repeated_texts_get_names_of_their_own(make: Make, tmp_path: Path) -> None:
    folder = make(parsed={"added_tokens": [{"id": 6, "content": "ab", "special": True}]})
    aprfmt.export_model(folder, tmp_path / "m.gguf")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert model.tokenizer is not None
        assert len(set(model.tokenizer.tokens)) == 8
        assert model.tokenizer.types[6] == 5


@pytest.mark.parametrize("template", [3, {"a": "b"}, [{"name": "default"}], ["text"], [{"name": 1, "template": "x"}]])
def test_a_template_that_is_no_text(make: Make, template: Any) -> None:
    refused(make(settings={"chat_template": template}), CorruptError, "chat_template")


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_a_template_file_that_is_no_text(make: Make, name: str) -> None:
    folder = make()
    (folder / name).write_bytes(b"\xff\xfe{{")
    assert refused(folder, CorruptError, "UTF-8|JSON").path == name


def test_a_wrong_pre_names_the_nearest(make: Make, tmp_path: Path) -> None:
    folder = make()
    with pytest.raises(UsageError, match="qwen22") as caught:
        aprfmt.export_model(folder, tmp_path / "m.gguf", pre="qwen22", plan=True)
    assert caught.value.hint
    assert "--pre qwen2" in caught.value.hint
    assert not (tmp_path / "m.gguf").exists()


UNKNOWN = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {"Regex": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"},
            "behavior": "Isolated",
            "invert": False,
        },
        {**GPT2, "use_regex": False},
    ],
}


def test_an_unknown_pre_tokenizer_is_reported_early_with_the_nearest(make: Make, tmp_path: Path) -> None:
    folder = make(parsed={"pre_tokenizer": UNKNOWN})
    report = aprfmt.import_model(folder, tmp_path / "m.apr")
    warning = next(w for w in report.warnings if "pre-tokenizer" in w)
    assert "nearest is ufakzeka" in warning
    assert r"\p{N}{1,2}" in warning
    for source in (folder, tmp_path / "m.apr"):
        with pytest.raises(RefusedError, match="pre-tokenizer") as caught:
            aprfmt.export_model(source, tmp_path / "m.gguf", plan=True)
        assert caught.value.hint
        assert "ufakzeka" in caught.value.hint
        assert r"\p{N}{1,2}" in caught.value.hint
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf", pre="ufakzeka")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert model.tokenizer is not None
        assert model.tokenizer.pre == "ufakzeka"
