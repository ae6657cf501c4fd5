"""Records that a killed run leaves, mutated: of an interrupted write, of a file in the cache."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from aprfmt.errors import AprError, ChecksumError, RefusedError
from aprfmt.io.cache import CacheFolder
from aprfmt.io.sink import AtomicFolder
from aprfmt.io.switch import Switch
from aprfmt.io.temporary import sweep

CASES = int(os.environ.get("APR_RECORDS", "90"))
"""Mutations of a record; APR_RECORDS=3000 takes some minutes."""
OLD = {"m-1": "old", "m-2": "old", ".bashrc": "mine", "sub/key": "mine"}
DATA = b"weights" * 1000

_HOSTILE: tuple[object, ...] = (
    None, True, -1, 0, 1 << 80, 1e308, "", "..", "../m-1", "/etc/passwd", ".bashrc", "sub/key", "a\0b", "\ud800",
    "x" * 300, [], {}, [[]], [0, 0, 0], [-1, -1, -1], {".bashrc": [0, 0, 0]}, {"../x": []}, {"m-1": None},
)  # fmt: skip


class KilledError(BaseException):
    """What a SIGKILL would be."""


def mutations(data: bytes, dice: Random, count: int) -> Iterator[bytes]:
    """`count` other texts in place of a record: bits, cuts, repeats, other JSON values, no JSON at all."""
    head, _, body = data.rpartition(b"\n")
    edits: tuple[Callable[[], bytes], ...] = (
        lambda: _flipped(data, dice),
        lambda: data[: dice.randrange(len(data))],
        lambda: data[dice.randrange(1, len(data)) :],
        lambda: data + data[: dice.randrange(1, len(data))],
        lambda: dice.randbytes(dice.randrange(200)),
        lambda: head + b"\n" * bool(head) + json.dumps(_edited(json.loads(body), dice)).encode(),
        lambda: json.dumps(_edited(json.loads(body), dice)).encode(),
        lambda: head + b"\n" + b"[" * dice.randrange(1, 4000),
        lambda: json.dumps(dice.choice(_HOSTILE)).encode(),
    )
    for number in range(count):
        made = edits[number % len(edits)]()
        if made != data:
            yield made


def _flipped(data: bytes, dice: Random) -> bytes:
    place = dice.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << dice.randrange(8)]) + data[place + 1 :]


def _edited(value: object, dice: Random) -> object:
    """`value` with one of its parts removed, renamed or of another kind."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key, hostile = dice.choice(list(value)), dice.choice(_HOSTILE)
        rest = {name: part for name, part in value.items() if name != key}
        return dice.choice((rest, rest | {str(hostile): value[key]}, rest | {key: _edited(value[key], dice)}))
    return dice.choice(_HOSTILE)


# --- interrupted writes ---


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outside(folder: Path) -> dict[str, bytes]:
    """The files of the user."""
    return {name: data for name, data in tree(folder).items() if ".tmp" not in name}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "out"
    for name, text in OLD.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    monkeypatch.setattr("aprfmt.io.temporary.is_running", lambda process: False)
    return place


def interrupt(folder: Path, *, moved: bool) -> Path:
    """A process replaces m-1 and m-2 and is killed: before the first rename, or with m-1 aside. Gives the record."""
    with pytest.MonkeyPatch.context() as patch:
        rename, left = os.rename, [1 if moved else 0]

        def limited(source: str, target: str) -> None:
            if not left[0]:
                raise KilledError
            left[0] -= 1
            rename(source, target)

        patch.setattr(os, "rename", limited)
        patch.setattr(Switch, "_back", lambda self: (_ for _ in ()).throw(KilledError))
        with pytest.raises(KilledError), AtomicFolder(folder, shared=True, force=True, last="m-1") as temporary:  # noqa: PT012
            for name in ("m-1", "m-2"):
                (temporary / name).write_text("new")
    (record,) = folder.glob(".*.tmp/.switch")
    return record


def test_no_mutated_record_of_an_interrupted_write_moves_a_file(folder: Path) -> None:
    record = interrupt(folder, moved=True)
    data, before = record.read_bytes(), tree(folder)
    for mutated in mutations(data, Random(1), CASES):
        record.write_bytes(mutated)
        with pytest.raises(RefusedError, match="cannot complete"):
            sweep(folder)
        record.write_bytes(data)
        assert tree(folder) == before
    sweep(folder)
    assert tree(folder) == {name: b"new" if name in ("m-1", "m-2") else b"mine" for name in OLD}


def test_a_mutated_record_before_the_first_rename_costs_no_file_of_the_user(folder: Path) -> None:
    before = tree(folder)
    for seed in range(CASES // 10):
        record = interrupt(folder, moved=False)
        for aside in folder.glob(".*.tmp/.replaced"):
            aside.rmdir()
        record.write_bytes(next(mutations(record.read_bytes(), Random(seed), 9)))
        with suppress(AprError):
            sweep(folder)
        assert outside(folder) == before
        assert tree(folder) == before


def test_no_mutated_name_of_a_temporary_folder_is_followed(folder: Path) -> None:
    record = interrupt(folder, moved=True)
    path, before, dice = record.parent, outside(folder), Random(2)
    for _ in range(CASES):
        name = _flipped(path.name.encode(), dice).replace(b"/", b"_").replace(b"\0", b"_")
        other = os.path.join(os.fsencode(folder), name)
        if name in (path.name.encode(), b".", b"..") or os.path.exists(other):
            continue
        os.rename(os.fsencode(path), other)
        with suppress(AprError):
            sweep(folder)
        os.rename(other, os.fsencode(path))
        assert outside(folder) == before
    assert record.exists()


# --- the cache ---


def write(path: Path) -> None:
    path.write_bytes(DATA)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CacheFolder:
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    return CacheFolder("exports")


def test_no_mutated_record_of_the_cache_lets_a_damaged_file_through(cache: CacheFolder) -> None:
    entry = cache.entry("a.gguf", write)
    lock, dice = Path(f"{entry.path}.lock"), Random(3)
    entry.close()
    confirmed = 0
    for number, mutated in enumerate(mutations(lock.read_bytes(), dice, CASES)):
        lock.write_bytes(mutated)
        if number % 2:
            entry.path.write_bytes(_flipped(DATA, dice))
        entry = cache.entry("a.gguf", write)
        try:
            entry.confirm()
        except ChecksumError:
            pass
        else:
            confirmed += 1
            assert entry.path.read_bytes() == DATA
        entry.close()
    assert confirmed > CASES // 2
    entry = cache.entry("a.gguf", write)
    with suppress(ChecksumError):
        entry.confirm()
