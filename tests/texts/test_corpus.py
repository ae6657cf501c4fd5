"""Files become token shards: nothing empty, nothing twice, held-out documents apart, made once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_corpora import byte_tokenizer, functions, write_jsonl

from aprfmt.errors import AprError, ChecksumError, CorruptError, NotFoundError, RefusedError, UsageError
from aprfmt.texts.corpus import content_hash, prepare
from aprfmt.texts.encoding import Encoder
from aprfmt.texts.shards import Corpus, CorpusSplit, open_corpus
from aprfmt.texts.sources import HEADER
from aprfmt.tokenizer.hf import read_files

TOKENIZER = byte_tokenizer()
ENCODER = Encoder(TOKENIZER)
EOS = TOKENIZER.special["eos"]


def make(tmp_path: Path, *paths: Path, **options: Any) -> Corpus:
    return prepare(list(paths), TOKENIZER, tmp_path / "data", **options)


def documents(part: CorpusSplit) -> list[tuple[int, ...]]:
    starts = np.concatenate([[0], part.ends[:-1]])
    return [tuple(part.tokens[a:b].tolist()) for a, b in zip(starts, part.ends, strict=True)]


def texts(part: CorpusSplit) -> list[str]:
    from tokenizers import Tokenizer

    library = Tokenizer.from_buffer(TOKENIZER.files["tokenizer.json"])
    return [library.decode(list(ids), skip_special_tokens=True) for ids in documents(part)]


# --- tokens ---


def test_ids_are_those_of_the_tokenizers_library_and_end_with_the_separator(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    library = Tokenizer.from_buffer(TOKENIZER.files["tokenizer.json"])
    wanted = [*functions(40), "Größe\r\n\t日本語 <|im_start|>user", "  spaces  "]
    corpus = make(tmp_path, write_jsonl(tmp_path / "a.jsonl", wanted))
    found = documents(corpus.train) + documents(corpus.held_out)
    assert sorted(found) == sorted((*library.encode(text).ids, EOS) for text in wanted)
    assert {ids[-1] for ids in found} == {corpus.separator} == {EOS}


def test_ids_are_those_of_transformers(tmp_path: Path, real_tokenizers: dict[str, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = real_tokenizers["qwen2_5"]
    tokenizer = read_files({path.name: path.read_bytes() for path in folder.iterdir()})
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = [*functions(20), "Größe 日本語 12345", "<|im_start|>user\nhi<|im_end|>"]
    found = Encoder(tokenizer).encode(wanted)
    last = peer(wanted[-1])["input_ids"]
    assert last[-1] == 151645  # no second one
    assert [ids.tolist() for ids in found] == [*([*peer(text)["input_ids"], 151645] for text in wanted[:-1]), last]


def test_documents_begin_with_the_begin_token_where_the_model_has_one() -> None:
    bos = TOKENIZER.special["bos"]
    assert bos != EOS
    with_begin = Encoder(replace(TOKENIZER, flags={**TOKENIZER.flags, "add_bos": True}))
    plain = ENCODER.encode(["fox"])[0].tolist()
    assert plain[0] != bos
    assert with_begin.encode(["fox"])[0].tolist() == [bos, *plain]
    assert with_begin.encode([np.array([bos, 7], np.uint32)])[0].tolist() == [bos, 7, EOS]  # not twice
    assert with_begin.encode([np.array([7], np.uint32)])[0].tolist() == [bos, 7, EOS]
    assert with_begin.digest != ENCODER.digest


def test_a_tokenizer_of_a_gguf_makes_the_same_ids() -> None:
    made = Encoder(replace(TOKENIZER, files={}, pre="gpt-2"))
    for text in functions(5):
        assert made.encode([text])[0].tolist() == ENCODER.encode([text])[0].tolist()


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, "the model has no tokenizer"),
        (replace(TOKENIZER, special={"bos": 0}), "defines no end-of-sequence token"),
    ],
)
def test_a_model_that_cannot_read_text_is_refused(tokenizer: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=message):
        prepare([write_jsonl(tmp_path / "a.jsonl", functions(9))], tokenizer, tmp_path / "data")


def test_a_broken_tokenizer_json_is_refused() -> None:
    with pytest.raises(CorruptError, match=r"tokenizer\.json cannot be loaded"):
        Encoder(replace(TOKENIZER, files={"tokenizer.json": b'{"model": {"type": "X"}}'}))


# --- no data ---


def test_missing_and_empty_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as missing:
        make(tmp_path, tmp_path / "nowhere")
    assert missing.value.exit_code == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(RefusedError, match="no training documents: 0 read") as empty:
        make(tmp_path, tmp_path / "empty")
    assert empty.value.exit_code == 5
    with pytest.raises(RefusedError, match="no training documents: 3 read, 3 empty"):
        make(tmp_path, write_jsonl(tmp_path / "a.jsonl", ["", " \n", "\t"]))
    assert not (tmp_path / "data").exists()
    (tmp_path / "empty/a.so").touch()
    with pytest.raises(RefusedError, match="skipped 1 files that are not source code"):
        make(tmp_path, tmp_path / "empty")
    (tmp_path / "empty/b.json").write_text('[{"text": "a"}, {"text": "b"}]')  # a configuration, in a folder
    with pytest.raises(RefusedError, match="no training documents") as unread:
        make(tmp_path, tmp_path / "empty")
    assert str(unread.value.hint).endswith("; .json files by their paths")
    texts = write_jsonl(tmp_path / "b.jsonl", functions(9))
    with pytest.raises(RefusedError, match="no held-out documents") as none:
        make(tmp_path, texts, held_out_paths=[tmp_path / "a.jsonl"])
    assert none.value.hint == "add text to --eval-data"


def test_a_long_reading_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aprfmt.texts.records.LOG_S", 0.0)
    monkeypatch.setattr("aprfmt.texts.corpus._LONG", 0)
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", functions(20, seed=i)) for i in range(2)]
    lines: list[str] = []
    make(tmp_path, *paths, held_out=0.3, log=lines.append)
    assert lines[0].startswith("hashing 0.0 GB")
    told = [line for line in lines if " MB/s, about " in line]
    assert len(told) == 40
    assert told[0].startswith("read 0 of 0 MB")


def test_one_document_alone_leaves_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no training documents: 2 read, 0 empty, 1 duplicates"):
        make(tmp_path, write_jsonl(tmp_path / "a.jsonl", ["the fox"] * 2))


# --- the split ---


def test_no_document_is_on_both_sides_and_none_is_lost(tmp_path: Path) -> None:
    wanted = functions(300)
    corpus = make(tmp_path, write_jsonl(tmp_path / "a.jsonl", wanted), held_out=0.2)
    assert not set(corpus.train.hashes.tolist()) & set(corpus.held_out.hashes.tolist())
    assert sorted(texts(corpus.train) + texts(corpus.held_out)) == sorted(wanted)
    assert 30 < len(corpus.held_out.ends) < 90
    below = corpus.header["held_out_below"]
    assert below is not None
    assert set(texts(corpus.held_out)) == {text for text in wanted if content_hash(text) < below}


def test_a_document_keeps_its_side_when_others_come(tmp_path: Path) -> None:
    some, more = functions(200), functions(200, seed=5)
    first = make(tmp_path, write_jsonl(tmp_path / "a.jsonl", some), held_out=0.2)
    before = set(texts(first.held_out))
    both = make(tmp_path, write_jsonl(tmp_path / "b.jsonl", more[::-1] + some), held_out=0.2)
    assert set(texts(both.held_out)) & set(some) == before
    assert len(both.held_out.ends) > len(before)


def test_a_small_corpus_holds_out_one_document(tmp_path: Path) -> None:
    wanted = functions(5)
    corpus = make(tmp_path, write_jsonl(tmp_path / "a.jsonl", wanted))
    assert texts(corpus.held_out) == [min(wanted, key=content_hash)]
    assert len(corpus.train.ends) == 4
    assert corpus.header["documents"] == {"read": 5, "empty": 0, "duplicate": 0}


def test_held_out_files_of_their_own_must_not_be_trained_on(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", functions(30))
    other = write_jsonl(tmp_path / "other.jsonl", functions(6, seed=9))
    corpus = make(tmp_path, train, held_out_paths=[other])
    assert sorted(texts(corpus.held_out)) == sorted(functions(6, seed=9))
    assert len(corpus.train.ends) == 30
    leaking = write_jsonl(tmp_path / "leaking.jsonl", [*functions(6, seed=9), functions(30)[17]])
    with pytest.raises(RefusedError, match="1 held-out documents are also in the training data") as caught:
        make(tmp_path, train, held_out_paths=[leaking])
    assert caught.value.exit_code == 5


def test_copies_and_empty_documents_are_dropped_and_counted(tmp_path: Path) -> None:
    wanted = functions(50)
    path = write_jsonl(tmp_path / "a.jsonl", [*wanted, "", *wanted[:7], "  \n"])
    lines: list[str] = []
    corpus = make(tmp_path, path, log=lines.append)
    assert corpus.header["documents"] == {"read": 59, "empty": 2, "duplicate": 7}
    assert sorted(texts(corpus.train) + texts(corpus.held_out)) == sorted(wanted)
    assert "7 duplicates, 2 empty documents" in lines[-1]


# --- made once ---


@pytest.fixture
def no_encoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Turned on by the test: from then on nothing may be encoded."""
    with monkeypatch.context() as patch:
        yield patch


