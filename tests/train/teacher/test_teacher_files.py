"""Files of a teacher: written through torch and llama.cpp, taken from vLLM's responses, read by a run, or refused."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import demo_model
import numpy as np
import pytest
import torch
import train_runs
from flips import draw, flipped
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from train_models import Maker
from train_runs import lines, weights

import aprfmt
from aprfmt.cli.main import run as apr
from aprfmt.errors import AprError, UnknownFormatError
from aprfmt.formats.teacher_files import TeacherFiles, TeacherHeader, TeacherShard, answer_of, write_shard
from aprfmt.texts.encoding import Encoder
from aprfmt.texts.sequences import Windows, pieces_of
from aprfmt.texts.shards import open_corpus, read_header
from aprtrain.config_sources import build
from aprtrain.data.batches import batch_of
from aprtrain.evaluate import evaluate
from aprtrain.network.weights import load_decoder, open_network
from aprtrain.run import run
from aprtrain.teach import _told
from aprtrain.teacher.files import TeacherTargets

IDS = 300
GIVEN: dict[str, Any] = {"seq_len": 32, "held_out": 0.1}
Run = Callable[..., dict[str, Any]]


class Made(NamedTuple):
    """A teacher, the first of its layers as a student, text, and files of the teacher with all of its ids."""

    teacher: Path
    student: Path
    text: Path
    files: Path


@pytest.fixture(scope="module")
def made(teacher_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("files")
    text = train_runs.write_corpus(root / "c.jsonl", documents=60)
    aprfmt.prune_model(teacher_file, root / "s.apr", keep_layers=[0])
    report = aprfmt.teacher(teacher_file, text, root / "all", top_k=IDS, device="cpu", **GIVEN)
    assert report.files == 2
    assert report.rest["1"] < 1e-6
    return Made(teacher_file, root / "s.apr", text, root / "all")


@pytest.fixture
def distil(made: Made, tmp_path: Path) -> Run:
    """A short run of the student into tmp_path / `to`, from the files in a folder or from the teacher itself."""

    def start(to: str, files: Path | None = None, **given: Any) -> dict[str, Any]:
        source = {"teacher": str(made.teacher)} if files is None else {"teacher_logprobs": str(files)}
        how = {"student": str(made.student), "steps": 3, "lr": 3e-3, "repeat": True, "temperature": 2.0}
        data = {"data": given.pop("data", (str(made.text),)), "output": str(tmp_path / to)}
        config = build("distill", {**train_runs.SIZES, **data, **source, **how, **given})[0]
        return {**run("distill", config, stream=None)}

    return start


def losses(folder: Path) -> list[dict[str, Any]]:
    return lines(folder)


def close(a: list[dict[str, Any]], b: list[dict[str, Any]], bound: float) -> bool:
    names = ("loss", "ce", "kl", "kl1", "grad_norm")
    pairs = [*zip(a, b, strict=True)]
    same = all(abs(x["agreement"] - y["agreement"]) < 0.03 for x, y in pairs)  # three positions of a step
    return same and all(abs(x[n] - y[n]) <= bound * max(1e-2, abs(y[n])) for x, y in pairs for n in names)


# --- writing and reading ---


@pytest.mark.parametrize("loss", ["forward", "reverse", "jsd"])
def test_files_of_all_ids_teach_what_the_teacher_does(made: Made, distil: Run, tmp_path: Path, loss: str) -> None:
    there, read = distil("there", loss=loss), distil("read", made.files, loss=loss)
    assert close(losses(tmp_path / "read"), losses(tmp_path / "there"), 2e-3)
    for when in ("first", "last"):
        for name in ("ce", "kl", "agreement", "teacher_ce"):
            assert read[when][name] == pytest.approx(there[when][name], rel=1e-3, abs=1e-4), name
    a, b = (train_runs.load_state(tmp_path / to / "ckpt-step-000003.state")[0] for to in ("there", "read"))
    means = [name for name in a if name.startswith("mean.")]  # of the gradients
    for name in means:
        assert float((a[name] - b[name]).norm()) <= 1e-3 * float(b[name].norm()), name
    assert train_runs.same_model(tmp_path / "there/model.apr", tmp_path / "read/model.apr", atol=1e-4)
    metadata = json.loads((tmp_path / "read/distillation_metadata.json").read_text())
    assert metadata["teacher"]["name"] == made.teacher.name


def test_llama_cpp_says_what_torch_says(made: Made, tmp_path: Path) -> None:
    report = aprfmt.teacher(made.teacher, made.text, tmp_path / "out", top_k=16, engine="llama", **GIVEN)
    assert "llama.cpp" in report.engine
    torch_says = aprfmt.teacher(made.teacher, made.text, tmp_path / "torch", top_k=16, device="cpu", **GIVEN)
    assert report.teacher_ce == pytest.approx(torch_says.teacher_ce, abs=1e-3)
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        a, b = load_file(path), load_file(tmp_path / "torch" / path.name)
        for name in ("windows", "counts", "positions"):
            assert np.array_equal(a[name], b[name])
        assert (a["ids"][:, 0] == b["ids"][:, 0]).mean() > 0.99
        assert np.allclose(a["logprobs"] / -2048, b["logprobs"] / -2048, atol=0.05)
        assert np.allclose(a["rest"], b["rest"], atol=0.01)


def test_the_first_ids_of_many_are_the_files_of_a_few(made: Made, distil: Run, tmp_path: Path) -> None:
    aprfmt.teacher(made.teacher, made.text, tmp_path / "few", top_k=8, device="cpu", **GIVEN)
    distil("few-run", tmp_path / "few")
    distil("many-run", made.files, top_k=8)
    assert close(losses(tmp_path / "few-run"), losses(tmp_path / "many-run"), 5e-4)
    distil("all-run", made.files)
    whole, part = (losses(tmp_path / f"{name}-run")[0]["kl"] for name in ("all", "few"))
    assert part < whole


def test_files_held_out_are_scored_by_their_definition(made: Made) -> None:
    """KL of four ids and all others, the teacher's cross entropy and agreement, from whole logits in float64."""
    files = TeacherFiles(made.files)
    header = read_header(made.files / "tokens")
    assert header is not None
    corpus = open_corpus(made.files / "tokens", header["tokenizer"])
    windows = Windows(corpus.held_out, 32, corpus.separator)
    answers = TeacherTargets(files, files.bind(windows, range(len(windows)), "held-out"), IDS, 4, 1.0)
    with open_network(made.teacher) as a, open_network(made.student) as b:
        teacher, student = load_decoder(a, torch.float32, "cpu"), load_decoder(b, torch.float32, "cpu")
    found = evaluate(student, windows, rows=4, answers=answers)
    sums = torch.zeros(3, dtype=torch.float64)
    for i in range(len(windows)):
        batch = batch_of(windows, [i])
        counts = batch.labels_NT >= 0
        t, s = (
            each.logits(each(batch.tokens_NT, batch.documents))[counts].double().softmax(1)
            for each in (teacher, student)
        )
        ids = t.topk(4, 1).indices
        q, p = (torch.cat([x.gather(1, ids), x.scatter(1, ids, 0).sum(1, keepdim=True)], 1) for x in (t, s))
        own = t.gather(1, batch.labels_NT[counts][:, None]).log()
        values = (q * (q / p).log()).sum(), (t.argmax(1) == s.argmax(1)).sum(), -own.sum()
        sums += torch.stack([value.detach().double() for value in values])
    wanted = (sums / found.tokens).tolist()
    assert (found.kl, found.agreement, found.teacher_ce) == pytest.approx(wanted, rel=1e-3)


