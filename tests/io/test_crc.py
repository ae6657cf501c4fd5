"""The CRC of a stretch of a file: any bounds, any number of parts and threads; errors of every thread come out."""

from __future__ import annotations

import os
import random
import threading
import zlib
from pathlib import Path

import pytest

from aprfmt.errors import ChangedError
from aprfmt.io import crc
from aprfmt.io.crc import crc32_of_range
from aprfmt.io.source import Source

DATA = bytes((i * i >> 3) % 251 for i in range(50_000))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(crc, "_PART_BYTES", 1000)
    monkeypatch.setattr(crc, "_BUFFER_BYTES", 300)
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return Source.open(path)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, 1), (7, 999), (0, 1000), (0, 1001), (123, 40_123), (0, 50_000)])
def test_it_is_zlibs(start: int, end: int, threads: int, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(threads)))
    for _ in range(5):
        assert crc32_of_range(source, start, end) == zlib.crc32(DATA[start:end])


def test_bytes_in_memory() -> None:
    assert crc32_of_range(Source.from_bytes(DATA, "x"), 5, 777) == zlib.crc32(DATA[5:777])


def test_a_file_that_shrinks(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    os.truncate(source.path, 30_000)
    with pytest.raises(ChangedError, match="shrank"):
        crc32_of_range(source, 0, len(DATA))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("apr-crc")]


def test_what_was_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crc, "_LEAST_BYTES", 10)
    monkeypatch.setattr(crc, "_MOST_PIECES", 5)
    monkeypatch.setattr(crc, "_JOINED_BYTES", 4000)
    path = tmp_path / "file"
    path.write_bytes(DATA)
    dice = random.Random(3)
    for n_reads in (0, 1, 4, 5, 40, 400):
        with Source.open(path) as source:
            source.record = crc.ReadChecksum()
            seen = bytearray(len(DATA))
            for _ in range(n_reads):
                start = dice.randrange(len(DATA))
                length = min(dice.choice([3, 10, 700, 9000]), len(DATA) - start)
                if dice.random() < 0.5:
                    source.read(start, length)
                else:
                    source.read_into(start, memoryview(bytearray(length)))
                seen[start : start + length] = bytes([1]) * length
            again: list[tuple[int, int]] = []
            monkeypatch.setattr(source.record, "add", lambda start, data, again=again: again.append((start, len(data))))
            assert crc32_of_range(source, 0, len(DATA)) == zlib.crc32(DATA)
            assert sum(n for _, n in again) <= len(DATA)
        if n_reads == 400:
            assert sum(n for _, n in again) < len(DATA) // 2


def test_a_stream_in_any_order_leaves_nothing_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crc, "_LEAST_BYTES", 10)
    path = tmp_path / "file"
    path.write_bytes(DATA)
    starts = list(range(0, len(DATA), 1000))
    random.Random(0).shuffle(starts)
    with Source.open(path) as source:
        source.record = crc.ReadChecksum()
        for start in [*starts, *starts[:9]]:
            source.read(start, 1000)
        path.write_bytes(bytes(len(DATA)))  # what is read from here on is something else
        assert crc32_of_range(source, 0, len(DATA)) == zlib.crc32(DATA)
        assert crc32_of_range(source, 1000, 30_000) == zlib.crc32(DATA[1000:30_000])


@pytest.mark.parametrize("size", [0, 1, 20_000, 1 << 20])
def test_a_crc_that_goes_on_from_another(size: int) -> None:
    data, other = random.Random(size).randbytes(size), random.Random(-1).randbytes(size)
    for value in (0, 7, 0xFFFFFFFF):
        for piece in (data, data, bytearray(data), memoryview(data), other, data):
            assert crc.crc32_after(value, piece) == zlib.crc32(piece, value)
