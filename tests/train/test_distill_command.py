"""`apr distill` and `apr pretrain` as users run them: exit codes, signals, two processes, llama.cpp on the result."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from llama_peer import LlamaPeer
from train_children import forked, started
from train_runs import lines, weights

from aprfmt.cli.main import run as apr
from aprfmt.errors import CorruptError, RefusedError
from aprfmt.inspection.run_report import FILE
from aprtrain.checkpoints import checkpoint
from aprtrain.checkpoints.checkpoint import LATEST
from aprtrain.loop import Trainer
from aprtrain.network.weights import load_decoder, open_network
from aprtrain.world import ReportedByFirst

SIZES = (
    *("--device", "cpu", "--seq-len", "32", "--tokens-per-step", "128", "--micro-tokens", "64"),
    *(
        "--log-every",
        "1",
        "--eval-tokens",
        "1024",
        "--held-out",
        "0.1",
        "--save-dtype",
        "f32",
        "--lr",
        "3e-3",
        "--repeat",
    ),
)

MANY = "3000"
"""Steps that no test waits for; a run that nobody stops ends nevertheless."""


def words(teacher: Path, data: Path, output: Path, *more: str) -> list[str]:
    how = ["distill", str(teacher), "--student-init", "layers:1", "--data", str(data), "-o", str(output)]
    return [*how, *SIZES, *more]


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    return body


@pytest.mark.llama
def test_distil_package_run(
    teacher_file: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], llama_cpp: LlamaPeer
) -> None:
    """The user's whole way: distil, export, load in llama.cpp, and its greedy tokens are those of our own forward."""
    assert apr(words(teacher_file, corpus_file, tmp_path / "o", "--steps", "40", "--json")) == 0
    body = answer(capsys)
    assert body["schema"] == "apr.distill/1"
    assert body["last"]["kl"] <= 0.75 * body["first"]["kl"]
    model = Path(body["model"])
    for mix in ("keep", "q8_0"):
        gguf = tmp_path / f"{mix}.gguf"
        assert apr(["export", str(model), "-o", str(gguf), "--dtype", mix, "--verify", "--quiet"]) == 0
    with open_network(model) as network:
        decoder = load_decoder(network)
    ids = [40, 50, 60, 70]
    with torch.inference_mode():
        for _ in range(32):
            ours = decoder.logits(decoder(torch.tensor([ids])))[0]
            theirs = torch.from_numpy(llama_cpp.logits(tmp_path / "keep.gguf", ids))
            assert torch.allclose(ours, theirs, atol=5e-3)
            assert int(ours[-1].argmax()) == int(theirs[-1].argmax())
            ids.append(int(ours[-1].argmax()))


def test_a_plan_is_one_object_and_writes_nothing(
    teacher_file: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert apr(words(teacher_file, corpus_file, tmp_path / "o", "--steps", "40", "--plan", "--json")) == 0
    body = answer(capsys)
    assert body["config"]["lr"] == 0.003
    assert body["memory_bytes"] > 0
    assert not (tmp_path / "o").exists()
    assert apr(words(teacher_file, corpus_file, tmp_path / "o", "--steps", "40", "--plan")) == 0
    assert "total" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        (["--steps", "2", "--learning-pace", "1"], 2, "--learning-pace"),
        (["--steps", "0"], 2, "steps"),
        (["--steps", "2", "--temperature", "-1"], 2, "temperature"),
        (["--steps", "2", "--teacher", "x"], 2, "twice"),
        (["--steps", "2", "--student", "x"], 2, "not both"),
        ([], 2, "--steps"),
        (["--steps", "2", "--config", "absent.toml"], 3, "absent.toml"),
        (["--steps", "2", "--resume"], 5, "no checkpoint"),
        (["--steps", "2", "--device", "tpu"], 2, "tpu"),
        (["--steps", "100000", "--epochs", "1"], 2, "mutually exclusive"),
    ],
)
def test_refusals_have_their_exit_codes(
    teacher_file: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    change: list[str], code: int, word: str,
) -> None:  # fmt: skip
    assert apr([*words(teacher_file, corpus_file, tmp_path / "o"), *change, "--json"]) == code
    error = answer(capsys)["error"]
    assert word in f"{error['message']} {error['hint']} {error['path']}"


