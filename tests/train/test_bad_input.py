"""Each way in which such runs have wasted days, tried on the command line: refused at once, with what to do.

A refusal has its exit code, says what is wrong and what to type next, comes within 5 s, and leaves nothing behind but
perhaps the data's token ids, which the next try takes.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from train_faults import MAKERS
from train_runs import weights

from aprfmt.cli.main import run as apr

SECONDS = 5
TOKENS = {"tokens"}
OPTIONS: dict[str, str | None] = {
    "--student-init": "layers:1", "--data": "CORPUS", "-o": "OUT", "--steps": "2", "--device": "cpu",
    "--seq-len": "32", "--tokens-per-step": "128", "--micro-tokens": "64", "--held-out": "0.1", "--repeat": "",
}  # fmt: skip
"""Of a run that works; "" is a flag's value, None leaves an option out, "" as a name is the argument."""


class Row(NamedTuple):
    """What is given otherwise than in OPTIONS; the exit code; parts of the message and of the hint."""

    given: Mapping[str, str | None]
    code: int
    message: str
    hint: str
    command: str = "distill"


SAME = {"--student-init": None, "--student": "TEACHER"}
CONSENT = {"--allow-same-arch": ""}


def other(student: str) -> dict[str, str | None]:
    return {"--student-init": None, "--student": student}


ROWS = {
    # A file was rejected, and "handled" by giving back no weights at all.
    "no such teacher": Row({"": "absent.apr"}, 3, "no such file", "path"),
    "no such student": Row(other("absent.apr"), 3, "no such file", "path"),
    "an empty file": Row({"": "empty.apr"}, 3, "empty", "copied completely"),
    "no model": Row({"": "text.apr"}, 3, "not a", "apr"),
    "half a file": Row({"": "cut.apr"}, 4, "", "again"),
    "half a student": Row(other("cut.apr"), 4, "", "again"),
    "no tensors": Row({"": "hollow.apr"}, 5, "no tensors", "weights"),
    "a tensor is missing": Row({"": "gap.apr"}, 5, "missing", "shards"),
    "no dims": Row({"": "nodims.apr"}, 5, "hidden", "apr stamp"),
    "a layer of zeros": Row({"": "zero.apr"}, 5, "zero", "again"),
    "a NaN": Row({"": "nan.apr"}, 4, "NaN", "again"),
    # A teacher that was the student, for 30 hours.
    "the same file": Row(SAME, 5, "same dimensions", "--allow-same-arch"),
    "the same file with consent": Row(SAME | CONSENT, 5, "same weights", "--student"),
    "all layers of the teacher": Row({"--student-init": "layers:2"} | CONSENT, 5, "same weights", "--student"),
    "the teacher itself": Row({"--student-init": "self"}, 2, "needs --qat", "--qat q4_0"),
    "an unknown preset": Row({"--qat": "q4_7"}, 2, "unknown", "q4_"),
    "a type without training": Row({"--qat": "iq4_xs"}, 2, "cannot train into", "q4_k_m"),
    "a re-quantized copy": Row(other("f16.apr"), 5, "same dimensions", "--allow-same-arch"),
    "a re-quantized copy with consent": Row(other("f16.apr") | CONSENT, 5, "equal the teacher's", "--student"),
    "a random teacher": Row({"": "random.gguf"}, 5, "predicts the held-out data badly", "--allow-weaker-teacher"),
    "a damaged teacher": Row({"": "noise.apr"}, 5, "held-out data", "--allow-weaker-teacher"),
    # A teacher of 4 GB that became 28.
    "no blocks to keep": Row({"--teacher-residency": "q4k"}, 5, "no Q4_K", "apr quantize"),
    "nothing for fp8": Row({"--teacher-residency": "fp8"}, 5, "no weight fits e4m3", "bf16"),
    # Training on the CPU for hours, in silence.
    "no GPU": Row({"--device": None}, 6, "no CUDA device", "--device cpu"),
    "no GPU to score on": Row({"--device": "cuda"}, 6, "no CUDA device", "--device cpu", "eval"),
    "any device": Row({"--device": "auto"}, 2, "'auto'", "--device cpu"),
    # Heads of 152064 and 151936 rows compared as vocabularies.
    "a permuted tokenizer": Row(other("permuted.apr"), 5, "id 40 is", "teacher's tokenizer"),
    "a head narrower than the vocabulary": Row(other("narrow.apr"), 5, "290", "--tokenizer"),
    # Batches that cannot be learnt, data that end, data that nobody gave.
    "no data": Row({"--data": None}, 2, "--data is missing", "--data"),
    "no such data": Row({"--data": "absent.jsonl"}, 3, "no such file", "the path of the data"),
    "blank data": Row({"--data": "blank.jsonl"}, 5, "no training documents", "add text"),
    "constant data": Row({"--data": "constant.jsonl"}, 5, "nearly constant", "check the data"),
    "one input, many labels": Row({"--data": "clashing.jsonl"}, 5, "no model can learn both", "--seq-len"),
    "broken JSON": Row({"--data": "broken.jsonl", "--strict": ""}, 4, "line 2", "without --strict"),
    "another field": Row({"--text-field": "body"}, 5, "records without 'body'", "--text-field"),
    "a weight that stands alone": Row({"--data": "other.jsonl:0.5"}, 2, "requires several --data", "--data "),
    "no UTF-8": Row({"--data": "latin.txt"}, 4, "UTF-8", ".jsonl"),
    "data that end": Row({"--repeat": None, "--steps": "99999"}, 5, "epochs", "--repeat"),
    "evaluated on what is trained on": Row(
        {"--held-out": None, "--eval-data": "CORPUS"}, 5, "also in the training data", "--eval-data"
    ),
    # Checkpoints without a tokenizer, names for tokens that are none.
    "a teacher without a tokenizer": Row({"": "mute.apr"}, 5, "no tokenizer", "--tokenizer"),
    "a student without a tokenizer": Row(other("mute.apr"), 5, "no tokenizer", "--tokenizer"),
    "a config narrower than the tokenizer": Row(
        {"": None, "--student-init": None, "--like": "TEACHER", "--shape": "small.json"},
        5, "300 tokens", "vocab_size", "pretrain",
    ),
    # Options that were read and thrown away, defaults that nobody chose.
    "windows of one token": Row({"--seq-len": "1"}, 2, "--seq-len must be", "--seq-len"),
    "an option that is none": Row({"--learning-pace": "1e-3"}, 2, "--learning-pace", "--help"),
    "a key that is none": Row({"--config": "options.toml"}, 2, "learning_rate", ""),
    "an end that nobody named": Row({"--steps": None, "--repeat": None}, 2, "--steps or --epochs", "--steps"),
    # Days of training and no checkpoint.
    "a file as the folder": Row({"-o": "file"}, 5, "not a folder", "-o"),
    "a folder that cannot be": Row({"-o": "file/run"}, 3, "", "path"),
    "nothing to go on from": Row({"--resume": ""}, 5, "no checkpoint", "--resume"),
    # What comes after: scores and packages of broken models.
    "half a model scored": Row({"": "cut.apr"}, 4, "", "again", "eval"),
    "a NaN scored": Row({"": "nan.apr"}, 8, "no score", "again", "eval"),
    "no tokenizer to score with": Row({"": "mute.apr"}, 8, "no tokenizer", "--tokenizer", "eval"),
    "half a model packaged": Row({"": "cut.apr", "-o": "OUT.gguf"}, 4, "", "again", "export"),
    "a gap packaged": Row({"": "gap.apr", "-o": "OUT.gguf"}, 5, "missing", "", "export"),
}  # fmt: skip

