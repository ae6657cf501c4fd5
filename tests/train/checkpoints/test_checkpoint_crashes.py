"""A power cut at any moment of a save leaves a `latest` whose files are whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import demo_model
import pytest
import torch
import train_runs
from crashes import Contents, Judge, contents, crash
from publications import WAYS, left_out
from train_runs import identity_of

from aprtrain.checkpoints.checkpoint import BEST, LATEST, Saver, Snapshot, read_pointer, step_name
from aprtrain.network.weights import load_decoder, open_network

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="publishes as Linux does")

ALL = os.environ.get("APR_CRASHES") == "all"


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Saver, list[Snapshot]]:
    path = tmp_path_factory.mktemp("demo") / "demo.gguf"
    demo_model.build(path)
    folder = path.parent / "run"
    folder.mkdir()
    with open_network(path) as network:
        weights = train_runs.snapshot(load_decoder(network).hf_tensors(), "bf16")
        saver = Saver(folder, identity_of(network), 1, pytest.fail)
    facts = [{"step": step} for step in (1, 2, 3)]
    return saver, [
        Snapshot(i, weights, fact, {"master": torch.full((99,), float(i))}, fact, is_best=i == 1)
        for i, fact in enumerate(facts, 1)
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("without", ["", "file", "folder"])
def test_a_power_cut_leaves_a_latest_that_is_whole(
    way: str, without: str, snapshots: tuple[Saver, list[Snapshot]]
) -> None:
    """Without either sync it does not."""
    saver, (first, second, third) = snapshots
    for path in saver.folder.iterdir():
        path.unlink()
    (saver.folder / "notes").write_text("mine")
    saver._save(first)
    known = [contents(saver.folder)]

    def save() -> None:
        for snapshot in (second, third):
            with left_out(without):
                saver._save(snapshot)
            known.append({str(path.relative_to(saver.folder)): path.read_bytes() for path in saver.folder.iterdir()})

    def judge(old: Contents, new: Contents) -> Judge:
        def found_wrong(found: Contents, is_recovered: bool) -> Iterator[str]:
            torn = [name for name, data in found.items() if data not in [state.get(name) for state in known]]
            if torn:
                yield f"{torn} are torn"
                return
            for pointer in (LATEST, BEST):
                step = _step(found.get(pointer, b""), saver.folder.with_name("pointer"), pointer)
                for suffix in ("apr", "state"):
                    if f"{step_name(step)}.{suffix}" not in found:
                        yield f"{pointer} names step {step}, whose {suffix} is not there"
            if old == new and found.get(LATEST) != new[LATEST]:
                yield "the last save is lost"
            if found.get("notes") != b"mine":
                yield "notes are lost"

        return found_wrong

    found = crash(
        save, saver.folder, way, most=2000 if ALL else 24, exhaustive=500 if ALL else 8, seed=way, judge=judge,
        until_fault=bool(without),
    )  # fmt: skip
    assert bool(found.faults) == bool(without), found.faults
    assert found.count


def _step(data: bytes, folder: Path, pointer: str) -> int:
    folder.mkdir(exist_ok=True)
    (folder / pointer).write_bytes(data)
    return read_pointer(folder, pointer) or 0
