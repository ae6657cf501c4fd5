"""`apr data`: what is learned is counted and shown, of text, conversations, mixtures and shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import demo_model
import pytest
from hub_server import attach, serve
from train_corpora import functions, write_jsonl

import aprfmt
from aprfmt.cli.main import run as apr
from aprfmt.formats.hub_datasets import download_dataset
from aprfmt.texts.corpus import prepare

TALK = [{"role": "user", "content": "Who is there?"}, {"role": "assistant", "content": "The fox."}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    demo_model.build(tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def asked(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert apr(["data", *map(str, words), "--json"]) == 0
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    return body


def test_text_is_learned_whole(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", functions(50))
    body = asked(capsys, path, "--model", model)
    assert body["schema"] == "apr.data/1"
    assert (body["documents"], body["learned"]) == (50, body["tokens"])
    assert body["example"] == [[functions(1)[0], True]]
    assert body["lengths"]["least"] <= body["lengths"]["median"] <= body["lengths"]["most"]
    with aprfmt.open(model) as opened:
        corpus = prepare([path], opened.tokenizer, tmp_path / "tokens")
    parts = corpus.header["parts"]
    assert body["tokens"] == sum(part["tokens"] for part in parts.values())
    shards = asked(capsys, tmp_path / "tokens", "--model", model)
    assert shards["tokens"] == parts["train"]["tokens"]


def test_data_are_tokenized_once_for_any_number_of_runs(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shards of -o are those that a run writes, whatever the number of batches and threads."""
    path, words = write_jsonl(tmp_path / "a.jsonl", functions(50)), ("--model", model, "-o", tmp_path / "shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aprfmt.texts.corpus._BATCH_DOCUMENTS", 3)
        patch.setattr("aprfmt.texts.corpus.n_processors", lambda: 4)
        body = asked(capsys, path, *words, "--held-out", "0.2")
    with aprfmt.open(model) as opened:
        prepare([path], opened.tokenizer, tmp_path / "tokens", held_out=0.2)
    files = {name: (tmp_path / "tokens" / name).read_bytes() for name in ("train.bin", "train.docs", "tokens.json")}
    assert {name: (tmp_path / "shards" / name).read_bytes() for name in files} == files
    assert body["data"] == [str(tmp_path / "shards")]
    before = (tmp_path / "shards/tokens.json").stat().st_mtime_ns
    assert asked(capsys, path, *words, "--held-out", "0.2") == body
    assert (tmp_path / "shards/tokens.json").stat().st_mtime_ns == before, "they are kept"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.txt").touch()
    for output, data, code in (("shards", path, 5), ("other", path, 5), ("new", tmp_path / "shards", 2)):
        assert apr(["data", str(data), "--model", str(model), "-o", str(tmp_path / output), "--json"]) == code
        assert json.loads(capsys.readouterr().out)["ok"] is False
    assert (tmp_path / "shards/tokens.json").stat().st_mtime_ns == before
    assert [*(tmp_path / "other").iterdir()] == [tmp_path / "other/a.txt"]


def test_a_data_set_of_the_hub_is_read_by_its_address(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = functions(20)
    with serve(kind="datasets") as hub:
        attach(hub, tmp_path, monkeypatch)
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        download_dataset.cache_clear()
        hub.files["data/a.jsonl"] = write_jsonl(tmp_path / "a.jsonl", texts[:12]).read_bytes()
        hub.files["b.jsonl"] = write_jsonl(tmp_path / "b.jsonl", texts[12:]).read_bytes()
        hub.files["model.bin"] = b"no record"
        body = asked(capsys, "hf://datasets/org/name", "--model", model)
        assert body["documents"] == 20
        assert not any("model.bin" in request.path for request in hub.of_files()), "only records are downloaded"
        mixed = asked(capsys, "hf://datasets/org/name/data:0.5", f"{tmp_path / 'b.jsonl'}:0.5", "--model", model)
        assert [source["documents"] for source in mixed["sources"]] == [12, 8]
        assert mixed["sources"][0]["name"] == "data"
        for address, code in (("org/none", 3), ("org/name/none", 3), ("org", 2)):
            assert apr(["data", f"hf://datasets/{address}", "--model", str(model), "--json"]) == code
            assert "hf://" in str(json.loads(capsys.readouterr().out)["error"])


def test_of_conversations_the_answers_are(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + '\nnull\n{"text": " "}\n')
    body = asked(capsys, path, "--model", model)
    assert body["example"] == [
        ["<|im_start|>user\nWho is there?<|im_end|>\n<|im_start|>assistant\n", False],
        ["The fox.<|im_end|>", True],
        ["\n", False],
    ]
    assert 0 < body["learned"] < body["tokens"]
    assert body["left_out"] == {"records that are not objects": 1, "empty documents": 1}
    assert apr(["data", str(path), "--model", str(model)]) == 0
    said = capsys.readouterr()
    assert "[[The fox.<|im_end|>]]" in said.out
    assert "line 2" in said.err
    assert apr(["data", str(path), "--model", str(model), "--strict"]) == 4


def test_sources_have_their_weights(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", functions(9))
    (tmp_path / "b.csv").write_text("body\n" + "\n".join(f"row {i}" for i in range(5)) + "\n")
    assert apr(["data", f"{a}:3", f"{tmp_path / 'b.csv'}:1", "--model", str(model)]) == 5  # no column of that name
    body = asked(capsys, f"{a}:3", f"{write_jsonl(tmp_path / 'b.jsonl', functions(5))}:1", "--model", model)
    assert [(s["name"], s["weight"], s["documents"]) for s in body["sources"]] == [
        ("a.jsonl", 0.75, 9),
        ("b.jsonl", 0.25, 5),
    ]
    other = asked(capsys, tmp_path / "b.csv", "--model", model, "--text-field", "body")
    assert other["documents"] == 5


@pytest.mark.parametrize(
    ("name", "content", "message", "hint"),
    [
        ("a.json", "[1]", "0 read; skipped 1 files that are not source code", ".json files by their paths"),
        ("a.jsonl", '{"body": 1}', "0 read; skipped 1 records without 'text'", "with --text-field"),
        ("a.txt", "", "1 read; skipped 1 empty documents", "add text"),
    ],
    ids=["nothing to read", "another field", "an empty file"],
)
def test_data_without_a_document_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, message: str, hint: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_text(content)
    assert apr(["data", str(folder), "--model", str(model), "--json"]) == 5
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["message"].endswith(f"no training documents: {message}")
    assert error["hint"].endswith(hint)
