"""Hidden states read from the cache are bitwise those computed; damaged or missing ones are computed again."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from torch import Tensor
from train_blocks import resident_bytes
from train_runs import lines, weights
from train_worlds import together

import aprfmt
from aprfmt.errors import AprError, RunError, StorageError
from aprtrain.budget import Row, memory_plan
from aprtrain.loss.vocab import Vocabulary
from aprtrain.network.weights import open_network
from aprtrain.teacher.cache import Store
from aprtrain.teacher.teacher import Teacher, estimate_bytes

Distil = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So little text that ten steps read it more than twice."""
    return train_runs.write_corpus(tmp_path_factory.mktemp("small") / "small.jsonl", documents=7, words=40)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every batch that a teacher computed."""
    found: list[int] = []
    honest = Teacher.hidden

    def counted(self: Teacher, tokens_NT: Tensor, documents: Any = None) -> Tensor:
        found.append(len(tokens_NT))
        return honest(self, tokens_NT, documents)

    monkeypatch.setattr(Teacher, "hidden", counted)
    return found


@pytest.fixture
def kept(distil: Distil, small_corpus: Path, tmp_path: Path) -> Distil:
    """Ten steps on the small corpus with the answers in tmp_path / "kept"."""

    def start(to: str, **given: Any) -> dict[str, Any]:
        how = {"teacher_cache": str(tmp_path / "kept"), "steps": 10, "data": small_corpus, "save_every": 0}
        return distil(to, **(how | given))

    return start


def numbers(folder: Path) -> list[list[Any]]:
    names = ("loss", "ce", "kl", "kl1", "agreement", "grad_norm")
    steps = [[line[name] for name in names] for line in lines(folder)]
    return steps + [[line["ce"], line["kl"], line["teacher_ce"]] for line in lines(folder, "evaluation")]


def same(tmp_path: Path, a: str, b: str) -> bool:
    one, two = tmp_path / a, tmp_path / b
    return numbers(one) == numbers(two) and weights(one / "model.apr") == weights(two / "model.apr")


def folders(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kept").iterdir())


# --- runs ---


@pytest.mark.parametrize("residency", ["bf16", "q4k"])
def test_a_run_that_reads_its_answers_has_the_numbers_of_one_that_computes_them(
    kept: Distil, tmp_path: Path, teacher_file: Path, calls: list[int], residency: str
) -> None:
    given: dict[str, Any] = {"teacher_residency": residency}
    if residency == "q4k":
        aprfmt.export_model(teacher_file, tmp_path / "t.gguf", dtype="q8_0")
        given["teacher"] = str(tmp_path / "t.gguf")
    kept("plain", **given, teacher_cache=None)
    all_of_them = sum(calls)
    calls.clear()
    said = io.StringIO()
    kept("filling", **given, stream=said)
    assert 0 < sum(calls) < 0.7 * all_of_them, "what came a second time was read"
    assert "0 of " in said.getvalue()
    calls.clear()
    said = io.StringIO()
    kept("reading", **given, stream=said)
    assert calls == []
    assert "only its head is loaded" in said.getvalue()
    assert same(tmp_path, "plain", "filling")
    assert same(tmp_path, "plain", "reading")
    first, last = lines(tmp_path / "filling")[0], lines(tmp_path / "reading")[-1]
    assert last["teacher_tflops"] / last["tokens_per_s"] < 0.9 * first["teacher_tflops"] / first["tokens_per_s"]


@pytest.mark.parametrize(
    "change", [{"temperature": 1.0}, {"loss": "jsd", "kd_weight": 0.4}, {"student_init": "layers:1,"}, {"seed": 5}]
)
def test_another_run_on_the_same_text_reads_them_too(
    kept: Distil, tmp_path: Path, calls: list[int], change: dict[str, Any]
) -> None:
    kept("filling", steps=12)
    calls.clear()
    kept("reading", **change)
    assert calls == []
    kept("plain", **change, teacher_cache=None)
    assert same(tmp_path, "plain", "reading")


def test_a_resumed_run_reads_what_it_computed(kept: Distil, tmp_path: Path, calls: list[int]) -> None:
    kept("plain", total_steps=10, teacher_cache=None)
    kept("parts", steps=8, total_steps=10)
    calls.clear()
    kept("parts", steps=10, total_steps=10, resume=True)
    assert calls == []
    assert weights(tmp_path / "plain/model.apr") == weights(tmp_path / "parts/model.apr")


def test_a_run_reads_ahead_and_each_batch_once(kept: Distil, begun: list[tuple[int, ...]]) -> None:
    kept("filling", eval_tokens=64)
    begun.clear()
    kept("reading", eval_tokens=64)
    assert len(begun) == 2 * 10 + 2 + 2, "micro-batches, two beyond the last, two evaluations"


def test_other_answers_have_another_folder(kept: Distil, tmp_path: Path, teacher_file: Path, calls: list[int]) -> None:
    kept("one", steps=1)
    (first,) = folders(tmp_path)
    with aprfmt.open(teacher_file) as model:
        tensor = model.tensors["model.embed_tokens.weight"]
        middle = tensor.offset + tensor.n_bytes // 2
    changed = bytearray(teacher_file.read_bytes())
    changed[middle] ^= 1  # one bit of one weight; the checksum at the end is not looked at
    (tmp_path / "changed.apr").write_bytes(changed)
    other = train_runs.write_corpus(tmp_path / "other.jsonl", documents=12, seed=9)
    changes: list[dict[str, Any]] = [{"teacher": str(tmp_path / "changed.apr")}, {"seq_len": 16}, {"data": other}]
    for n, change in enumerate(changes, 2):
        calls.clear()
        kept(f"change-{n}", steps=1, **change)
        assert len(folders(tmp_path)) == n, change
        assert calls
    about = json.loads((first / "about.json").read_text())
    assert about["seq_len"] == 32
    assert str(tmp_path) not in json.dumps(about)


def test_the_memory_planned_for_a_run_that_reads_has_no_trunk(
    kept: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[tuple[bool, int]] = []

    def spied(*args: Any, backbone: bool, **options: Any) -> Any:
        rows = memory_plan(*args, backbone=backbone, **options)
        planned.append((backbone, sum(row.n_bytes for row in rows if row.name.startswith("teacher"))))
        return rows

    monkeypatch.setattr("aprtrain.run.memory_plan", spied)
    kept("filling")
    kept("reading")
    (one, whole), (two, head) = planned
    assert (one, two) == (True, False)
    assert head < 0.7 * whole


def test_two_processes_fill_the_files_that_one_reads(kept: Distil, tmp_path: Path, calls: list[int]) -> None:
    together(lambda rank: kept("two"))
    kept("reading")
    assert calls == []
    kept("plain", teacher_cache=None)
    assert same(tmp_path, "plain", "reading")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("residency", ["bf16", "q4k"])
def test_a_gpu_reads_what_it_computed(
    kept: Distil, tmp_path: Path, teacher_file: Path, calls: list[int], residency: str
) -> None:
    aprfmt.export_model(teacher_file, tmp_path / "t.gguf", dtype="q8_0")
    given: dict[str, Any] = {"teacher": str(tmp_path / "t.gguf"), "teacher_residency": residency}
    given |= {"device": "cuda", "compile": "off"}
    kept("plain", **given, teacher_cache=None)
    kept("filling", **given)
    calls.clear()
    kept("reading", **given)
    assert calls == []
    assert same(tmp_path, "plain", "filling")
    assert same(tmp_path, "plain", "reading")


@pytest.mark.parametrize("residency", ["bf16", "q4k"])
def test_a_head_alone_is_the_head_of_the_whole_teacher(teacher_file: Path, tmp_path: Path, residency: str) -> None:
    aprfmt.export_model(teacher_file, tmp_path / "t.gguf", dtype="q8_0")
    with open_network(tmp_path / "t.gguf") as network:
        vocabulary = Vocabulary(300, 300, 300)
        whole = Teacher(network, vocabulary, residency, "cpu")
        head = Teacher(network, vocabulary, residency, "cpu", backbone=False)
        assert (
            resident_bytes(head.decoder)
            == estimate_bytes(network, residency, backbone=False)
            < resident_bytes(whole.decoder)
        )
    assert torch.equal(head.head_weight, whole.head_weight)
    assert not head.has_backbone


# --- damage ---


def test_damaged_answers_are_computed_again_with_a_word(kept: Distil, tmp_path: Path, calls: list[int]) -> None:
    kept("filling")
    (folder,) = folders(tmp_path)
    with open(folder / "train.states", "r+b") as file:
        file.seek(3 * 32 * 64 * 4 + 1000)  # of window 3
        file.write(b"\xff")
    before = (folder / "train.sums").read_bytes()
    calls.clear()
    said = io.StringIO()
    kept("reading", stream=said)
    assert same(tmp_path, "filling", "reading")
    assert len(calls) == 1, "once, and it is kept again"
    assert "hidden states of window 3 are damaged" in said.getvalue()
    assert (folder / "train.sums").read_bytes() == before


def test_a_teacher_that_is_loaded_after_all_is_planned(
    kept: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, backbones = list[list[Row]](), list[bool]()

    def planned(*args: Any, backbone: bool = True, **options: Any) -> list[Row]:
        backbones.append(backbone)
        plans.append([Row("all", 9 if backbone else 1)])
        return plans[-1]

    kept("filling")
    (folder,) = folders(tmp_path)
    with open(folder / "held_out.states", "r+b") as file:
        file.write(b"\xff" * 99)
    monkeypatch.setattr("aprtrain.run.memory_plan", planned)
    kept("reading")
    assert backbones == [False, True]
    assert plans[0] == [Row("all", 9)], "what the peak of memory is held against"


@pytest.mark.parametrize("what", ["cut", "gone", "sums gone", "held-out"])
def test_files_that_are_cut_or_gone_are_made_again(kept: Distil, tmp_path: Path, calls: list[int], what: str) -> None:
    kept("filling")
    n = sum(calls)
    calls.clear()
    (folder,) = folders(tmp_path)
    if what == "cut":
        os.truncate(folder / "train.states", 5 * 32 * 64 * 4)
    else:
        name = {"gone": "train.states", "sums gone": "train.sums", "held-out": "held_out.states"}[what]
        (folder / name).unlink()
    said = io.StringIO()
    kept("reading", stream=said)
    assert same(tmp_path, "filling", "reading")
    assert 0 < sum(calls) <= n
    assert ("was cut off" in said.getvalue()) is (what != "sums gone")


def test_answers_that_are_not_finite_are_not_kept(
    kept: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the device must not meet every run that reads them."""
    honest, n = Teacher.hidden, 0

    def faulty(self: Teacher, *args: Any) -> Tensor:
        nonlocal n
        n += 1
        return honest(self, *args) * (float("nan") if n == 4 else 1)

    with monkeypatch.context() as patch:
        patch.setattr(Teacher, "hidden", faulty)
        with pytest.raises(RunError, match="not finite"):
            kept("faulty")
    kept("reading")
    kept("plain", teacher_cache=None)
    assert same(tmp_path, "plain", "reading")