def test_the_hint_at_a_finished_run_is_a_line_to_type(
    teacher_file: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = words(teacher_file, corpus_file, tmp_path / "o", "--total-steps", "10", "--steps", "2")
    assert apr(how) == 0
    assert apr(how) == 5
    hint = capsys.readouterr().err.partition("hint: ")[2]
    assert hint.splitlines()[0] == shlex.join(["apr", *how, "--resume"])


def test_the_time_of_a_resumed_run_is_that_of_its_last_part(
    teacher_file: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = words(teacher_file, corpus_file, tmp_path / "o", "--total-steps", "10")
    assert apr([*how, "--steps", "2"]) == 0
    assert "since resuming" not in capsys.readouterr().out
    assert apr([*how, "--steps", "4", "--resume"]) == 0
    assert re.search(r"time +\S+ m?s since resuming, [\d,]+ tokens/s", capsys.readouterr().out)


def test_without_data_nothing_is_trained(teacher_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert apr(["distill", str(teacher_file), "--student-init", "layers:1", "-o", "o", "--steps", "1", "--json"]) == 2
    assert "--data is missing: the training data" in answer(capsys)["error"]["message"]


def test_alpha_is_the_weight_of_the_teacher(
    teacher_file: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apr(words(teacher_file, corpus_file, tmp_path / "o", "--steps", "2", "--alpha", "0.25", "--plan", "--json"))
    assert answer(capsys)["config"]["kd_weight"] == 0.25


def test_environment_variables_count_and_are_echoed(
    teacher_file: Path,
    corpus_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("APR_DISTILL_CHECKPOINT_EVERY", "2")
    assert apr(words(teacher_file, corpus_file, tmp_path / "o", "--steps", "4")) == 0
    assert "APR_DISTILL_CHECKPOINT_EVERY sets --save-every 2" in capsys.readouterr().err
    assert (tmp_path / "o/ckpt-step-000002.apr").exists()
    monkeypatch.setenv("APR_DISTILL_PER_POSITION", "1")
    assert apr(words(teacher_file, corpus_file, tmp_path / "p", "--steps", "4")) == 2


def test_quiet_says_nothing_and_progress_is_told_otherwise(
    teacher_file: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert apr(words(teacher_file, corpus_file, tmp_path / "o", "--steps", "2", "--quiet")) == 0
    assert capsys.readouterr() == ("", "")
    assert apr(words(teacher_file, corpus_file, tmp_path / "p", "--steps", "2")) == 0
    said = capsys.readouterr()
    assert "step 2/2 " in said.err
    assert "done after 2 steps" in said.out


def test_from_scratch_with_a_config(
    teacher_file: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 320,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    how = [
        "pretrain",
        "--like",
        str(teacher_file),
        "--shape",
        str(tmp_path / "config.json"),
        "--data",
        str(corpus_file),
    ]
    assert apr([*how, "-o", str(tmp_path / "o"), *SIZES, "--steps", "30", "--lr", "1e-2", "--json"]) == 0
    body = answer(capsys)
    assert body["first"]["ce"] == pytest.approx(5.8, abs=0.5)
    assert body["last"]["ce"] < 0.7 * body["first"]["ce"]
    assert body["last"]["kl"] is None
    with open_network(body["model"]) as network:
        assert (network.shape.n_layers, network.shape.vocab_rows, network.shape.tied) == (1, 320, False)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_run_goes_on_from_there(
    teacher_file: Path, corpus_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    number: int, code: int,
) -> None:  # fmt: skip
    folder = tmp_path / "o"
    how = words(teacher_file, corpus_file, folder, "--steps", MANY, "--total-steps", MANY, "--json")

    def work() -> None:
        found = apr(how)
        sys.stdout.flush()
        os._exit(found)

    with forked(work) as child:
        until(lambda: (folder / FILE).read_text().count('"event": "step"') >= 5)
        os.kill(child.pid, number)
        assert child.wait() == code
    body = json.loads(capfd.readouterr().out)
    assert (body["interrupted"], body["model"]) == (number, None)
    goes_on(teacher_file, corpus_file, folder, body["steps"])


def until(is_so: Callable[[], bool]) -> None:
    """Waits for files that another process writes."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            if is_so():
                return
        time.sleep(0.02)
    raise AssertionError("it did not come to pass")


def goes_on(teacher: Path, data: Path, folder: Path, done: int) -> None:
    """Whether the run that a signal ended after `done` steps is complete, and goes on with the next one."""
    assert checkpoint.read_pointer(folder, LATEST) == done >= 5
    assert max(line["step"] for line in lines(folder)) == done
    assert not (folder / "model.apr").exists()
    assert not list(folder.glob("*.tmp"))
    assert len(weights(folder / f"{checkpoint.step_name(done)}.apr")) > 5
    again = ["--steps", str(done + 3), "--total-steps", MANY, "--resume", "--quiet"]
    assert apr(words(teacher, data, folder, *again)) == 0
    assert [line["step"] for line in lines(folder)] == list(range(1, done + 4))


def test_a_stall_is_a_json_error_with_exit_8(
    teacher_file: Path, corpus_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(Trainer, "_launch", lambda *_: time.sleep(60))
    how = words(teacher_file, corpus_file, tmp_path / "o", "--steps", "2", "--deadline", "0.5", "--json")
    with forked(lambda: apr(how)) as child:
        assert child.wait() == 8
    said = capfd.readouterr()
    error = json.loads(said.out)["error"]
    assert error["code"] == "run"
    assert "first step" in error["message"]
    assert "_step" in said.err, "the stacks are shown"


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_processes_the_first_answers_and_none_waits_at_its_end(
    rank: int, teacher_file: Path, corpus_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def refused(*_: object, **__: object) -> None:
        raise RefusedError("the folder already contains a run")

    def fail() -> None:
        os._exit(apr(words(teacher_file, corpus_file, tmp_path / "o", "--steps", "2", "--json")) + 100)

    monkeypatch.setattr("aprtrain.run.run", refused)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    with forked(fail) as child:
        assert child.wait() == 5
    said = capfd.readouterr()
    if rank == 0:
        assert json.loads(said.out)["error"]["message"] == "the folder already contains a run"
    else:
        assert said.out == ""
        assert said.err.startswith("error: the folder already contains a run")


def test_an_error_of_all_processes_is_told_once(
    teacher_file: Path,
    corpus_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise CorruptError("the checkpoint is damaged") from ReportedByFirst()

    monkeypatch.setattr("aprtrain.run.run", refused)
    monkeypatch.setattr("aprfmt.cli.training._PAUSE_S", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with forked(lambda: apr(words(teacher_file, corpus_file, tmp_path / "o", "--steps", "2"))) as child:
        assert child.wait() == 4
    assert capfd.readouterr() == ("", "")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_two_processes_train_what_one_trains(teacher_file: Path, corpus_file: Path, tmp_path: Path) -> None:
    """The same batches and, up to the order of a sum, the same weights; one process goes on where two have ended."""
    one, two = tmp_path / "one", tmp_path / "two"
    alone = words(teacher_file, corpus_file, one, "--steps", "8", "--save-every", "6", "--quiet")
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    arguments = words(teacher_file, corpus_file, two, "--steps", "6", "--total-steps", "8", "--json")
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started(["-m", "aprfmt", *arguments], **world, RANK=str(rank), LOCAL_RANK=str(rank)))
            for rank in range(2)
        ]
        assert apr(alone) == 0  # while they start
        said = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said[0][1] + said[1][1]
    assert json.loads(said[0][0])["steps"] == 6
    assert said[1][0] == ""
    assert train_runs.same_model(one / "ckpt-step-000006.apr", two / "model.apr")
    again = words(teacher_file, corpus_file, two, "--steps", "8", "--total-steps", "8", "--resume", "--quiet")
    assert apr(again) == 0
    assert train_runs.same_model(one / "model.apr", two / "model.apr")
    a, b = ([value for line in lines(to) for value in (line["loss"], line["grad_norm"])] for to in (one, two))
    assert a == pytest.approx(b, rel=1e-4)


def test_help_shows_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert apr(["distill", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("--kd-weight, --alpha X", "[default: 0.8]", "--save-every N", "[default: 5000]", "--micro-tokens N"):
        assert part in text
    assert not re.search(r"default: None", text)