TAKEN = {"eval": ("--data", "--device", "--seq-len", "--json"), "export": ("-o", "--json")}


class Bench:
    """Material for rows in a folder, and the command lines that they are."""

    def __init__(self, folder: Path, teacher: Path, corpus: Path) -> None:
        self.folder = folder
        self.known = {"TEACHER": teacher, "CORPUS": corpus, "OUT": folder / "out", "OUT.gguf": folder / "out.gguf"}
        self.teacher, self.corpus = teacher, corpus

    def words(self, row: Row) -> list[str]:
        """The arguments of `apr`; makes the files that they name."""
        options = OPTIONS | {"": "TEACHER"} | dict(row.given)
        if row.command in TAKEN:
            options = {name: value for name, value in options.items() if name in ("", *TAKEN[row.command])}
        words = [row.command]
        for name, value in options.items():
            if value is not None:
                words += [word for word in (name, self.path(value)) if word]
        return [*words, "--json"]

    def path(self, value: str) -> str:
        if value in self.known:
            return str(self.known[value])
        name = value.partition("/")[0]
        if name in MAKERS and not (self.folder / name).exists():
            MAKERS[name](self.teacher, self.corpus, self.folder / name)
        return str(self.folder / value) if name in MAKERS or name.startswith("absent") else value


