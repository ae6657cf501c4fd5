"""A checkpoint whose writing or reading fails, or whose process is killed, at every call to the operating system.

`APR_FAULTS=all` fails every single call instead of the first and the last of each place.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from train_children import forked

from aprfmt.errors import AprError
from aprfmt.texts.shards import open_corpus, read_header
from aprtrain.checkpoints import checkpoint
from aprtrain.checkpoints.checkpoint import BEST, LATEST, Saver, Snapshot, lock_folder, read_pointer
from aprtrain.network.weights import open_network
from aprtrain.resume import Saved, find_checkpoint
from aprtrain.run import run
from aprtrain.world import World
from faults import Faults, intercepted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks up descriptors under /proc")

EVERY = os.environ.get("APR_FAULTS") == "all"
ALONE = World(torch.device("cpu"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path, teacher_file: Path) -> tuple[Path, Path]:
    """The folder of a run with checkpoints of steps 1 to 3, and the folder in which tests have copies of it."""
    root = tmp_path_factory.mktemp("faults")
    how = {"teacher": str(teacher_file), "student_init": "layers:0,", "repeat": True, "lr": 3e-3}
    config = train_runs.options("distill", corpus_file, root / "run", steps=3, total_steps=9, save_every=1, **how)
    run("distill", config, stream=None)
    (root / "run/model.apr").unlink()
    (root / "copies").mkdir()
    return root / "run", root / "copies"


def copy_of(folders: tuple[Path, Path]) -> Path:
    folder = folders[1] / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(folders[0], folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def saver_and_next(folder: Path) -> tuple[Saver, Snapshot]:
    """What writes into a folder, and a snapshot of step 4 for it, which is the best."""
    state, facts = train_runs.load_state(folder / "ckpt-step-000003.state")
    facts = facts | {"progress": facts["progress"] | {"step": 4}}
    with open_network(folder / "ckpt-step-000003.apr") as network:
        assert network.model is not None
        weights = train_runs.snapshot({n: t.torch() for n, t in network.model.tensors.items()}, "f32")
        progress = facts["progress"]
        lineage = {"step": 4, "tokens": progress["tokens"], "config_digest": facts["digest"]}
        saver = Saver(folder, train_runs.identity_of(network), 2, lambda line: None)
        return saver, Snapshot(4, weights, lineage, state, facts, is_best=True)


def resumed(folder: Path) -> Saved:
    """All that is read of a folder before a run goes on."""
    with lock_folder(folder):
        checkpoint.prepare_folder(folder, resumes=True)
        saved = find_checkpoint(folder, True, ALONE)
        header = read_header(folder / "tokens")
        assert header is not None
        open_corpus(folder / "tokens", header["tokenizer"])
        return saved


def assert_whole(folder: Path, where: str) -> int:
    """Whether the next run finds a whole checkpoint and nothing half-written; its step."""
    saved = resumed(folder)
    assert not saved.damaged, where
    assert not saved.notes, where
    left = [path.name for path in folder.rglob("*") if path.name.endswith(".tmp")]
    assert left == [], where
    return saved.step


@pytest.mark.parametrize("stays", [False, True], ids=["once", "stays"])
def test_a_fault_while_a_checkpoint_is_written(
    folders: tuple[Path, Path], stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_PAUSE_S", 0.0)
    faults = Faults(folders[1])
    before = contents(folders[0])

    def attempt(number: int) -> tuple[Path, Saver]:
        folder = copy_of(folders)
        saver, snapshot = saver_and_next(folder)
        with faults.armed(number, stays=stays):
            saver.begin(snapshot)
            saver.wait()
        return folder, saver

    attempt(0)
    folder, _ = attempt(0)
    complete = contents(folder)
    points = faults.points(every=EVERY, disk=True)
    assert len(points) > 4
    for number in points:
        folder, saver = attempt(number)
        where = f"call {number}, {faults.failed}"
        step = assert_whole(folder, where)
        assert step == 4 or saver.failed, where
        found = contents(folder)
        if step == 3:
            assert found == before, where
        elif not saver.failed:
            assert {name: data for name, data in found.items() if name in complete} == complete, where
            assert read_pointer(folder, BEST) == 4, where


def test_a_fault_while_a_checkpoint_is_written_without_another_try(folders: tuple[Path, Path]) -> None:
    faults = Faults(folders[1])

    def attempt(number: int) -> tuple[Path, Exception | None]:
        folder = copy_of(folders)
        saver, snapshot = saver_and_next(folder)
        with faults.armed(number):
            try:
                saver._write(snapshot)
            except (AprError, OSError) as error:
                return folder, error
        return folder, None

    attempt(0)
    attempt(0)
    for number in faults.points(every=EVERY, disk=False):
        folder, error = attempt(number)
        where = f"call {number}, {faults.failed}: {error}"
        step = assert_whole(folder, where)
        assert step == 4 or error is not None, where
        assert read_pointer(folder, LATEST) == step, where


def test_a_fault_while_a_checkpoint_is_read(folders: tuple[Path, Path]) -> None:
    faults = Faults(folders[1])

    def attempt(number: int) -> tuple[Saved | None, AprError | None]:
        folder = copy_of(folders)
        with faults.armed(number):
            try:
                return resumed(folder), None
            except AprError as error:
                return None, error

    attempt(0)
    wanted = attempt(0)[0]
    points = faults.points(every=EVERY, disk=False)
    assert len(points) > 10
    for number in points:
        saved, error = attempt(number)
        where = f"call {number}, {faults.failed}: {error}"
        assert error is None or (error.path and error.code in ("storage", "exists")), where
        assert saved == wanted or error is not None, where
        assert contents(folders[1] / "run") == contents(folders[0]), where


def test_a_kill_at_any_call_leaves_a_whole_checkpoint(folders: tuple[Path, Path]) -> None:
    """SIGKILL before each call that changes the folder, and so after the one before it."""
    changes = ("open", "writev", "write", "fsync", "link", "rename", "replace", "unlink", "exchange")

    def attempt(number: int) -> tuple[Path, int]:
        folder = copy_of(folders)
        saver, snapshot = saver_and_next(folder)
        seen = 0

        def handle(name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
            nonlocal seen
            seen += name in changes
            if name in changes and seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call()

        def save() -> None:
            with intercepted(folders[1], handle):
                saver._write(snapshot)
            os._exit(0)

        with forked(save) as child:
            return folder, child.wait()

    number, code, steps = 0, -signal.SIGKILL, set[int]()
    while code:
        number += 1
        folder, code = attempt(number)
        assert code in (0, -signal.SIGKILL)
        steps.add(assert_whole(folder, f"killed at call {number}"))
    assert number > 20
    assert steps == {3, 4}
