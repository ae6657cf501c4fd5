"""The pipeline: order, checksum, bounded memory, and what is left when a piece fails."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import examples

from aprfmt.errors import ChangedError, ChecksumError, CorruptError, RefusedError, StorageError
from aprfmt.io.crc import combine, crc32
from aprfmt.io.digest import BLAKE3, KINDS, Digest, digest_of
from aprfmt.io.pipe import (
    CHUNK_BYTES,
    DeferredPatch,
    FileLayout,
    Flow,
    Item,
    Job,
    Literal,
    Stream,
    Zeros,
    is_same_content,
    run_jobs,
    sha256_of_range,
    source_jobs,
    write_layout,
)
from aprfmt.io.sink import AtomicFile
from aprfmt.io.source import Buffer, Source


def write(layout: FileLayout, path: Path, flow: Flow) -> int:
    with AtomicFile(path, force=True) as sink:
        return write_layout(layout, sink, None, flow)


def late(data: bytes, seconds: float) -> Job:
    def run() -> Buffer:
        time.sleep(seconds)
        return data

    return Job(len(data), run)


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("apr-")}


@pytest.mark.parametrize("n_threads", [1, 2, 7])
def test_pieces_are_written_in_order_whatever_finishes_first(tmp_path: Path, n_threads: int) -> None:
    dice = random.Random(n_threads)
    parts = [dice.randbytes(dice.choice([0, 1, 999, 600_000])) for _ in range(60)]
    seen: list[tuple[int, str]] = []

    def items() -> Iterator[Item]:
        for i, part in enumerate(parts):
            yield late(part, dice.random() / 200) if i % 3 else part

    stream = Stream(sum(map(len, parts)), items, "weights")
    layout = FileLayout("f", [Literal(b"head" * 9), Zeros(100_000), stream], crc_footer=True)
    with AtomicFile(tmp_path / "f") as sink:
        crc = write_layout(layout, sink, lambda n, label: seen.append((n, label)), Flow(n_threads, 2 << 20))
    want = b"head" * 9 + bytes(100_000) + b"".join(parts)
    assert crc == zlib.crc32(want)
    assert (tmp_path / "f").read_bytes() == want + struct.pack("<I", crc)
    assert sum(n for n, _ in seen) == layout.n_bytes
    assert {label for _, label in seen} == {"", "weights"}
    assert not threads()


def test_memory_in_flight_is_bounded_when_the_disk_is_slow(tmp_path: Path) -> None:
    alive = peak = 0
    lock = threading.Lock()

    def run() -> Buffer:
        nonlocal alive, peak
        with lock:
            alive += 1
            peak = max(peak, alive)
        return bytes(CHUNK_BYTES)

    class SlowFile(AtomicFile):
        def write(self, data: Buffer) -> None:
            nonlocal alive
            time.sleep(0.01)
            with lock:
                alive -= 1
            super().write(data)

    n = 40
    layout = FileLayout("f", [Stream(n * CHUNK_BYTES, lambda: (Job(CHUNK_BYTES, run) for _ in range(n)))])
    with SlowFile(tmp_path / "f") as sink:
        write_layout(layout, sink, None, Flow(2, 4 << 20))
    assert 2 <= peak <= 4 + 2 + 1  # the window, a piece a worker, the one that is written


def broken(error: BaseException) -> Callable[[], Buffer]:
    def run() -> Buffer:
        raise error

    return run


@pytest.mark.parametrize("position", [0, 1, 25, 49])
@pytest.mark.parametrize("as_job", [False, True])
def test_a_failing_piece_leaves_nothing(tmp_path: Path, position: int, as_job: bool) -> None:
    def items() -> Iterator[Item]:
        for i in range(50):
            if i == position and not as_job:
                raise RefusedError("no such value")
            yield Job(300_000, broken(RefusedError("no such value"))) if i == position else bytes(300_000)

    layout = FileLayout("f", [Stream(50 * 300_000, items, "blk.0.attn_q.weight")])
    with pytest.raises(RefusedError, match="no such value") as caught:
        write(layout, tmp_path / "f", Flow(3))
    assert caught.value.tensor == "blk.0.attn_q.weight"
    assert not os.listdir(tmp_path)
    assert not threads()


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), ZeroDivisionError()])
def test_any_exception_of_a_worker_reaches_the_caller(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        write(FileLayout("f", [Stream(8, lambda: [Job(8, broken(error))])]), tmp_path / "f", Flow(2))
    assert not os.listdir(tmp_path)


def test_a_failing_disk_stops_the_workers(tmp_path: Path) -> None:
    class FullDisk(AtomicFile):
        def write(self, data: Buffer) -> None:
            raise StorageError("disk full")

    made = 0

    def run() -> Buffer:
        nonlocal made
        made += 1
        return bytes(CHUNK_BYTES)

    layout = FileLayout("f", [Stream(500 << 20, lambda: (Job(CHUNK_BYTES, run) for _ in range(500)))])
    with pytest.raises(StorageError), FullDisk(tmp_path / "f") as sink:
        write_layout(layout, sink, None, Flow(2, 4 << 20))
    assert made < 20
    assert not os.listdir(tmp_path)
    assert not threads()


@pytest.mark.parametrize(
    "items",
    [
        [b"1234"],
        [b"123456789"],
        [b"12345", Job(5, lambda: b"12345")],
        [Job(8, lambda: b"1234567")],
        [Job(8, lambda: b"123456789")],
        [],
    ],
)
def test_a_stream_of_another_length_is_refused(tmp_path: Path, items: list[Item]) -> None:
    with pytest.raises(CorruptError, match="instead of the planned"):
        write(FileLayout("f", [Stream(8, lambda: items, "t")]), tmp_path / "f", Flow(2))
    assert not os.listdir(tmp_path)


def test_a_source_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_bytes(bytes(8 << 20))
    with Source.open(path) as source:
        jobs = list(source_jobs(source, 0, source.size))
        os.truncate(path, 5 << 20)
        layout = FileLayout("f", [Stream(source.size, lambda: jobs, "t")])
        with pytest.raises(ChangedError, match="shrank") as caught:
            write(layout, tmp_path / "f", Flow(2))
    assert caught.value.offset == 5 << 20
    assert caught.value.tensor == "t"
    assert os.listdir(tmp_path) == ["source"]


def test_jobs_of_a_source_are_whole_units(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(3_000_007)
    (tmp_path / "s").write_bytes(data)
    with Source.open(tmp_path / "s") as source:
        jobs = list(source_jobs(source, 7, 3_000_000, 5_000))
        assert all(job.n_bytes % 5_000 == 0 for job in jobs)
        assert max(job.n_bytes for job in jobs) <= CHUNK_BYTES
        assert b"".join(run_jobs(jobs)) == data[7:]
        assert [job.n_bytes for job in source_jobs(source, 0, 3_000_000, 2 << 20)] == [2 << 20, 3_000_000 - (2 << 20)]


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_of_parts_combine(a: bytes, b: bytes) -> None:
    assert combine(crc32(a), crc32(b), len(b)) == zlib.crc32(a + b)


@pytest.mark.parametrize("n_bytes", [1, 4095, 4096, (1 << 20) + 1, 1 << 24])
def test_checksums_of_long_parts_combine(n_bytes: int) -> None:
    a, b = os.urandom(1000), random.Random(n_bytes).randbytes(n_bytes)
    assert combine(zlib.crc32(a), zlib.crc32(b), n_bytes) == zlib.crc32(b, zlib.crc32(a))


def test_content_of_files_is_hashed_and_compared() -> None:
    data = bytes(range(256)) * 9000  # three pieces
    source = Source.from_bytes(data, "a")
    assert sha256_of_range(source, 7, 2_000_000) == hashlib.sha256(data[7:2_000_007]).hexdigest()
    changed = data[:-1] + b"x"
    others = {data: True, changed: False, data[:-1]: False, data + b"x": False, b"": False}
    for other, same in others.items():
        assert is_same_content(source, Source.from_bytes(other, "b")) is same
    assert is_same_content(Source.from_bytes(b"", "a"), Source.from_bytes(b"", "b"))


@pytest.mark.parametrize("footer", [False, True])
@pytest.mark.parametrize("n_behind", [0, 1, 63, 3_000_000])
def test_bytes_that_are_known_late(footer: bool, n_behind: int, tmp_path: Path) -> None:
    head, stand_in, behind = b"head" * 9, b"a stand-in", random.Random(1).randbytes(n_behind)
    made: list[int] = []

    def make() -> bytes:
        made.append((tmp_path / "f").exists())
        return b"0123456789"

    stream = Stream(n_behind, lambda: [behind])
    patch = DeferredPatch(len(head), stand_in, make)
    layout = FileLayout("f", [Literal(head + stand_in), stream], crc_footer=footer, deferred=[patch])
    crc = write(layout, tmp_path / "f", Flow(2))
    want = head + b"0123456789" + behind
    assert (tmp_path / "f").read_bytes() == want + (struct.pack("<I", zlib.crc32(want)) if footer else b"")
    assert crc == (zlib.crc32(want) if footer else 0)
    assert made == [False]


def test_late_bytes_of_another_length(tmp_path: Path) -> None:
    layout = FileLayout("f", [Literal(bytes(100))], deferred=[DeferredPatch(3, bytes(10), lambda: bytes(11))])
    with pytest.raises(CorruptError, match="11 bytes instead of the planned 10"):
        write(layout, tmp_path / "f", Flow(2))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 3_000_001])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_the_digest_that_it_must_have(kind: str, size: int, tmp_path: Path) -> None:
    data = random.Random(size).randbytes(size)

    def layout(digest: Digest) -> FileLayout:
        items = [data[start : start + 700_000] for start in range(0, size, 700_000)]
        return FileLayout("f", [Stream(size, lambda: (late(item, 0.001) for item in items))], digest=digest)

    write(layout(digest_of(kind, [data])), tmp_path / "f", Flow(3))
    assert (tmp_path / "f").read_bytes() == data
    with pytest.raises(ChecksumError, match="would differ from the imported file"):
        write(layout(digest_of(kind, [data, b"x"])), tmp_path / "g", Flow(3))
    assert os.listdir(tmp_path) == ["f"]
    assert not threads()


def test_a_failing_piece_ends_the_hashing(tmp_path: Path) -> None:
    items = [bytes(300_000)] * 20 + [Job(300_000, broken(RefusedError("no such value")))]
    layout = FileLayout("f", [Stream(21 * 300_000, lambda: items)], digest=Digest(BLAKE3, "0" * 64))
    with pytest.raises(RefusedError, match="no such value"):
        write(layout, tmp_path / "f", Flow(2))
    assert not threads()
