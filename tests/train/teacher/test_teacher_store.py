"""Windows in files: what is read is what was written, whoever writes, whoever is killed; batches are read ahead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flips import draw, flipped
from torch import Tensor
from train_children import forked
from train_corpora import part, varied

from aprtrain.data.batches import Batch, Batches, Windows, batch_of
from aprtrain.teacher.cache import CachedHidden, Store

SIZE = (8, 4)
FLIPS = int(os.environ.get("APR_FLIPS", "200"))


def states(window: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(window)).bfloat16()


def read(store: Store, window: int) -> Tensor | None:
    out = torch.empty(SIZE, dtype=torch.bfloat16)
    return out if store.read(window, out) else None


def store(folder: Path, n: int = 50, **options: Any) -> Store:
    return Store(folder, "train", n, SIZE, torch.bfloat16, **options)


def test_two_writers_share_the_files(tmp_path: Path) -> None:
    one, two = store(tmp_path), store(tmp_path)
    for i in range(0, 50, 2):
        one.write(i, states(i))
        if i % 4 == 0:
            two.write(i + 1, states(i + 1))
    third = store(tmp_path, writes=False)
    wanted = [i % 2 == 0 or i % 4 == 1 for i in range(50)]
    for each in (one, two, third):
        assert each.kept().tolist() == wanted
        assert each.has([0, 1, 2, -1])
        assert not each.has([0, 3])
        for i in range(50):
            found = read(each, i)
            assert found is None if not wanted[i] else torch.equal(found, states(i))  # type: ignore[arg-type]
        each.close()


def test_a_window_in_the_place_of_another_is_not_taken(tmp_path: Path) -> None:
    one = store(tmp_path)
    for i in range(2):
        one.write(i, states(i))
    for path in tmp_path.iterdir():
        data, n = path.read_bytes(), path.stat().st_size // 50
        path.write_bytes(data[n : 2 * n] + data[:n] + data[2 * n :])
    assert one.kept()[:2].all()
    assert read(one, 0) is read(one, 1) is None
    assert not one.kept().any()
    one.close()


def test_no_bit_of_a_cache_turns_over_unnoticed(tmp_path: Path) -> None:
    """Every window but the one that was hit is read as it was, and that one is missing."""
    one = store(tmp_path, 6)
    for i in range(4):
        one.write(i, states(i))
    one.close()
    window_bytes = one.window_bytes
    again = store(tmp_path, 6, writes=False)
    for path, bit in draw([tmp_path / "train.states", tmp_path / "train.sums"], FLIPS):
        hit = bit // 8 // (window_bytes if path.suffix == ".states" else 8)
        with flipped(path, bit):
            found = [read(again, i) for i in range(6)]
        wanted = [None if i == hit or i >= 4 else states(i) for i in range(6)]
        assert [x is None for x in found] == [x is None for x in wanted], (path.name, bit)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True) if x is not None and y is not None)
    again.close()


def test_a_process_killed_at_any_moment_leaves_no_wrong_window(tmp_path: Path) -> None:
    n, size = 400, (2048, 512)  # 4 MiB: most of the time goes into writing states
    for round in range(8):
        opened = Store(tmp_path, f"part-{round}", n, size, torch.float32)

        def fill(opened: Store = opened) -> None:
            states_TD = torch.empty(size)
            for i in range(n):
                opened.write(i, states_TD.fill_(i + 1))

        with forked(fill) as child:
            while opened.kept().sum() < 4 * (round + 1):
                pass
            child.kill()
            child.wait()
        out = torch.empty(size)
        kept = np.flatnonzero(opened.kept()).tolist()
        assert len(kept) < n
        for i in kept:
            assert opened.read(i, out), "states are written before their sum"
            assert bool((out == i + 1).all())
        opened.close()
        (tmp_path / f"part-{round}.states").unlink()


# --- reading ahead ---


@pytest.fixture
def data() -> Windows:
    tokens = varied(300, seed=1)
    return Windows(part(*(tokens[i : i + 11] for i in range(0, 300, 11))), SIZE[0], 2)


def made_up(batch: Batch) -> Tensor:
    """States that tell of each row's window."""
    return torch.stack([states(i) for i in batch.windows])


def test_batches_are_read_before_they_are_asked_for(
    data: Windows, tmp_path: Path, begun: list[tuple[int, ...]]
) -> None:
    def order() -> Batches:
        return Batches(data, windows_per_step=4, windows_per_micro=2, seed=3, epochs=1)

    def none(batch: Batch) -> Tensor:
        raise AssertionError(f"{batch.windows} were computed")

    told: list[str] = []
    cpu = torch.device("cpu")
    filling = CachedHidden(store(tmp_path, len(data)), cpu, made_up, told.append, order().upcoming())
    steps = order()
    batches = [batch for _ in range(steps.n_steps or 0) for batch in next(steps)]
    for batch in batches:
        filling(batch)
        assert not filling.is_read or max(batch.windows) < 0
    filling.close()
    begun.clear()
    reading = CachedHidden(store(tmp_path, len(data)), cpu, none, told.append, order().upcoming())
    for n, batch in enumerate(batches):
        found = reading(batch)
        assert reading.is_read
        for row, window in zip(found, batch.windows, strict=True):
            assert torch.equal(row, states(window) if window >= 0 else torch.zeros(SIZE).bfloat16())
        assert begun == [b.windows for b in batches[: n + 3]], "two ahead, each once"
    assert batches[-1].windows[-1] == -1, "a row that only fills was among them"
    asked = batch_of(data, [5, 3])
    assert torch.equal(reading(asked), made_up(asked)), "what was not announced is read as well"
    reading.close()
    assert told == []


def test_nothing_is_written_that_is_there(data: Windows, tmp_path: Path) -> None:
    one = store(tmp_path, len(data))
    one.write(3, states(3))
    answers = CachedHidden(one, torch.device("cpu"), lambda batch: made_up(batch) * 0, print)
    answers(batch_of(data, [3, 4]))
    answers.close()
    again = store(tmp_path, len(data))
    for window, wanted in ((3, states(3)), (4, torch.zeros(SIZE).bfloat16())):
        found = read(again, window)
        assert found is not None
        assert torch.equal(found, wanted)
    again.close()


def test_a_defect_in_the_thread_that_writes_is_said(
    data: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Store, window: int, states_TD: Tensor) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(Store, "write", broken)
    told: list[str] = []
    answers = CachedHidden(store(tmp_path, len(data)), torch.device("cpu"), made_up, told.append)
    answers(batch_of(data, [0]))
    answers.close()
    assert told == ["not all of the teacher's hidden states were cached: ValueError: a defect"]
