"""`apr eval`: the same scores from every container; whatever fails gives an error, its exit code and no number."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from train_corpora import functions, write_jsonl

import aprfmt
from aprfmt.cli.main import run as apr
from aprfmt.running.evaluation import SEQ_LEN
from aprfmt.texts import records
from aprfmt.texts.encoding import Encoder
from aprtrain.evaluate import score
from aprtrain.network.decoder import Decoder
from aprtrain.network.weights import NetworkSource, load_decoder, open_network

CPU = ("--device", "cpu", "--seq-len", "32")
KEYS = {"window", "stride", "scored_from"} | {
    *("schema", "ok", "file", "format", "architecture", "parameters", "teacher", "data", "documents"),
    *("data_tokens", "device", "dtype", "seq_len", "windows", "tokens", "ce", "perplexity", "accuracy", "kl"),
    *("agreement", "teacher_ce", "dropped_mass", "seconds", "left_out"),
}


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs `apr eval … --json` on the CPU: exit code and object."""

    def run(model: Path, data: Path, *more: str) -> tuple[int, dict[str, Any]]:
        code = apr(["eval", str(model), "--data", str(data), *CPU, *more, "--json"])
        said = capsys.readouterr()
        return code, json.loads(said.out)

    return run


Told = Callable[..., tuple[int, dict[str, Any]]]


def test_scores_are_those_of_the_definition(teacher_file: Path, tmp_path: Path, told: Told) -> None:
    """One document that fits a window, in float64 over all logits."""
    text = "the cat sat on a mat"
    (tmp_path / "one.txt").write_text(text)
    code, body = told(teacher_file, tmp_path / "one.txt")
    assert code == 0
    assert body.keys() == KEYS
    with open_network(teacher_file) as network:
        decoder = load_decoder(network)
        assert network.tokenizer is not None
        ids = torch.tensor(Encoder(network.tokenizer).encode([text])[0].astype(np.int64))
    assert body["data_tokens"] == len(ids) < 32
    with torch.no_grad():
        logits = decoder.logits(decoder(ids[None]))[0, :-1].double()
    ce = float(functional.cross_entropy(logits, ids[1:]))
    assert body["ce"] == pytest.approx(ce, rel=1e-5)
    assert body["perplexity"] == pytest.approx(math.exp(ce), rel=1e-5)
    assert body["accuracy"] == pytest.approx(float((logits.argmax(-1) == ids[1:]).double().mean()))
    assert (body["schema"], body["windows"], body["tokens"]) == ("apr.eval/1", 1, len(ids) - 1)
    assert (body["window"], body["stride"], body["scored_from"]) == (32, 32, 0)
    assert body["teacher"] is body["kl"] is body["agreement"] is body["teacher_ce"] is None


