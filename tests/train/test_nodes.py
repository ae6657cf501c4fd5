"""Several nodes on one machine: separate folders, and nothing but the first one's output and what gloo carries."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from train_runs import lines
from train_worlds import together

import aprfmt
from aprfmt.errors import AprError, RefusedError, StorageError
from aprfmt.io.pipe import sha256_of_range
from aprfmt.texts import shards
from aprtrain import nodes
from aprtrain.budget import plan
from aprtrain.run import run
from aprtrain.world import ReportedByFirst, World, join_world

Distil = Callable[..., dict[str, Any]]


def on_node(rank: int, each: int = 1) -> int:
    """Makes this process of `together` one of a node of `each`; gives the node's number."""
    os.environ |= {"LOCAL_RANK": str(rank % each), "LOCAL_WORLD_SIZE": str(each)}
    return rank // each


@pytest.fixture
def config(corpus_file: Path, teacher_file: Path, tmp_path: Path) -> Callable[..., Any]:
    """The options of a run on a node of which only the first has the data."""

    def options(node: int, **given: Any) -> Any:
        data = corpus_file if node == 0 else tmp_path / "absent.jsonl"
        how = {"teacher": str(teacher_file), "student_init": "layers:0,", "lr": 3e-3, "repeat": True, **given}
        return train_runs.options("distill", data, tmp_path / f"node{node}", **how)

    return options


def assert_close(a: Path, b: Path) -> None:
    with aprfmt.open(a) as one, aprfmt.open(b) as two:
        for name, tensor in one.tensors.items():
            assert torch.allclose(tensor.torch(), two.tensors[name].torch(), atol=1e-5), name