def test_what_is_shown_at_temperature_1_is_of_no_other(made: Made, distil: Run, tmp_path: Path) -> None:
    """The KL of a step's line and of held-out text, where some mass is left to others."""
    for name, heat in (("one", 1.0), ("four", 4.0)):
        distil(name, made.files, top_k=4, temperature=heat, steps=1)
    one, four = (lines(tmp_path / name)[0] for name in ("one", "four"))
    assert four["kl1"] == pytest.approx(one["kl1"], rel=1e-5)
    assert four["kl"] != pytest.approx(one["kl"], rel=0.1)
    one, four = (lines(tmp_path / name, "evaluation")[0] for name in ("one", "four"))
    assert four["kl"] == pytest.approx(one["kl"], rel=1e-6)


def test_rows_of_a_head_behind_the_tokens_say_nothing(made: Made) -> None:
    facts = replace(TeacherFiles(made.files).facts, k=5)
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    padded = torch.cat([logits, torch.full((3, 12), 50.0)], 1)
    places = np.arange(3)
    plain, wide = (_told(iter([(places, places + 4, rows)]), 20, facts) for rows in (logits, padded))
    assert all(np.array_equal(a, b) for a, b in zip(plain, wide, strict=True))
    assert plain.label_P == pytest.approx(logits.log_softmax(1)[places, places + 4].numpy(), rel=1e-5)


