"""A power cut at any moment leaves the old output or the new one, and loses nothing beside it.

A sample of the states that a disk may be in; APR_CRASHES=all tries each operation in thousands.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import writers
from crashes import Crashes, crash
from publications import WAYS, left_out
from writers import WRITERS, Place

from aprfmt.io.pipe import FileLayout, Literal, WriteOptions, write_parts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="publishes as Linux does")

ALL = os.environ.get("APR_CRASHES") == "all"
SAMPLE = {
    "export gguf": ("m.gguf",), "import gguf": (), "export parts over": ("part*",), "export parts new": (),
    "export folder over": ("hf",), "export folder new": (), "export shards over": ("apr-parts",),
    "write folder over": ("tree",), "stamp in place": ("m.apr",), "stamp a gguf in place": ("m.gguf",),
}  # fmt: skip
"""A writer of each kind: a file, parts and a folder, new and in the place of others; an edit. What is there before."""

_PARTS = ("p-00001-of-00002.gguf", "p-00002-of-00002.gguf")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("crashes")
    writers.prepare(root)
    return root


def crashed(name: str, root: Path, way: str, without: str = "") -> Crashes:
    at = Place(root / "in", root / "out")
    shutil.rmtree(at.out, ignore_errors=True)
    at.out.mkdir()
    for path in [path for pattern in SAMPLE.get(name, ("*",)) for path in (root / "old").glob(pattern)]:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, at.out / path.name)
    (at.out / "notes").write_text("mine")

    def operation() -> None:
        with left_out(without):
            WRITERS[name](at)

    most, exhaustive = (4000, 2000) if ALL else (24, 8)
    return crash(
        operation, at.out, way, most=most, exhaustive=exhaustive, seed=f"{name} {way}", until_fault=bool(without)
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRITERS if ALL else SAMPLE)
def test_a_power_cut_leaves_the_old_or_the_new(name: str, way: str, root: Path) -> None:
    found = crashed(name, root, way)
    assert found.count >= 3
    assert found.faults == []


@pytest.mark.parametrize("force", [False, True])
def test_every_state_of_a_switch(force: bool, tmp_path: Path) -> None:
    """Of two parts and a file in new folders; with `force` in the place of older parts in another number."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes").write_text("mine")
    for i in range(1, 4) if force else ():
        (out / f"p-{i:05}-of-00003.gguf").write_text("older")
        (out / f"p-{i:05}-of-00002.gguf").write_text("old")
    (out / "p-00003-of-00002.gguf").unlink(missing_ok=True)

    def switch() -> None:
        layouts = [FileLayout(name, [Literal(b"new")]) for name in (*_PARTS, "new/one/x")]
        write_parts(str(out), layouts, WriteOptions(force=force), stale=["p-*-of-00003.gguf"])

    found = crash(switch, out, "elsewhere", most=2000, exhaustive=256, seed="")
    assert found.count > 60
    assert found.faults == []


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["export gguf", "export parts over", "write folder over"])
def test_a_sync_left_out_loses_something(name: str, way: str, kind: str, root: Path) -> None:
    assert crashed(name, root, way, without=kind).faults