def test_two_nodes_without_a_shared_folder_train_and_resume_what_one_process_trains(
    config: Callable[..., Any], distil: Distil, tmp_path: Path
) -> None:
    distil("one", steps=8, save_every=0)
    how = {"total_steps": 8, "save_every": 2, "keep": 2}

    def work(rank: int) -> None:
        run("distill", config(on_node(rank), steps=4, **how), stream=None)

    def go_on(rank: int) -> None:
        run("distill", config(on_node(rank), steps=8, resume=True, **how), stream=None)

    together(work)
    assert [path.name for path in (tmp_path / "node1").iterdir()] == ["tokens"]
    for name in ("tokens.json", "train.bin", "held_out.docs"):
        mine, fetched = (tmp_path / f"node{n}/tokens" / name for n in (0, 1))
        assert mine.read_bytes() == fetched.read_bytes()
    before = (tmp_path / "node1/tokens/train.bin").stat()
    together(go_on)
    assert (tmp_path / "node1/tokens/train.bin").stat().st_mtime_ns == before.st_mtime_ns, "it is fetched once"
    assert [path.name for path in (tmp_path / "node1").iterdir()] == ["tokens"], "what it resumed from is gone again"
    assert_close(tmp_path / "one/model.apr", tmp_path / "node0/model.apr")
    losses = [[line["loss"] for line in lines(tmp_path / name)] for name in ("one", "node0")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_one_process_a_node_hashes_the_corpus(
    config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = sha256_of_range

    def work(rank: int) -> None:
        def counted(source: Any, *rest: Any) -> str:
            with (tmp_path / f"hashed-{rank}").open("a") as file:
                file.write(f"{source.path}\n")
            return honest(source, *rest)

        node = on_node(rank, 2)
        monkeypatch.setattr(shards, "sha256_of_range", counted)
        run("distill", config(node, steps=2), stream=None)

    together(work, size=4)
    hashed = {path.name[-1]: path.read_text().splitlines() for path in tmp_path.glob("hashed-*")}
    assert hashed.keys() == {"0", "2"}
    assert all(len(paths) == len(set(paths)) == 4 for paths in hashed.values())


def test_a_smoke_run_fetches_into_a_folder_that_is_gone_afterwards(config: Callable[..., Any], tmp_path: Path) -> None:
    together(lambda rank: run("distill", config(on_node(rank, 2), smoke=2), stream=None), size=4)
    assert not (tmp_path / "node0").exists()
    assert not (tmp_path / "node1").exists()


def test_nodes_that_share_a_folder_fetch_nothing(
    corpus_file: Path, teacher_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int, steps: int) -> None:
        def forbidden(*_: Any) -> None:
            raise AssertionError("there is nothing to fetch")

        on_node(rank)
        monkeypatch.setattr(nodes, "_transfer", forbidden)
        given: dict[str, Any] = {"teacher": str(teacher_file), "student_init": "layers:0,", "repeat": True}
        given |= {"steps": steps, "total_steps": 4, "resume": steps == 4}
        run("distill", train_runs.options("distill", corpus_file, tmp_path / "run", **given), stream=None)

    for steps in (2, 4):
        together(lambda rank, steps=steps: work(rank, steps))  # type: ignore[misc]


def test_another_model_on_another_node_is_refused(
    config: Callable[..., Any], teacher_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.apr"
    aprfmt.import_model(teacher_file, other, dtype="bf16")

    def work(rank: int) -> None:
        given = {"teacher": str(other)} if on_node(rank) else {}
        with pytest.raises(RefusedError, match="the teacher of process 1 differs") as caught:
            run("distill", config(rank, steps=2, **given), stream=None)
        assert isinstance(caught.value.__cause__, ReportedByFirst) is (rank == 1)

    together(work)


def test_a_node_that_cannot_write_ends_all(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first/a").write_bytes(bytes(1000))
    (tmp_path / "first/b").write_bytes(b"after the one that fails")

    def work(rank: int) -> None:
        on_node(rank)
        with join_world("cpu") as world:
            folder = tmp_path / "second"
            if rank == 1:
                (folder / "a").mkdir(parents=True)  # no file can have its name
            with pytest.raises(AprError) as caught:
                nodes.fetch(["a", "b"], tmp_path / "first", folder, world)
            assert isinstance(caught.value, StorageError) is (rank == 1) or caught.value.path == str(folder / "a")
            assert world.any(rank == 0), "they are still in step"

    together(work)
    assert (tmp_path / "second/b").read_bytes() == b"after the one that fails"


def test_what_differs_is_fetched_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_PIECE", 1000)
    monkeypatch.setattr(nodes, "_EDGE", 100)
    for name, data in (
        ("same", bytes(5000)),
        ("longer", os.urandom(2500)),
        ("end", bytes(4999) + b"1"),
        ("empty", b""),
    ):
        for folder in ("first", "second"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).write_bytes(data if folder == "first" or name == "same" else bytes(5000))

    def work(rank: int) -> None:
        on_node(rank)
        with join_world("cpu") as world:
            names = ["same", "longer", "end", "empty", "absent"]
            found = nodes.fetch(names, tmp_path / "first", tmp_path / "second", world)
            assert [path.name for path in found] == (["longer", "end", "empty"] if rank else [])

    together(work)
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()


def test_a_world_that_somebody_else_began_is_joined_and_left(tmp_path: Path) -> None:
    """As Ray Train's workers are."""

    def work(rank: int) -> None:
        on_node(rank)
        torch.distributed.init_process_group("gloo")
        with join_world("cpu") as world:
            assert (world.rank, world.size, world.is_one_node, world.is_local_first) == (rank, 2, False, True)
            torch.distributed.barrier()  # who leaves early breaks the other's connection
        assert torch.distributed.is_initialized()
        torch.distributed.destroy_process_group()

    together(work)


def test_one_node_needs_no_word_of_itself() -> None:
    assert World(torch.device("cpu")).is_local_first
    assert World(torch.device("cpu"), 1, 2, 1, 2).is_one_node
    assert not World(torch.device("cpu"), 2, 4, 0, 2).is_one_node
    assert json.dumps(World(torch.device("cpu")).gather(1)) == "[1]"


def test_the_plan_says_what_each_node_needs(config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan("distill", config(0, steps=4))["nodes"] is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    body = plan("distill", config(0, steps=4))
    found = body["nodes"]
    assert found is not None
    parameters = body["student"]["parameters"]
    assert (found["nodes"], found["processes_each"]) == (2, 2)
    assert found["device_bytes_each"] == 2 * body["memory_bytes"]
    assert found["bytes_between_per_step"] == (4 + 4) * parameters, (
        "float32 sums, and weights that are float32 on the CPU"
    )
    assert found["first_disk_bytes"] == 5 * (4 + 12) * parameters, "f32 weights, masters and moments, keep + 2 times"
