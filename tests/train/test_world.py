"""What one process of several meets alone: no other one waits for it, and what it met is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from train_worlds import together

from aprfmt.errors import RunError
from aprtrain.config import Config
from aprtrain.guards import Watchdog
from aprtrain.network.decoder import Decoder
from aprtrain.run import run
from aprtrain.world import join_world


def test_an_evaluation_that_fails_in_one_process_alone_does_not_keep_the_others_waiting(
    teacher_file: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def failing(self: Decoder, *args: Any) -> Any:
        nonlocal calls
        calls += not torch.is_grad_enabled()
        if calls == 3:
            raise MemoryError("as one process alone has it")
        return honest(self, *args)

    honest = Decoder.forward

    config = train_runs.options(
        "distill", corpus_file, tmp_path / "run", teacher=str(teacher_file), student_init="layers:0,", steps=2,
        repeat=True, shard="weights",
    )  # fmt: skip

    def work(rank: int) -> None:
        if rank == 1:
            monkeypatch.setattr(Decoder, "forward", failing)
        with pytest.raises(RunError, match="alone has it" if rank else "connection to the other"):
            run("distill", config, stream=None)

    together(work)


def test_a_process_that_fails_does_not_wait_for_the_others_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's communicators end together, and the others may wait for what this one will never send."""
    ended: list[str] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("aprtrain.world.device_of", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **options: None)
    monkeypatch.setattr(torch.distributed, "new_group", lambda *_, **options: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: ended.append("destroyed"))
    with join_world("cuda"):
        pass
    assert ended == ["destroyed"]
    with pytest.raises(RunError), join_world("cuda"):
        raise RunError("of one process")
    assert ended == ["destroyed"]


def test_what_broke_between_processes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(word: str) -> Any:
        raise RuntimeError("NCCL error in: a.cpp:1\nCuda failure 2 'out of memory'\n")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("aprtrain.run.join_world", broken)
    with pytest.raises(RunError, match="lost the connection to the other processes") as caught:
        run("pretrain", Config())
    assert "Cuda failure 2 'out of memory'" in str(caught.value.hint)


def test_the_second_step_may_wait_for_the_first_one_of_the_others() -> None:
    """A GPU is asked for a step and looked at in the next one: there a process meets those that still compile."""
    watchdog = Watchdog(600.0)
    limits = [watchdog.limit_s]
    for _ in range(3):
        with watchdog.step():
            pass
        limits.append(watchdog.limit_s)
    assert limits == [600, 600, 120, 120]