def test_a_second_run_takes_the_shards_that_are_there(tmp_path: Path, no_encoding: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", functions(40))
    first = make(tmp_path, path)
    tokens = first.train.tokens[:].tolist()
    no_encoding.setattr(Encoder, "encode", lambda *_: pytest.fail("encoded again"))
    os.utime(path, (1, 1))
    lines: list[str] = []
    second = make(tmp_path, path, log=lines.append)
    assert second.train.tokens[:].tolist() == tokens
    assert second.key == first.key
    assert "up to date" in lines[0]
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    assert make(tmp_path, path.rename(moved / "a.jsonl")).key == first.key


@pytest.mark.parametrize("change", ["content", "order", "share", "tokenizer"])
def test_what_decides_the_shards_decides_the_key(change: str, tmp_path: Path) -> None:
    wanted = functions(40)
    path = write_jsonl(tmp_path / "a.jsonl", wanted)
    before = make(tmp_path, path).key
    if change in ("content", "order"):
        write_jsonl(path, [*wanted[:39], "something else"] if change == "content" else wanted[::-1])
    tokenizer = replace(TOKENIZER, special={**TOKENIZER.special, "eos": 3})
    after = prepare(
        [path],
        tokenizer if change == "tokenizer" else TOKENIZER,
        tmp_path / "data",
        held_out=0.5 if change == "share" else 0.01,
    )
    assert after.key != before
    assert after.separator == (3 if change == "tokenizer" else EOS)


@pytest.mark.parametrize("name", ["train.bin", "train.docs", "held_out.bin", "held_out.docs", HEADER])
@pytest.mark.parametrize("how", ["flip", "cut"])
def test_damaged_shards_are_noticed_and_made_again(name: str, how: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", functions(40))
    tokens = make(tmp_path, path).train.tokens[:].tolist()
    file = tmp_path / "data" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data if how == "flip" else data[:-3])
    with pytest.raises((ChecksumError, CorruptError)):
        open_corpus(tmp_path / "data", ENCODER.digest)
    lines: list[str] = []
    again = make(tmp_path, path, log=lines.append)
    assert again.train.tokens[:].tolist() == tokens
    assert "damaged" in lines[0]


def test_shards_of_an_earlier_run_are_opened_where_they_are(tmp_path: Path) -> None:
    first = make(tmp_path, write_jsonl(tmp_path / "a.jsonl", functions(40)))
    second = prepare([tmp_path / "data"], TOKENIZER, tmp_path / "other")
    assert second.key == first.key
    assert not (tmp_path / "other").exists()
    other = replace(TOKENIZER, special={**TOKENIZER.special, "eos": 3})
    with pytest.raises(RefusedError, match="made with a different tokenizer"):
        prepare([tmp_path / "data"], other, tmp_path / "other")
    options: list[dict[str, Any]] = [{"held_out": 0.5}, {"held_out_paths": [tmp_path / "a.jsonl"]}]
    for wish in options:  # no option is passed over in silence
        with pytest.raises(UsageError, match=r"already split: a fraction of 0\.01 is held out"):
            prepare([tmp_path / "data"], TOKENIZER, tmp_path / "other", **wish)


def test_headers_that_lie_are_refused(tmp_path: Path) -> None:
    make(tmp_path, write_jsonl(tmp_path / "a.jsonl", functions(40)))
    path = tmp_path / "data" / HEADER
    header = json.loads(path.read_text())
    lies: list[Any] = [
        {**header, "format": "aprtrain-tokens/9"},
        {key: value for key, value in header.items() if key != "separator"},
        {**header, "parts": {"train": header["parts"]["train"]}},
        {**header, "parts": {**header["parts"], "train": {**header["parts"]["train"], "tokens": 3}}},
        [],
    ]
    for lie in lies:
        path.write_text(json.dumps(lie))
        with pytest.raises(CorruptError):
            open_corpus(tmp_path / "data", ENCODER.digest)
    path.unlink()
    with pytest.raises(NotFoundError):
        open_corpus(tmp_path / "data", ENCODER.digest)


def test_a_run_that_fails_leaves_the_old_shards(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", functions(40))
    before = make(tmp_path, path).key
    with path.open("a") as file:
        file.write("{\n")
    with pytest.raises(AprError):
        make(tmp_path, path, strict=True)
    assert open_corpus(tmp_path / "data", ENCODER.digest).key == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "data"]