def test_what_of_a_folder_is_not_read_is_said(
    teacher_file: Path, tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("the cat sat on a mat and then it ran to the dog")
    (tmp_path / "src/a.so").touch()
    assert told(teacher_file, tmp_path / "src")[1]["left_out"] == {"files that are not source code": 1}
    assert apr(["eval", str(teacher_file), "--data", str(tmp_path / "src"), *CPU]) == 0
    shown = capsys.readouterr().out
    assert "1 files that are not source code" in shown
    assert "end tokens one follows each document and is scored" in " ".join(shown.split())


def test_a_field_of_text_is_read_by_its_name(teacher_file: Path, tmp_path: Path, told: Told) -> None:
    texts = functions(6)
    write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    wanted, found = (
        told(teacher_file, tmp_path / "a.jsonl"),
        told(teacher_file, tmp_path / "b.jsonl", "--text-field", "body"),
    )
    assert (wanted[0], found[0]) == (0, 0)
    assert (found[1]["ce"], found[1]["tokens"]) == (wanted[1]["ce"], wanted[1]["tokens"])
    code, body = told(teacher_file, tmp_path / "b.jsonl")
    assert code == 4
    assert "--text-field" in body["error"]["hint"]
    (tmp_path / "c.txt").write_text("text")
    code, body = told(teacher_file, tmp_path / "c.txt", "--text-field", "body")
    assert code == 2
    assert "none found" in body["error"]["message"]


def test_every_container_has_the_same_scores(teacher_file: Path, corpus_file: Path, tmp_path: Path, told: Told) -> None:
    aprfmt.export_model(teacher_file, tmp_path / "m.gguf")
    aprfmt.export_model(teacher_file, tmp_path / "hf", format="hf")
    (single,) = (tmp_path / "hf").glob("*.safetensors")
    limit = ("--limit", "320")
    code, body = told(teacher_file, corpus_file, *limit)
    assert (code, body["windows"], body["documents"]) == (0, 10, 160)
    formats = {body["format"]}
    for other in (tmp_path / "m.gguf", tmp_path / "hf", single):
        code, same = told(other, corpus_file, *limit, "--teacher", str(teacher_file))
        formats.add(same["format"])
        assert code == 0
        assert (same["ce"], same["accuracy"]) == (body["ce"], body["accuracy"])
        assert (same["kl"], same["agreement"]) == (pytest.approx(0, abs=1e-6), 1)
        assert same["teacher_ce"] == same["ce"]
    assert len(formats) >= 3


def test_a_teacher_is_told_from_the_model_and_a_run_from_its_summary(
    distil: Callable[..., dict[str, Any]],
    teacher_file: Path,
    corpus_file: Path,
    tmp_path: Path,
    told: Told,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a run's own shards the held-out part is read, and gives the run's last scores."""
    last = distil(steps=3, eval_tokens=100_000)["last"]
    model, shards = tmp_path / "run/model.apr", tmp_path / "run/tokens"
    _, body = told(model, shards, "--teacher", str(teacher_file))
    assert [body[name] for name in ("windows", "tokens")] == [last[name] for name in ("windows", "tokens")]
    for name in ("ce", "kl", "agreement", "teacher_ce", "accuracy"):
        assert body[name] == pytest.approx(last[name], rel=1e-5), name
    assert body["kl"] > 0.01
    assert body["teacher"]["file"] == str(teacher_file)
    assert body["teacher"]["parameters"] > body["parameters"]
    _, whole = told(model, corpus_file)
    assert whole["tokens"] > 5 * body["tokens"]
    capsys.readouterr()
    arguments = ["eval", str(model), "--data", str(shards), *CPU, "--teacher", str(teacher_file)]
    assert apr(arguments) == 0
    said = capsys.readouterr()
    for part in (f"{body['ce']:.4f} nats", f"{body['kl']:.4g} nats", f"{body['agreement']:.2%}"):
        assert part in said.out
    assert said.err == ""
    assert apr([*arguments, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_limit_reads_fewer_windows(teacher_file: Path, corpus_file: Path, told: Told) -> None:
    assert told(teacher_file, corpus_file, "--limit", "100")[1]["windows"] == 3
    code, body = told(teacher_file, corpus_file, "--limit", "31")
    assert (code, body["error"]["code"]) == (2, "usage")


def test_windows_are_no_longer_than_either_model_was_made_for(
    teacher_file: Path, corpus_file: Path, tmp_path: Path, told: Told
) -> None:
    code, body = told(teacher_file, corpus_file, "--seq-len", "257")
    assert (code, body["error"]["message"]) == (5, "sequence length 257 exceeds the context length 256 of the model")
    folder = tmp_path / "short"
    aprfmt.export_model(teacher_file, folder, format="hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    code, body = told(teacher_file, corpus_file, "--seq-len", "65", "--teacher", str(folder))
    assert (code, "context length 64 of the teacher" in body["error"]["message"]) == (5, True)
    assert score(str(teacher_file), corpus_file, teacher=str(folder), device="cpu", limit=64).seq_len == 64


def test_a_model_that_does_not_say_its_context_is_read_in_usual_windows(
    teacher_file: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def silent(path: str) -> Iterator[NetworkSource]:
        with open_network(path) as network:
            yield replace(network, hparams=replace(network.hparams, max_position_embeddings=None))

    monkeypatch.setattr("aprtrain.evaluate.open_network", silent)
    assert score(str(teacher_file), corpus_file, device="cpu", limit=2048).seq_len == SEQ_LEN


def test_how_far_the_tokenising_is_is_said_now_and_then(
    teacher_file: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(teacher_file), "--data", str(corpus_file), *CPU, "--limit", "100"]
    for now_and_then, more in ((False, ()), (True, ("--quiet",))):
        monkeypatch.setattr(records, "LOG_S", 0.0 if now_and_then else 20.0)
        assert apr([*words, *more]) == 0
        assert capsys.readouterr().err == ""
    assert apr([*words, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["windows"] == 3
    assert len(said.err.splitlines()) == json.loads(said.out)["documents"]
    assert re.search(r"^read 0 of 0 MB, [\d.]+ MB/s, about 0:00:00 left$", said.err, re.MULTILINE)


# --- failures: the exit code, and no number ---


def assert_no_score(code: int, body: dict[str, Any], wanted: int, word: str) -> None:
    assert code == wanted, body
    assert body.keys() == {"schema", "ok", "error"}
    assert (body["schema"], body["ok"]) == ("apr.error/1", False)
    assert word in body["error"]["message"]


def broken_forward(change: Callable[[Tensor], Any]) -> Callable[..., Any]:
    honest = Decoder.forward

    def forward(self: Decoder, *args: Any) -> Any:
        return change(honest(self, *args))

    return forward


def crash(_: Tensor) -> Any:
    raise ValueError("no such kernel")


@pytest.mark.parametrize(
    ("change", "word"),
    [(crash, "no such kernel"), (lambda x: x * math.nan, "not finite"), (lambda x: x[:, :0], "no valid hidden states")],
)
@pytest.mark.parametrize("with_teacher", [False, True])
def test_a_crash_of_the_forward_is_exit_8_and_no_number(
    teacher_file: Path,
    corpus_file: Path,
    told: Told,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Tensor], Any],
    word: str,
    with_teacher: bool,
) -> None:
    more = ["--teacher", str(teacher_file)] if with_teacher else []
    monkeypatch.setattr(Decoder, "forward", broken_forward(change))
    assert_no_score(*told(teacher_file, corpus_file, *more), 8, word)
    assert apr(["eval", str(teacher_file), "--data", str(corpus_file), *CPU, *more]) == 8
    said = capsys.readouterr()
    assert said.out == ""
    assert not re.search(r"nats|perplexity \d|KL \d", said.err)


@pytest.mark.parametrize("side", ["model", "teacher"])
@pytest.mark.parametrize(
    ("value", "word"), [(math.nan, "NaN or infinite"), (math.inf, "NaN or infinite"), (0.0, "zero")]
)
def test_damaged_weights_are_exit_8(
    teacher_file: Path, corpus_file: Path, tmp_path: Path, told: Told, side: str, value: float, word: str
) -> None:
    damaged = tmp_path / "damaged.apr"
    with aprfmt.open(teacher_file) as model:
        tensors = {name: tensor.numpy().copy() for name, tensor in model.tensors.items()}
        weights = tensors["model.layers.1.mlp.up_proj.weight"]
        weights[...] = value if value == 0 else weights
        weights[3, 5] = value
        aprfmt.save_file(tensors, damaged, dict(model.metadata))
    files = (damaged, teacher_file) if side == "model" else (teacher_file, damaged)
    code, body = told(files[0], corpus_file, "--teacher", str(files[1]))
    assert_no_score(code, body, 8, word)
    assert "up_proj" in f"{body['error']['message']} {body['error']['tensor']}"


def test_a_model_without_a_tokenizer_is_exit_8(
    teacher_file: Path, corpus_file: Path, tmp_path: Path, told: Told
) -> None:
    bare = tmp_path / "bare.apr"
    with aprfmt.open(teacher_file) as model:
        kept = {k: v for k, v in model.metadata.items() if not k.startswith(("tokenizer", "aprfmt."))}
        aprfmt.save_file({name: t.numpy().copy() for name, t in model.tensors.items()}, bare, kept)
    assert_no_score(*told(bare, corpus_file), 8, "no tokenizer")
    assert_no_score(*told(teacher_file, corpus_file, "--teacher", str(bare)), 5, "teacher has no tokenizer")


def test_data_without_a_label_are_exit_8(teacher_file: Path, tmp_path: Path, told: Told) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\n ")
    (tmp_path / "folder").mkdir()
    for data in ("empty.txt", "blank.txt", "folder"):
        assert_no_score(*told(teacher_file, tmp_path / data), 8, "fewer than two tokens")


@pytest.mark.parametrize(
    ("model", "data", "more", "code"),
    [
        ("absent.apr", "good.jsonl", (), 3),
        ("good.jsonl", "good.jsonl", (), 3),
        ("", "absent.txt", (), 3),
        ("", "latin.txt", (), 4),
        ("", "bad.jsonl", (), 4),
        ("", "good.jsonl", ("--teacher", "absent.apr"), 3),
        ("", "good.jsonl", ("--device", "tpu"), 2),
        ("", "good.jsonl", ("--device", "cuda:99"), 6),
        ("", "good.jsonl", ("--seq-len", "1"), 2),
    ],
)
def test_bad_input_has_its_own_exit_code(
    teacher_file: Path, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch,
    model: str, data: str, more: tuple[str, ...], code: int,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("good.jsonl"), functions(4))
    Path("latin.txt").write_bytes("köln".encode("latin-1"))
    Path("bad.jsonl").write_text("{")
    found, body = told(Path(model) if model else teacher_file, Path(data), *more)
    assert_no_score(found, body, code, "")


def test_torch_takes_a_gpu_and_nothing_replaces_it(
    teacher_file: Path, corpus_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert apr(["eval", str(teacher_file), "--data", str(corpus_file), "--engine", "torch", "--json"]) == 6
    assert_no_score(6, json.loads(capsys.readouterr().out), 6, "CUDA")
