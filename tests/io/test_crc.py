"""The CRC of a stretch of a file: any bounds, any number of parts and threads; errors of every thread come out."""

from __future__ import annotations

import os
import threading
import zlib
from pathlib import Path

import pytest

from aprfmt.errors import TruncatedError
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
    with pytest.raises(TruncatedError, match="shrank"):
        crc32_of_range(source, 0, len(DATA))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("apr-crc")]
