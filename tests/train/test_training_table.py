"""What docs/training.md says stops a run does: each row has tests that see its exit code, as a user types it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import demo_model
import pytest
import train_runs

import aprfmt
from aprfmt.cli.main import run as apr
from aprtrain.checkpoints.checkpoint import lock_folder
from aprtrain.checkpoints.state import save_state

ROOT = Path(__file__).resolve().parents[2]
HEADING = "## What stops a run before it wastes time"

SHOWN: dict[str, list[str]] = {
    "no CUDA device, unless": ["no GPU"],
    "teacher and student with the same dims": [
        "the same file", "the same file with consent", "a re-quantized copy", "all layers of the teacher",
    ],
    "KL to the teacher below": ["a re-quantized copy with consent"],
    "a teacher worse on held-out text": ["a random teacher", "a damaged teacher"],
    "different tokenizers": ["a permuted tokenizer", "a head narrower than the vocabulary"],
    "a teacher with more than": [
        "test_training_table.py::test_a_teacher_that_uses_tokens_that_its_student_lacks"
    ],
    "teacher files: made with": ["test_teacher_files.py::test_files_that_do_not_fit_are_refused_by_name"],
    "teacher files: truncated": ["test_teacher_files.py::test_no_bit_of_the_files_turns_over_unnoticed"],
    "more than 90 %": ["test_training_table.py::test_conversations_whose_answers_are_too_rare"],
    "conversations for a student": ["test_training_table.py::test_conversations_that_a_template_does_not_take"],
    "conversations, and a chat": ["test_training_table.py::test_conversations_that_a_template_does_not_take"],
    "a weight that repeats": [
        "test_mixtures.py::test_a_weight_that_takes_a_source_twice_is_refused",
        "test_training_table.py::test_a_weight_that_a_source_does_not_last_for",
    ],
    "constant data": ["constant data", "one input, many labels", "blank data", "data that end"],
    "sequences longer than": ["test_training_table.py::test_windows_beyond_the_context"],
    "another run in the same folder": ["test_training_table.py::test_another_run_in_the_folder"],
    "a plan larger than": [
        "test_guards.py::test_more_memory_than_planned_and_a_plan_beyond_the_device_are_errors",
        "test_training_table.py::test_a_plan_beyond_the_memory_of_the_gpu",
    ],
    "a teacher in GGML blocks or fp8 on a GPU": [
        "test_features.py::test_a_packed_teacher_on_a_gpu_without_triton_is_refused",
        "test_features.py::test_e4m3_on_a_gpu_without_it_is_refused",
    ],
    "a first step longer than": ["test_distill_command.py::test_a_stall_is_a_json_error_with_exit_8"],
    "GPU utilization below": ["test_guards.py::test_an_idle_gpu_stops_the_run_and_a_slow_one_warns_once"],
    "a memory peak": ["test_guards.py::test_more_memory_than_planned_and_a_plan_beyond_the_device_are_errors"],
    "a non-finite loss or gradient": [
        "test_loop.py::test_a_nan_stops_the_run_and_the_weights_before_it_are_saved",
        "test_training_table.py::test_a_run_that_diverges",
    ],
    "a damaged checkpoint to resume from": ["test_training_table.py::test_a_damaged_checkpoint"],
    "a non-finite master weight or moment": ["test_training_table.py::test_a_master_weight_that_is_not_finite"],
}  # fmt: skip
"""How a row of the table begins -> names of rows of test_bad_input, and of other tests."""


def table() -> dict[str, int]:
    """The rows of the table: what, and the exit code."""
    rest = (ROOT / "docs/training.md").read_text().split(HEADING)[1]
    rows = re.match(r"\n\n((?:\|.*\n)+)", rest)
    assert rows is not None
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows[1].splitlines()[2:]]
    return {what: int(code) for what, code in cells}


def test_each_row_of_the_table_has_its_tests() -> None:
    rows, bad_input = table(), import_module("test_bad_input").ROWS
    assert len(rows) == len(SHOWN)
    for what, code in rows.items():
        (shown,) = (names for words, names in SHOWN.items() if what.startswith(words))
        for name in shown:
            file, _, test = name.partition("::")
            if test:
                found = next((ROOT / "tests").rglob(file)).read_text()
                assert re.search(rf"^def {test}\(", found, re.MULTILINE), name
            else:
                assert bad_input[name].code == code, name


Distil = Callable[..., dict[str, Any]]


@pytest.fixture
def refused(
    capsys: pytest.CaptureFixture[str], teacher_file: Path, corpus_file: Path, tmp_path: Path
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs `apr distill` with options beside those of a tiny run: exit code, error."""

    def run(
        *changed: str, output: str = "run", device: str = "cpu", more: tuple[str, ...] = (), student: Path | None = None
    ) -> tuple[int, dict[str, Any]]:
        how = ["distill", str(teacher_file)]
        how += ["--student-init", "layers:0,"] if student is None else ["--student", str(student)]
        how += more or ("--data", str(corpus_file), "--repeat")
        how += ["-o", str(tmp_path / output), "--device", device, "--held-out", "0.1", "--save-dtype", "f32"]
        sizes = {"--steps": "4", "--seq-len": "32", "--tokens-per-step": "128", "--micro-tokens": "64", "--lr": "3e-3"}
        sizes |= dict(zip(changed[::2], changed[1::2], strict=True))
        words = [word for pair in sizes.items() for word in pair if word != "yes"]
        capsys.readouterr()
        code = apr([*how, *words, "--json"])
        body = json.loads(capsys.readouterr().out)
        return code, body.get("error", {})

    return run


