"""The hash of a file that is read in any order, or not at all: that of all its bytes."""

from __future__ import annotations

import os
import random
import threading
import zlib
from pathlib import Path

import pytest
from blake3 import blake3

from aprfmt.errors import ChangedError
from aprfmt.io import digest
from aprfmt.io.digest import BLAKE3, CRC32, KINDS, Follower, digest_of, follow
from aprfmt.io.source import Source

SIZES = (0, 1, 999, 100_000, 333_333)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    monkeypatch.setattr(digest, "_BUFFER_BYTES", 7000)
    for n, size in enumerate(SIZES):
        (tmp_path / str(n)).write_bytes(random.Random(n).randbytes(size))
    return [Source.open(tmp_path / str(n)) for n in range(len(SIZES))]


def hashing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "apr-hash"]


@pytest.mark.parametrize("n_reads", [0, 1, 50])
def test_files_read_in_any_order(n_reads: int, sources: list[Source]) -> None:
    follower, dice = Follower(sources), random.Random(n_reads)
    for _ in range(n_reads):
        source = dice.choice(sources)
        start = dice.randrange(source.size + 1)
        length = dice.randrange(min(20_000, source.size - start) + 1)
        source.read(start, length) if dice.random() < 0.5 else source.read_into(start, memoryview(bytearray(length)))
    for trail, source in zip(follower.trails, sources, strict=True):
        assert trail.digest() == (BLAKE3, blake3(Path(source.path).read_bytes()).hexdigest())
    assert not hashing()


@pytest.mark.parametrize("kind", KINDS)
def test_digests_of_what_was_read_in_part(kind: str, sources: list[Source]) -> None:
    pending = follow(kind, sources)
    assert len({p.stand_in for p in pending}) == len(sources)
    sources[4].read(100_000, 200_000)
    for one, source in zip(pending, sources, strict=True):
        data = Path(source.path).read_bytes()
        expected = f"{zlib.crc32(data):08x}" if kind == CRC32 else blake3(data).hexdigest()
        assert one.digest() == (kind, expected) == digest_of(kind, [data[:5], data[5:]])
        assert len(one.stand_in) == len(expected)


def test_closing_a_source_ends_the_work(sources: list[Source]) -> None:
    Follower(sources)
    sources[4].read(100_000, 200_000)
    assert len(hashing()) <= 1
    sources[0].close()
    assert not hashing()


def test_a_file_that_shrinks(sources: list[Source]) -> None:
    follower = Follower(sources)
    os.truncate(sources[4].path, 5)
    with pytest.raises(ChangedError, match="shrank"):
        follower.trails[4].digest()
    assert not hashing()


def test_the_thread_stays_behind_the_reads(sources: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    follower = Follower(sources)
    trail = follower.trails[4]
    for end in (50_000, 100_000):
        sources[4].read(end - 50_000, 50_000)
        while trail.done < end:
            pass
        assert trail.done == trail.reached == end
    follower.stop()