def test_no_teacher_is_loaded_and_a_run_goes_on_as_if_it_had_not_stopped(
    made: Made, distil: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aprtrain.models.Teacher", None)
    distil("whole", made.files, steps=4)
    distil("part", made.files, steps=2, total_steps=4)
    distil("part", made.files, steps=4, total_steps=4, resume=True)
    assert weights(tmp_path / "whole/model.apr") == weights(tmp_path / "part/model.apr")


def test_writing_goes_on_where_it_was_interrupted(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aprtrain.teach._SHARD_BYTES", 1 << 18)

    def write() -> aprfmt.TeacherReport:
        return aprfmt.teacher(made.teacher, made.text, tmp_path / "out", top_k=16, device="cpu", **GIVEN)

    first = write()
    paths = sorted((tmp_path / "out").glob("*.safetensors"))
    assert first.files == len(paths) > 3
    before = {path.name: path.read_bytes() for path in paths}
    paths[1].unlink()
    with pytest.raises(AprError, match=f"{paths[1].name} is missing"):
        TeacherFiles(tmp_path / "out")
    second = write()
    assert (second.resumed, second.files) == (first.files - 1, first.files)
    assert {path.name: path.read_bytes() for path in paths} == before
    assert write().tokens == 0
    with pytest.raises(AprError, match="--top-k was 16, is 64"):
        aprfmt.teacher(made.teacher, made.text, tmp_path / "out", top_k=64, device="cpu", **GIVEN)
    other = train_runs.write_corpus(tmp_path / "other.jsonl", documents=60, seed=7)
    with pytest.raises(AprError, match="teacher files of other data") as caught:
        aprfmt.teacher(made.teacher, other, tmp_path / "out", top_k=16, device="cpu", **GIVEN)
    assert caught.value.hint == "resume with their --data, or choose another -o"
    shutil.rmtree(tmp_path / "out/tokens")
    with pytest.raises(AprError, match="files of a different text"):
        aprfmt.teacher(made.teacher, other, tmp_path / "out", top_k=16, device="cpu", **GIVEN)


def test_more_ids_than_there_are_are_refused_before_anything_is_read(made: Made, tmp_path: Path) -> None:
    for planned in (True, False):
        with pytest.raises(AprError, match="--top-k 301 is more than the 300 tokens of the vocabulary") as caught:
            aprfmt.teacher(made.teacher, made.text, tmp_path / "out", top_k=301, device="cpu", plan=planned, **GIVEN)
        assert caught.value.hint == "--top-k 300 or less"
        assert not (tmp_path / "out").exists()


def test_the_documented_form_is_what_is_written(made: Made) -> None:
    """With the safetensors library, not with ours."""
    path = next(made.files.glob("train-*"))
    tensors = load_file(path)
    n, rows = len(tensors["windows"]), len(tensors["ids"])
    assert {name: (value.dtype.name, value.shape) for name, value in tensors.items()} == {
        "windows": ("uint8", (n, 32)), "counts": ("int64", (n,)), "sums": ("int64", (n,)),
        "positions": ("int32", (rows,)), "ids": ("uint16", (rows, IDS)), "ids_high": ("uint8", (rows, 0)),
        "logprobs": ("uint16", (rows, IDS)),
        "rest": ("float32", (rows, 4)), "label_logprobs": ("float32", (rows,)),
    }  # fmt: skip
    with safe_open(path, "np") as opened:
        metadata = opened.metadata()
    header = read_header(made.files / "tokens")
    assert header is not None
    assert metadata["format"] == "aprtrain-teacher/2"
    assert metadata["tokenizer"] == header["tokenizer"]
    assert (metadata["k"], metadata["seq_len"]) == (str(IDS), "32")
    assert json.loads(metadata["temperatures"]) == [1, 2, 3, 4]
    assert tensors["counts"].sum() == rows


@pytest.mark.parametrize("n_ids", [300, 1 << 16, 151_936, 262_144, 1 << 20, 1 << 24])
def test_ids_of_any_size_come_back_and_log_probabilities_within_a_step(tmp_path: Path, n_ids: int) -> None:
    rng = np.random.default_rng(1)
    facts = TeacherHeader("t", "0" * 64, "llama", 1, "torch", "0" * 64, 8, n_ids, 13, (1.0, 2.0))
    ids = np.stack([rng.choice(n_ids - 2, 12, replace=False) for _ in range(5)])
    ids = np.concatenate([ids, np.full((5, 1), n_ids - 1)], 1)
    logprobs = -np.sort(rng.uniform(3, 31, (5, 13))).astype(np.float32)
    rest = np.repeat(1 - np.exp(logprobs).sum(1, keepdims=True), 2, 1)
    answer = answer_of([(np.arange(5), ids, logprobs, rest, logprobs[:, 0])], facts)
    write_shard(tmp_path / "train-00001-of-00001.safetensors", facts, [bytes(32)], [answer])
    found = TeacherShard(tmp_path / "train-00001-of-00001.safetensors").read(0)
    assert np.array_equal(found.ids_PK, ids)
    assert np.abs(found.logprobs_PK - logprobs).max() <= 1 / 4096 + 1e-6
    assert np.array_equal(found.residual_PR, answer.residual_PR)
    assert replace(facts, k=64, n_ids=min(n_ids, 262_144), temperatures=(1.0, 2.0, 3.0, 4.0)).row_bytes <= 300


# --- vLLM ---


def responses(made: Made, prompts: Path, k: int) -> list[dict[str, Any]]:
    """What a vLLM server would answer: the most likely ids of each position, and the prompt's own."""
    files = TeacherFiles(made.files)
    header = read_header(made.files / "tokens")
    assert header is not None
    corpus = open_corpus(made.files / "tokens", header["tokenizer"])
    by_prompt = {}
    for part in (corpus.train, corpus.held_out):
        windows = Windows(part, 32, corpus.separator)
        for i, (shard, number) in files.bind(windows, range(len(windows)), "").at.items():
            answer = shard.read(number)
            for piece in pieces_of(windows.rows([i]), 0):
                told: list[Any] = [None, *[{}] * len(piece.ids)]
                for place, label in zip(piece.places_P, piece.labels_P.tolist(), strict=True):
                    row = int(np.searchsorted(answer.positions_P, place))
                    pairs = dict(zip(answer.ids_PK[row].tolist(), answer.logprobs_PK[row].tolist(), strict=True))
                    wanted = {label: pairs[label]} | dict(list(pairs.items())[:k])
                    told[place - piece.start + 1] = {
                        str(j): {"logprob": value, "rank": 1, "decoded_token": "?"} for j, value in wanted.items()
                    }
                by_prompt[tuple(piece.prompt)] = told
    asked = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    return [{"index": 0, "prompt_token_ids": ids, "prompt_logprobs": by_prompt[tuple(ids)]} for ids in asked]


@pytest.fixture(scope="module")
def answered(made: Made, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Prompts that were asked for, and their responses with eight ids."""
    folder = tmp_path_factory.mktemp("vllm")
    report = aprfmt.teacher(None, made.text, folder / "x", student=made.student, prompts=folder / "p.jsonl", **GIVEN)
    found = responses(made, folder / "p.jsonl", 8)
    assert report.prompts == len(found) > 100
    return folder / "p.jsonl", found


def test_prompts_do_not_replace_the_text(made: Made) -> None:
    before = made.text.read_bytes()
    with pytest.raises(aprfmt.AprError, match="the output is the input"):
        aprfmt.teacher(None, made.text, made.text.parent / "new", student=made.student, prompts=made.text, **GIVEN)
    assert made.text.read_bytes() == before
    assert not (made.text.parent / "new").exists()


FRAMES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "choice": lambda choice: choice,
    "response": lambda choice: {"model": "org/big", "choices": [choice]},
    "batch": lambda choice: {"custom_id": "1", "response": {"body": {"model": "org/big", "choices": [choice]}}},
}


def taken(made: Made, folder: Path, found: list[dict[str, Any]], frame: str = "choice", **given: Any) -> Path:
    """Files taken from responses."""
    folder.mkdir()
    (folder / "r.jsonl").write_text("".join(json.dumps(FRAMES[frame](choice)) + "\n" for choice in found))
    given = {"student": made.student, "from_vllm": folder / "r.jsonl", "top_k": 8, **GIVEN, **given}
    aprfmt.teacher(None, made.text, folder / "out", **given)
    return folder / "out"


@pytest.mark.parametrize("frame", FRAMES)
def test_what_vllm_says_teaches_what_our_files_of_the_same_numbers_do(
    made: Made, distil: Run, tmp_path: Path, answered: tuple[Path, list[dict[str, Any]]], frame: str
) -> None:
    folder = taken(made, tmp_path / "taken", answered[1], frame)
    distil("ours", made.files, top_k=8, temperature=1.0)
    distil("theirs", folder, temperature=1.0)
    assert close(losses(tmp_path / "theirs"), losses(tmp_path / "ours"), 5e-3)
    name = TeacherFiles(folder).facts.teacher
    assert name == ("r.jsonl" if frame == "choice" else "org/big")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found[5:], "no response to its"),
        (lambda found: [{**found[0], "prompt_logprobs": found[0]["prompt_logprobs"][1:]}, *found[1:]], "line 1 is not"),
        (lambda found: [{"prompt_token_ids": [1, 2]}], "prompt_logprobs"),
        (lambda found: [{**c, "prompt_logprobs": [None] * len(c["prompt_token_ids"])} for c in found], "its token"),
        (
            lambda found: [
                {**c, "prompt_logprobs": [p and {i: {"logprob": -0.1} for i in p} for p in c["prompt_logprobs"]]}
                for c in found
            ],
            "add up to",
        ),
    ],
)
def test_responses_that_do_not_fit_are_refused(
    made: Made, tmp_path: Path, answered: tuple[Path, list[dict[str, Any]]],
    change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], message: str,
) -> None:  # fmt: skip
    with pytest.raises(AprError, match=message):
        taken(made, tmp_path / "taken", change(answered[1]))


def test_the_others_keep_some_mass_where_rounding_leaves_none(
    made: Made, answered: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Eight rounded probabilities can add up to 1; a residual mass of 0 would make reverse KL a matter of 1e-38."""
    found = copy.deepcopy(answered[1])
    for choice in found:
        for told in choice["prompt_logprobs"][1:]:
            for entry in told.values():
                entry["logprob"] = -math.log(8)
    folder = taken(made, tmp_path / "a", found)
    rest = np.concatenate([load_file(path)["rest"] for path in folder.glob("*.safetensors")])
    assert (rest > 0).all()
    assert rest.max() < 1e-6


def test_more_ids_than_vllm_was_asked_for_are_refused(
    made: Made, tmp_path: Path, answered: tuple[Path, list[dict[str, Any]]]
) -> None:
    with pytest.raises(AprError, match="--top-k requires 12") as caught:
        taken(made, tmp_path / "taken", answered[1], top_k=12)
    assert "--top-k" in str(caught.value.hint)


# --- what a run refuses ---


def damage(path: Path, name: str, change: Callable[[Any], None]) -> None:
    """Rewrites a file with other values, and checksums that fit them."""
    from aprfmt.io.crc import crc32_of

    tensors = load_file(path)
    change(tensors[name])
    with safe_open(path, "np") as opened:
        metadata = opened.metadata()
    ends = np.cumsum(tensors["counts"])
    columns = [tensors[each] for each in ("positions", "ids", "ids_high", "logprobs", "rest", "label_logprobs")]
    for i, end in enumerate(ends):
        rows = slice(end - tensors["counts"][i], end)
        tensors["sums"][i] = crc32_of(*(column[rows].tobytes() for column in columns))
    save_file(tensors, path, metadata)


def _all(value: float) -> Callable[[Any], None]:
    return lambda values: values.fill(value)


def _add_1(ids: Any) -> None:
    ids += 1


def _wider(folder: Path) -> None:
    """The files claim a vocabulary of 400 ids, and have 300."""
    _each(folder, lambda path: _restate(path, n_ids="400"))
    damage(_train(folder), "ids", _add_1)


def _move(positions: Any) -> None:
    """The last position of each sequence that is padded goes into the padding, where no label is."""
    last = np.flatnonzero(np.diff(positions, append=0) <= 0)
    padded = last[positions[last] < 31]
    assert len(padded)
    positions[padded] += 1


def _first_rises(rest: Any) -> None:
    """At the second temperature others have some mass, at higher ones none."""
    rest[:, 1] = 0.5


def _halve(path: Path) -> None:
    """Keeps every other row, and says so."""
    tensors = load_file(path)
    kept = np.concatenate([np.arange(n) % 2 == 0 for n in tensors["counts"]])
    for name in ("positions", "ids", "ids_high", "logprobs", "rest", "label_logprobs"):
        tensors[name] = tensors[name][kept]
    tensors["counts"] = -(-tensors["counts"] // 2)
    with safe_open(path, "np") as opened:
        metadata = opened.metadata()
    save_file(tensors, path, metadata)
    damage(path, "counts", lambda values: None)


def _train(folder: Path) -> Path:
    return next(folder.glob("train-*"))


def _each(folder: Path, change: Callable[[Path], None]) -> None:
    for path in folder.glob("*.safetensors"):
        change(path)


Break = Callable[[Path], object]
REFUSED: dict[str, tuple[Break, dict[str, str], int, str, str]] = {
    "no files": (lambda f: _each(f, os.unlink), {}, 3, "no teacher files", "apr teacher"),
    "no folder": (shutil.rmtree, {}, 3, "no teacher files", "apr teacher"),
    "no held-out files": (lambda f: os.unlink(next(f.glob("held*"))), {}, 5, "held_out-00001-of-00001", "to resume"),
    "a missing file": (lambda f: _train(f).rename(f / "train-00002-of-00002.safetensors"), {}, 5,
        "train-00001-of-00002.safetensors is missing", "to resume"),
    "half a file": (lambda f: os.truncate(_train(f), _train(f).stat().st_size // 2), {}, 4, "is cut short", ""),
    "another tokenizer": (lambda f: _each(f, lambda p: _restate(p, tokenizer="0" * 64)), {}, 5,
        "a different tokenizer", "--student"),
    "files of two teachers": (lambda f: _restate(_train(f), teacher="other"), {}, 5, "teacher or text differs", ""),
    "another length": (lambda f: None, {"--seq-len": "16", "--tokens-per-step": "64"}, 5, "of 32 tokens, not 16",
        "--seq-len 32"),
    "another text": (lambda f: None, {"--data": "OTHER"}, 5, "sequence 0 of the training data", "--data"),
    "another split": (lambda f: None, {"--held-out": "0.3"}, 5, "data is not in the teacher files", "--held-out"),
    "more ids than there are": (lambda f: None, {"--top-k": "301"}, 5, "store 300 ids per position", "--top-k"),
    "another temperature": (lambda f: None, {"--temperature": "2.5"}, 5, "temperature 1, 2, 3, 4, not at 2.5",
        "--temperature 2, or apr teacher --temperature 2.5"),
    "NaN": (lambda f: damage(_train(f), "rest", _all(np.nan)), {}, 4, "non-finite", "delete the file"),
    "too much mass": (lambda f: damage(_train(f), "rest", _all(1)), {}, 4, "add up to 2", "delete the file"),
    "a negative mass": (lambda f: damage(_train(f), "rest", _all(-1e-2)), {}, 4, "add up to", "delete the file"),
    "a mass that falls": (lambda f: damage(_train(f), "rest", _first_rises), {}, 4, "mass decrease", "delete the file"),
    "ids twice": (lambda f: damage(_train(f), "ids", _all(7)), {}, 4, "duplicate token id", "delete the file"),
    "no such id": (lambda f: damage(_train(f), "ids", _add_1), {}, 4, "id is not below 300", "delete the file"),
    "an id that the student lacks": (_wider, {}, 5, "id 300", ""),
    "positions that go back": (lambda f: damage(_train(f), "positions", _all(3)), {}, 4, "do not ascend", "delete the"),
    "half of the positions": (lambda f: _halve(_train(f)), {}, 4, "do not match the labels", "delete the file"),
    "other positions": (
        lambda f: damage(next(f.glob("held_out-*")), "positions", _move), {}, 8, "do not match the", "delete the"),
    "a label above all": (lambda f: damage(_train(f), "label_logprobs", _all(1)), {}, 4, "is above 0", "delete the"),
    "a name that claims a billion": (
        lambda f: _train(f).rename(f / "train-00001-of-999999999.safetensors"), {}, 5, "train-00002-of-99", "resume"),
    "a residency": (lambda f: None, {"--teacher-residency": "fp8"}, 2, "--teacher-residency needs a loaded teacher",
        "leave out --"),
    "a policy": (lambda f: None, {"--vocab-policy": "renormalise"}, 2, "--vocab-policy needs", "leave out --"),
    "both": (lambda f: None, {"": "TEACHER"}, 2, "not both", "keep one"),
    "no student": (lambda f: None, {"--student": "", "--student-init": "layers:1"}, 2, "needs the teacher model",
        "apr prune"),
}  # fmt: skip


def _restate(path: Path, **change: str) -> None:
    with safe_open(path, "np") as opened:
        metadata = opened.metadata()
    save_file(load_file(path), path, {**metadata, **change})


@pytest.mark.turns
@pytest.mark.parametrize("name", REFUSED)
def test_files_that_do_not_fit_are_refused_by_name(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spoil, change, code, message, hint = REFUSED[name]
    shutil.copytree(made.files, tmp_path / "files")
    spoil(tmp_path / "files")
    other = train_runs.write_corpus(tmp_path / "other.jsonl", documents=30, seed=9)
    named = {"OTHER": str(other), "TEACHER": str(made.teacher)}
    given = {
        "--teacher-logprobs": str(tmp_path / "files"), "--student": str(made.student), "--data": str(made.text),
        "-o": str(tmp_path / "run"), "--steps": "2", "--device": "cpu", "--seq-len": "32", "--tokens-per-step": "128",
        "--micro-tokens": "64", "--held-out": "0.1", "--temperature": "2", **change,
    }  # fmt: skip
    words = [word for key, value in given.items() if key and value for word in (key, named.get(value, value))]
    words += [named[given[""]]] if "" in given else []
    assert apr(["distill", *words, "--repeat", "--json"]) == code
    error = json.loads(capsys.readouterr().out)["error"]
    assert message in error["message"]
    assert hint in (error["hint"] or "")
    assert not (tmp_path / "run/model.apr").exists()


def test_neither_the_files_nor_the_tokens_are_taken_for_a_model(made: Made) -> None:
    with pytest.raises(UnknownFormatError, match="teacher log-probabilities") as said:
        aprfmt.open(made.files)
    assert f"--teacher-logprobs {made.files}" in str(said.value.hint)
    with pytest.raises(UnknownFormatError, match="token shards are data"):
        aprfmt.open(made.files / "tokens")


def test_a_student_whose_routers_have_a_selection_bias_is_refused(
    made: Made, distil: Run, tmp_path: Path, smollm2_gguf: Path
) -> None:
    pytest.importorskip("transformers")
    student = Maker(tmp_path / "models")("deepseek_v3").folder
    with pytest.raises(AprError, match="supported as a teacher only"):
        distil("run", made.files, student=str(student))


def test_a_teacher_that_is_weaker_than_its_student_is_refused(made: Made, distil: Run, tmp_path: Path) -> None:
    aprfmt.teacher(made.student, made.text, tmp_path / "weak", top_k=8, device="cpu", **GIVEN)
    with pytest.raises(AprError, match="no better than the student"):
        distil("run", tmp_path / "weak", student=str(made.teacher))


def test_the_plan_names_the_files(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["distill", "--teacher-logprobs", str(made.files), "--student", str(made.student), "--data", str(made.text)]
    assert apr([*words, "-o", "run", "--steps", "1", "--seq-len", "32", "--plan", "--device", "cpu"]) == 0
    assert f"{made.teacher.name}, top 300 tokens per position" in capsys.readouterr().out


def test_top_k_alone_means_nothing(made: Made, tmp_path: Path) -> None:
    given = {"teacher": str(made.teacher), "student": str(made.student), "data": str(made.text), "top_k": 4, "steps": 2}
    with pytest.raises(AprError, match="--top-k needs --teacher-logprobs"):
        build("distill", {**given, "output": str(tmp_path / "run")})


def test_no_bit_of_the_files_turns_over_unnoticed(made: Made, tmp_path: Path) -> None:
    aprfmt.teacher(made.teacher, made.text, tmp_path / "files", top_k=4, device="cpu", **GIVEN)
    names = sorted((tmp_path / "files").glob("*.safetensors"))
    untouched = TeacherFiles(tmp_path / "files")
    wanted = {window: untouched._places[window][0].read(untouched._places[window][1]) for window in untouched._places}
    for path, bit in draw(names, int(os.environ.get("APR_FLIPS", "60"))):
        with flipped(path, bit):
            try:
                found = TeacherFiles(tmp_path / "files")
                assert found.facts == untouched.facts
                assert set(found._places) == set(wanted)
                for window in wanted:
                    found._places[window][0].read(found._places[window][1])
            except (AprError, AssertionError):
                continue
            raise AssertionError(f"bit {bit} of {path.name} turned over unnoticed")


# --- the command ---


def test_the_command_says_what_it_did(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["teacher", str(made.teacher), "--data", str(made.text), "-o", str(tmp_path / "out"), "--top-k", "4"]
    words += ["--seq-len", "32", "--held-out", "0.1", "--device", "cpu", "--temperature", "2"]
    assert apr([*words, "--plan", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["schema"] == "apr.teacher/1"
    assert not (tmp_path / "out").exists()
    assert apr([*words, "--json"]) == 0
    said = capsys.readouterr()
    assert re.search(r"residual mass outside the top 4 tokens: .*\d+% at temperature 2", said.err)
    body = json.loads(said.out)
    assert (body["top_k"], body["temperatures"], body["files"], body["resumed"]) == (4, [1, 2], 2, 0)
    assert body["windows"]["train"] > 10
    assert body["tokens"] == sum(load_file(path)["counts"].sum() for path in (tmp_path / "out").glob("*.safetensors"))
    assert 0 < body["rest"]["1"] < body["rest"]["2"] < 1
    assert body["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert apr(words) == 0
    assert "2 of 2 files already complete" in capsys.readouterr().out
    assert apr([*words, "--top-k", "8", "--json"]) == 5
    assert "--top-k was 4, is 8" in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "the teacher is missing"),
        (["TEACHER", "--from-vllm", "r.jsonl"], 2, "replaces the teacher"),
        (["TEACHER", "--engine", "magic"], 2, "unknown engine"),
        (["TEACHER", "--engine", "llama", "--device", "cpu"], 2, "--device applies to torch"),
        (["TEACHER", "--engine", "torch", "--threads", "2"], 2, "apply to llama.cpp"),
        (["TEACHER", "--device", "cpu", "--gpu-layers", "2"], 2, "apply to llama.cpp"),
        (["--student", "STUDENT", "--prompts", "p.jsonl", "--from-vllm", "r.jsonl"], 2, "write the prompts first"),
        (["--student", "STUDENT", "--prompts", "p.jsonl", "--device", "cpu"], 2, "--device has no effect"),
        (["--student", "STUDENT", "--from-vllm", "r.jsonl", "--threads", "2"], 2, "--threads has no effect"),
        (["TEACHER", "--top-k", "301", "--device", "cpu"], 2, "more than the 300 tokens"),
        (["TEACHER", "--temperature", "0", "--device", "cpu"], 2, "between 0.05 and 100"),
        (["TEACHER", "--seq-len", "99999", "--device", "cpu"], 5, "context length"),
        (["--student", "STUDENT", "--from-vllm", "absent.jsonl"], 3, "response file not found"),
        (["--from-vllm", "absent.jsonl"], 2, "no model given"),
    ],
)
def test_what_the_command_refuses(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    given = [{"TEACHER": str(made.teacher), "STUDENT": str(made.student)}.get(word, word) for word in words]
    assert apr(["teacher", *given, "--data", str(made.text), "-o", str(tmp_path / "out"), "--json"]) == code
    assert message in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_mixture_is_said_for_as_a_run_reads_it(made: Made, tmp_path: Path, distil: Run) -> None:
    lines = [json.loads(line)["text"] for line in made.text.read_text().splitlines()]
    for name, some in (("a", lines[:25]), ("b", lines[25:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in some) + "null\n")
    data = [f"{tmp_path}/a.jsonl:0.7", f"{tmp_path}/b.jsonl:0.3"]
    words = ["teacher", str(made.teacher), "-o", str(tmp_path / "out"), "--seq-len", "32", "--held-out", "0.1"]
    words += ["--device", "cpu", "--text-field", "body", *(word for each in data for word in ("--data", each))]
    assert apr([*words, "--strict"]) == 4
    assert apr(words) == 0
    header = read_header(tmp_path / "out/tokens")
    assert header is not None
    assert [source["weight"] for source in header["sources"]] == ["7/10", "3/10"]
    distil("shards", tmp_path / "out", data=(str(tmp_path / "out/tokens"),))
    distil("files", tmp_path / "out", data=tuple(data), text_field="body")
    assert close(losses(tmp_path / "shards"), losses(tmp_path / "files"), 0)


def test_a_folder_of_other_things_is_left_alone(made: Made, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(AprError, match=r"notes\.txt"):
        aprfmt.teacher(made.teacher, made.text, tmp_path, device="cpu", **GIVEN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_a_teacher_that_computes_nothing_writes_nothing(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aprtrain.teach.soft_cap", lambda x, cap: torch.full_like(x, torch.nan))
    with pytest.raises(AprError, match="not finite") as caught:
        aprfmt.teacher(made.teacher, made.text, tmp_path / "out", device="cpu", **GIVEN)
    assert caught.value.exit_code == 8
    assert not [*(tmp_path / "out").glob("*.safetensors")]


def test_a_tokenizer_is_the_same_in_every_container(tmp_path: Path) -> None:
    """A folder's tokenizer.json also says what to put around a text; an .apr of it does not, and reads the same ids."""
    folder = tmp_path / "hf"
    demo_model.build(tmp_path / "m.gguf")
    aprfmt.export_model(tmp_path / "m.gguf", folder, format="hf")
    path = folder / "tokenizer.json"
    parts = json.loads(path.read_text())
    single = [{"Sequence": {"id": "A", "type_id": 0}}]
    around = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
    path.write_text(json.dumps({**parts, "post_processor": around}))
    aprfmt.convert_model(folder, tmp_path / "m.apr")
    digests = set()
    for name in ("m.gguf", "hf", "m.apr"):
        with aprfmt.open(tmp_path / name) as model:
            digests.add(Encoder(model.tokenizer).digest)
    assert len(digests) == 1