Refused = Callable[..., tuple[int, dict[str, Any]]]


def test_windows_beyond_the_context(refused: Refused) -> None:
    code, error = refused("--seq-len", "512", "--tokens-per-step", "512", "--micro-tokens", "512")
    assert code == 5
    assert "sequence length 512 exceeds the context length 256" in error["message"]
    assert "--seq-len 256" in error["hint"]


def test_a_weight_that_a_source_does_not_last_for(refused: Refused, tmp_path: Path) -> None:
    small = train_runs.write_corpus(tmp_path / "small.jsonl", documents=10, seed=7)
    large = train_runs.write_corpus(tmp_path / "large.jsonl", documents=100, seed=8)
    how = ("--data", f"{small}:0.9", "--data", f"{large}:0.1", "--no-repeat")
    code, error = refused("--steps", "12", more=how)
    assert code == 5
    assert "small.jsonl" in error["message"]
    assert "--repeat" in error["hint"]


def test_another_run_in_the_folder(refused: Refused, tmp_path: Path) -> None:
    with lock_folder(tmp_path / "run"):
        code, error = refused()
    assert code == 5
    assert "another run is writing" in error["message"]
    assert "-o" in error["hint"]


@pytest.mark.cuda
def test_a_plan_beyond_the_memory_of_the_gpu(refused: Refused) -> None:
    tokens = str(1 << 27)
    code, error = refused("--tokens-per-step", tokens, "--micro-tokens", tokens, device="cuda")
    assert code == 5
    assert "the device has" in error["message"]
    assert "--micro-tokens" in error["hint"]


def test_a_damaged_checkpoint(refused: Refused, tmp_path: Path) -> None:
    assert refused("--steps", "2", "--total-steps", "4")[0] == 0
    path = tmp_path / "run/ckpt-step-000002.state"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, error = refused("--total-steps", "4", "--resume", "yes")
    assert code == 4
    assert "checksum" in error["message"]
    assert (error["path"], bool(error["tensor"])) == (str(path), True)


def test_a_master_weight_that_is_not_finite(refused: Refused, tmp_path: Path) -> None:
    assert refused("--steps", "2", "--total-steps", "4")[0] == 0
    path = tmp_path / "run/ckpt-step-000002.state"
    tensors, facts = train_runs.load_state(path)
    tensors["master.norm"][0] = float("nan")
    save_state(tensors, facts, path)
    code, error = refused("--total-steps", "4", "--resume", "yes")
    assert code == 8
    assert "not finite" in error["message"]
    assert error["tensor"] == "master.norm"