@pytest.fixture
def bench(tmp_path: Path, teacher_file: Path, corpus_file: Path) -> Bench:
    return Bench(tmp_path, teacher_file, corpus_file)


Refused = Callable[[list[str]], tuple[int, dict[str, Any]]]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Runs a command that must be refused in time: exit code, error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(words: list[str]) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        begin = time.monotonic()
        code = apr(words)
        assert time.monotonic() - begin < SECONDS
        body = json.loads(capsys.readouterr().out)
        assert body.keys() == {"schema", "ok", "error"}
        return code, body["error"]

    return run


@pytest.mark.parametrize("name", list(ROWS))
def test_a_known_failure_is_refused_at_once(name: str, bench: Bench, refused: Refused) -> None:
    row = ROWS[name]
    words = bench.words(row)
    before = set(bench.folder.iterdir())
    code, error = refused(words)
    assert code == row.code, error
    assert row.message in str(error["message"])
    assert error["hint"]
    assert row.hint in error["hint"]
    left = set(bench.folder.iterdir()) - before
    assert left <= {bench.folder / "out"}
    assert {path.name for folder in left for path in folder.iterdir()} <= TOKENS


def test_what_the_rows_differ_from_works(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """And so does a teacher whose head is wider than the student's, filled up with rows of nothing."""
    assert apr(bench.words(Row({}, 0, "", ""))) == 0
    assert apr(bench.words(Row({"": "wide.apr", "-o": "OUT.gguf"}, 0, "", ""))) == 0
    for name in ("out", "out.gguf"):
        assert len(weights(bench.folder / name / "model.apr")) > 5
    assert weights(bench.folder / "out/model.apr") != weights(bench.teacher)


@pytest.mark.parametrize(
    ("given", "code", "message", "hint"),
    [
        ({}, 5, "already contains a run", "--resume"),
        ({"--resume": ""}, 2, "already completed 2 steps", "--steps"),
        ({"--resume=later": ""}, 2, "the step of a checkpoint, auto, true or false", ""),
        ({"--resume": "", "--steps": "3", "--lr": "1e-3"}, 5, "--lr was", "--allow-changed lr"),
        ({"--resume": "", "--steps": "3", "--seed": "7"}, 5, "--seed was", "--allow-changed seed"),
        ({"--resume": "", "--steps": "3", "--data": "other.jsonl"}, 5, "the data differ", "-o"),
        ({"--resume": "", "--steps": "3", "": "f16.apr"}, 5, "the teacher changed", "-o"),
    ],
)
def test_a_run_is_not_spoilt_by_another(
    bench: Bench, refused: Refused, given: dict[str, str | None], code: int, message: str, hint: str
) -> None:
    """Resumes used to begin at the first shard again, and runs to overwrite each other."""
    total = {"--total-steps": "4"}
    assert apr(bench.words(Row(total, 0, "", ""))) == 0
    words = bench.words(Row(total | given, code, message, hint))
    before = {path: path.read_bytes() for path in bench.folder.rglob("*") if path.is_file()}
    found, error = refused(words)
    assert found == code, error
    assert message in error["message"]
    assert hint in error["hint"]
    assert {path: path.read_bytes() for path in bench.folder.rglob("*") if path.is_file()} == before


def test_a_finished_run_that_a_scheduler_starts_again_ends_as_before(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    words = bench.words(Row({"--resume": "auto", "--json": ""}, 0, "", ""))
    summaries, models = [], []
    for _ in range(2):
        capsys.readouterr()
        assert apr(words) == 0
        summaries.append(json.loads(capsys.readouterr().out))
        models.append(weights(bench.folder / "out/model.apr"))
    assert models[0] == models[1]
    assert summaries[0]["last"] == summaries[1]["last"]
    assert summaries[1]["steps"] == 2


@contextmanager
def full_disk(n_bytes: int) -> Iterator[None]:
    """While the block runs, no file of this process can be longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_without_room_is_noticed_before_the_first_step(bench: Bench, refused: Refused) -> None:
    """25 hours of training once ended in 200 bytes."""
    words = bench.words(Row({}, 7, "", ""))
    with full_disk(100_000):
        code, error = refused(words)
    assert code == 7, error
    assert error["hint"]
    assert {path.name for path in (bench.folder / "out").iterdir()} <= TOKENS


def test_a_refused_run_begins_anew_with_the_data_that_are_there(
    bench: Bench, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(bench.words(ROWS["a random teacher"]))[0] == 5
    assert apr([*bench.words(ROWS["a random teacher"]), "--allow-weaker-teacher"]) == 0
    assert "up to date" in capsys.readouterr().err
