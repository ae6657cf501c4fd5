"""Every writer writes, syncs, publishes and syncs the folder, in this order: a power cut leaves nothing half."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import writers
from publications import WAYS, Order, left_out, on_file_system
from writers import WRITERS, Place, contents, restore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks up descriptors under /proc")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("order")
    writers.prepare(root)
    return root


def watched(name: str, root: Path, way: str, without: str = "") -> Order:
    """The order of a writer's calls, `without` the fsync of a "file" or a "folder"."""
    at = Place(root / "in", root / "out")
    restore(contents(root / "old"), root / "old", at.out)
    order = Order(root)
    with on_file_system(way), order.watched(), left_out(without):
        WRITERS[name](at)
    return order


@pytest.mark.turns(by="name")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRITERS)
def test_nothing_appears_before_it_lasts(name: str, way: str, root: Path) -> None:
    order = watched(name, root, way)
    assert order.shown
    assert order.faults == []


@pytest.mark.turns(by="name")
@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRITERS)
def test_a_sync_left_out_is_seen(name: str, way: str, kind: str, root: Path) -> None:
    """Without either fsync the test above fails."""
    assert watched(name, root, way, without=kind).faults