def test_conversations_whose_answers_are_too_rare(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    records = [{"prompt": f"{n} " + "the cat sat on a mat " * 80, "completion": "x"} for n in range(20)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    code, error = refused(more=("--data", str(path), "--repeat"))
    assert code == 5
    assert re.search(r"no document has a token to predict among its first \d+", error["message"])
    assert "--seq-len" in error["hint"]


@pytest.mark.parametrize(
    ("template", "words", "hint", "wanted"),
    [
        (None, "no chat template", "--text-field", 5),
        (
            "{% for m in messages %}{{ m.content }}|{% endfor %}answer:", "message 2 cannot be located",
            "{% generation %}", 5,
        ),
        ("{% for m in messages %}{{ m.content }", "cannot be rendered", "Jinja", 4),
    ],
)  # fmt: skip
def test_conversations_that_a_template_does_not_take(
    template: str | None, words: str, hint: str, wanted: int, refused: Refused, teacher_file: Path, tmp_path: Path
) -> None:
    aprfmt.prune_model(teacher_file, tmp_path / "pruned.apr", keep_layers=[0])
    values = {"tokenizer.chat_template": template}
    aprfmt.stamp(tmp_path / "pruned.apr", tmp_path / "s.apr", set=values, check_template=False)
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}", "completion": "x"}) + "\n" for n in range(20)))
    code, error = refused(student=tmp_path / "s.apr", more=("--data", str(path), "--repeat"))
    assert code == wanted
    assert words in error["message"]
    assert hint in error["hint"]


def test_a_teacher_that_uses_tokens_that_its_student_lacks(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "N_TOKENS", demo_model.N_TOKENS - 4)
    monkeypatch.setattr(demo_model, "MERGES", demo_model.MERGES[:-4])
    demo_model.build(tmp_path / "s.gguf")
    more = ("--vocab-policy", "renormalise", "--allow-weaker-teacher", "yes")
    code, error = refused(*more, student=tmp_path / "s.gguf")
    assert code == 8
    assert re.search(r"assigns \d+\.\d+% of its probability", error["message"])


def test_a_run_that_diverges(refused: Refused, tmp_path: Path) -> None:
    much = ("--lr", "10", "--weight-decay", "1", "--clip", "0", "--warmup-steps", "0", "--steps", "60")
    code, error = refused(*much)
    assert code == 8
    assert re.search(r"cross entropy is \d+ nats|is not finite", error["message"])
    assert "lower --lr" in error["hint"]
    assert not (tmp_path / "run/model.apr").exists()


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (("--log-to", "paper"), 2, "one of tensorboard, wandb"),
        (("--save-epochs", "0"), 2, "at least 1"),
        (("--smoke", "1", "--qa", "yes"), 2, "--smoke writes none"),
        (("--teacher-residency", "q8"), 2, "one of auto, bf16, q4k, fp8"),
    ],
)
def test_an_option_that_is_wrong_is_named(refused: Refused, more: tuple[str, ...], code: int, words: str) -> None:
    found, error = refused(*more)
    assert found == code
    assert words in error["message"]


def test_the_plan_refuses_what_the_run_would(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused("--steps", "2")[0] == 0
    code, error = refused("--plan", "yes")
    assert (code, error["message"]) == (5, "the folder already contains a run")
    assert refused("--plan", "yes", output="other")[0] == 0
    code, error = refused("--plan", "yes", "--steps", "99999", "--no-repeat", "yes", output="other")
    assert code == 5
    assert re.search(r"99999 steps need 12799872 tokens, but the data has \d+: 6\d\d\.\d epochs", error["message"])
    assert "--repeat" in error["hint"]
    with monkeypatch.context() as patch:
        patch.setattr("aprtrain.budget.SAMPLE_CHARS", 1000)
        code, error = refused("--plan", "yes", "--steps", "99999", "--no-repeat", "yes", output="other")
        # What is estimated may be wrong by half, what is counted not.
        assert refused("--plan", "yes", "--steps", "230", "--no-repeat", "yes", output="other")[0] == 0
    assert refused("--plan", "yes", "--steps", "230", "--no-repeat", "yes", output="other")[0] == 5
    assert code == 5
    assert "the data has about " in error["message"]
    assert refused("--plan", "yes", "--steps", "99999", "--smoke", "2", "--no-repeat", "yes", output="other")[0] == 0
    monkeypatch.setenv("WORLD_SIZE", "3")
    code, error = refused("--plan", "yes", output="other")
    assert code == 2
    assert "4 sequences per step do not divide over 3 processes" in error["message"]
