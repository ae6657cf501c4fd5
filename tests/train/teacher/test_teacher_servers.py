"""A teacher behind a server: three forms of answers teach what files of the model do; faults are repeated or named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import train_runs
from completion_server import Fault, ModelServer, serve_model
from train_runs import lines

import aprfmt
from aprfmt.cli.main import run as apr
from aprfmt.errors import AprError
from aprfmt.formats import completions
from aprfmt.formats.completions import API_KEY, FORMS
from aprfmt.formats.teacher_files import TeacherFiles
from aprtrain.budget import plan
from aprtrain.config_sources import build
from aprtrain.run import run

GIVEN: dict[str, Any] = {"seq_len": 32, "held_out": 0.1, "top_k": 8}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_runs.write_corpus(tmp_path_factory.mktemp("text") / "c.jsonl", documents=12)


@pytest.fixture(scope="module")
def student(teacher_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("student") / "s.apr"
    aprfmt.prune_model(teacher_file, path, keep_layers=[0])
    return path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_PAUSES_S", (0.01, 0.01, 0.01))


def saved(folder: Path) -> list[Any]:
    files = TeacherFiles(folder)
    return [shard.read(number) for shard, number in files._places.values()]


@pytest.mark.parametrize("kind", FORMS)
def test_every_server_says_what_files_of_its_model_do(
    teacher_file: Path, student: Path, text: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, "secret")
    ours = aprfmt.teacher(teacher_file, text, tmp_path / "ours", device="cpu", temperature=(1.0,), **GIVEN)
    with serve_model(kind, teacher_file) as server:
        report = aprfmt.teacher(server.url + "/v1/", text, tmp_path / "theirs", student=student, **GIVEN)
        assert server.headers["authorization"] == "Bearer secret"
        n_asked = len(server.asked)
        again = aprfmt.teacher(server.url, text, tmp_path / "theirs", student=student, **GIVEN)
        assert (again.resumed, again.tokens) == (report.files, 0)
        assert {*server.asked[n_asked:]} == {"/v1/models", "/tokenize"}, "what is complete is not asked for again"
    assert (report.tokens, report.engine) == (ours.tokens, f"{kind} server")
    assert report.teacher_ce == pytest.approx(ours.teacher_ce, abs=1e-4)
    for a, b in zip(saved(tmp_path / "ours"), saved(tmp_path / "theirs"), strict=True):
        assert np.array_equal(a.positions_P, b.positions_P)
        assert np.allclose(a.logprobs_PK, b.logprobs_PK, atol=2e-3)
        assert np.allclose(a.label_P, b.label_P, atol=1e-4)
        assert np.allclose(a.residual_PR, b.residual_PR, atol=1e-4)
    assert TeacherFiles(tmp_path / "theirs").facts.teacher == "org/big"


def test_a_run_learns_from_a_server_and_keeps_its_answers(
    teacher_file: Path, student: Path, text: Path, tmp_path: Path
) -> None:
    def distil(teacher: dict[str, str], to: str, **more: Any) -> None:
        data = {"data": (str(text),), "output": str(tmp_path / to), "student": str(student), "repeat": True}
        run("distill", build("distill", {**train_runs.SIZES, **data, **teacher, "steps": 2, **more})[0], stream=None)

    with serve_model("vllm", teacher_file) as server:
        distil({"teacher": server.url}, "a", total_steps=4)
        n_asked = server.asked.count("/v1/completions")
        distil({"teacher": server.url}, "a", total_steps=4, steps=4, resume=True)
        assert server.asked.count("/v1/completions") == n_asked > 0
        given = {"teacher": server.url, "student": str(student), "data": (str(text),), "steps": 1}
        config = build("distill", {**train_runs.SIZES, **given, "output": str(tmp_path / "b")})[0]
        with pytest.raises(AprError, match="--plan cannot see"):
            plan("distill", config)
    distil({"teacher_logprobs": str(tmp_path / "a/teacher")}, "b", total_steps=4, steps=4)
    assert [line["loss"] for line in lines(tmp_path / "a")] == [line["loss"] for line in lines(tmp_path / "b")]


@pytest.mark.parametrize(
    "fault",
    [Fault(500, times=2), Fault(429, times=3), Fault(cut=40, times=3), Fault(change=lambda body: "?", times=0)],
    ids=["500", "429", "half a body", "nothing"],
)
def test_what_passes_is_repeated(
    teacher_file: Path, student: Path, text: Path, tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "_REQUESTS_AT_ONCE", 1)
    with serve_model("vllm", teacher_file) as server:
        server.fault = fault
        assert aprfmt.teacher(server.url, text, tmp_path / "out", student=student, **GIVEN).tokens > 0


_PAGE = "<!DOCTYPE html>\n<html><head><title>Not Found</title></head><body><h1>Not Found</h1>nginx</body></html>\n"


def _other(body: Any) -> Any:
    body["choices"][0]["prompt_token_ids"] = [1, 2]
    return body


def _beyond(body: Any) -> Any:
    for place in body["choices"][0]["prompt_logprobs"][1:]:
        place.update({str(10**6 + int(i)): place.pop(i) for i in list(place)[:1]})
    return body


def _short(body: Any) -> Any:
    body["choices"][0]["prompt_logprobs"].pop()
    return body


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (Fault(404), 3, "answered 404 to /v1/completions"),
        (Fault(404, page=_PAGE), 3, "answered 404 to /v1/completions: Not Found"),
        (Fault(500, page=_PAGE), 8, "answered 500 to /v1/completions: Not Found"),
        (Fault(500), 8, "in 4 attempts: the server answered 500"),
        (Fault(400), 5, "or lower --top-k"),
        (Fault(401), 5, API_KEY),
        (Fault(cut=40), 8, "in 4 attempts"),
        (Fault(pause=0.05), 8, "not complete after 0.5 s"),
        (Fault(change=_other), 5, "read different tokens"),
        (Fault(change=_short), 4, "no valid prompt_logprobs"),
        (Fault(change=lambda body: [1]), 4, "no valid prompt_logprobs"),
        (Fault(change=lambda body: {"choices": [{"prompt_logprobs": None}]}), 4, "no valid prompt_logprobs"),
    ],
    ids=[
        "404",
        "404 page",
        "500 page",
        "500",
        "400",
        "401",
        "half a body",
        "slow",
        "other tokens",
        "too few",
        "a list",
        "null",
    ],
)
def test_faults_of_a_server_are_named_and_nothing_is_lost(
    teacher_file: Path, student: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, fault: Fault, code: int, words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(completions, "REQUEST_S", 0.5 if fault.pause else 5.0)
    monkeypatch.setattr(completions, "_REQUESTS_AT_ONCE", 2)
    command = ["teacher", "", "--student", str(student), "--data", str(text), "-o", str(tmp_path / "out"), "--json"]
    command += ["--seq-len", "32", "--top-k", "8", "--held-out", "0.1"]
    with serve_model("vllm", teacher_file) as server:
        server.fault, command[1] = fault, server.url
        assert apr(command) == code
        error = json.loads(capsys.readouterr().out)["error"]
        assert words in error["message"] + str(error["hint"])
        assert "nginx" not in error["message"]
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokens"], "nothing half-written"
        server.fault = None
        assert apr(command) == 0


@pytest.mark.parametrize(
    ("models", "code", "words"),
    [
        ([], 4, "empty or malformed"),
        ([{"id": "a"}, {"id": "b"}], 5, "several models: a, b"),
        ([{"id": "a", "max_model_len": 33}], 5, "context length 31"),
    ],
)
def test_servers_that_do_not_fit_are_refused(
    teacher_file: Path, student: Path, text: Path, tmp_path: Path, models: list[Any], code: int, words: str
) -> None:
    with serve_model("vllm", teacher_file) as server:
        server.models = models
        with pytest.raises(AprError, match=words) as caught:
            aprfmt.teacher(server.url, text, tmp_path / "out", student=student, **GIVEN)
        assert caught.value.exit_code == code
        assert caught.value.hint


def test_a_server_with_another_tokenizer_is_refused_before_any_prompt(
    teacher_file: Path, student: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_model("vllm", teacher_file) as server:
        honest = ModelServer.answer
        reverse = lambda self, path, body: {"tokens": [5]} if path == "/tokenize" else honest(self, path, body)  # noqa: E731
        monkeypatch.setattr(ModelServer, "answer", reverse)
        with pytest.raises(AprError, match="tokenizer differs"):
            aprfmt.teacher(server.url, text, tmp_path / "out", student=student, **GIVEN)
        assert "/v1/completions" not in server.asked


def test_what_a_server_cannot_do_is_a_usage_error(student: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(AprError, match="temperature 1") as caught:
        aprfmt.teacher("http://127.0.0.1:9", text, tmp_path / "out", **GIVEN)
    assert "--student FILE" in str(caught.value.hint)
    with pytest.raises(AprError, match="--engine has no effect"):
        aprfmt.teacher("http://127.0.0.1:9", text, tmp_path / "out", student=student, engine="llama", **GIVEN)
    with pytest.raises(AprError, match=r"in 4 attempts: .*refused") as caught:
        aprfmt.teacher("http://127.0.0.1:9", text, tmp_path / "out", student=student, **GIVEN)
    assert "check the URL" in str(caught.value.hint)
    base = {"teacher": "http://127.0.0.1:9", "data": (str(text),), "output": "o", "steps": 1}
    for more, words in (
        ({"student_init": "layers:1"}, "needs the teacher model"),
        ({"student": "s", "temperature": 2.0}, "temperature 1 only"),
        ({"student": "s", "eval_data": "e"}, "--eval-data needs"),
        ({"student": "s", "teacher_residency": "q4k"}, "needs a loaded teacher"),
    ):
        with pytest.raises(AprError, match=words):
            build("distill", base | more)