def test_a_disk_that_fills_on_the_way_does_not_end_the_run(
    kept: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept("plain", teacher_cache=None)
    honest, written = Store.write, list[int]()

    def full(self: Store, window: int, states_TD: Tensor) -> None:
        if len(written) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(window)
        honest(self, window, states_TD)

    monkeypatch.setattr(Store, "write", full)
    said = io.StringIO()
    kept("filling", stream=said)
    assert same(tmp_path, "plain", "filling")
    assert len(written) == 5
    assert "No space left on device; the training continues" in said.getvalue()


def test_too_small_a_disk_is_refused_before_the_first_step(
    kept: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Usage = namedtuple("Usage", "total used free")
    free, honest = 50_000, shutil.disk_usage

    def small(path: Any) -> Any:
        return Usage(10**6, 0, free) if "kept" in str(path) else honest(path)

    monkeypatch.setattr("shutil.disk_usage", small)
    with pytest.raises(StorageError, match=r"takes up to 0\.000\d+ GB more, 5e-05 GB are free") as caught:
        kept("run")
    assert caught.value.exit_code == 7
    assert not (tmp_path / "run/metrics.jsonl").exists()
    free = 10**9
    kept("filling")
    free = 0
    kept("reading")  # adds nothing


def test_a_folder_that_cannot_be_one_is_refused_before_the_text_is_read(
    kept: Distil, tmp_path: Path, small_corpus: Path
) -> None:
    for path in (small_corpus, small_corpus / "below"):
        with pytest.raises(AprError) as caught:
            kept("run", teacher_cache=str(path))
        assert caught.value.path == str(path)
        assert caught.value.exit_code in (3, 7)
        assert not (tmp_path / "run/tokens").exists()


def test_a_smoke_run_writes_nothing_and_reads_what_there_is(kept: Distil, tmp_path: Path, calls: list[int]) -> None:
    kept("run", smoke=2)
    assert not (tmp_path / "kept").exists()
    kept("filling")
    (folder,) = folders(tmp_path)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    calls.clear()
    kept("run", smoke=2)
    assert calls == []
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()} == before
