"""Damaged compressed text gives documents or an AprError. APR_FUZZ_SECONDS=60 goes on for so long."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from aprfmt.errors import AprError, CorruptError, LimitError
from aprfmt.io.unpacked import Unpacked
from aprfmt.texts.records import RecordReader, as_text
from aprfmt.texts.sources import SourceFile

SECONDS = float(os.environ.get("APR_FUZZ_SECONDS", "0"))
LEAST = 80


def zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(write_checksum=False).compress(data)


FORMS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}
PLAIN = "".join(json.dumps({"text": f"document {n} " * (n % 7)}) + "\n" for n in range(60)).encode()


def damaged(data: bytes, rng: Random, others: list[bytes]) -> bytes:
    """One to four edits: bits, bytes, pieces cut out, doubled or set to zero, other streams in front or behind."""
    raw = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(raw) + 1)
        end = min(len(raw), at + rng.choice((1, 2, 4, 16, 300)))
        kind = rng.randrange(7)
        if kind == 0 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            raw[at:end] = rng.randbytes(end - at)
        elif kind == 2:
            del raw[at:end]
        elif kind == 3:
            raw[at:at] = raw[at:end] * rng.choice((1, 2, 50))
        elif kind == 4:
            raw[at:end] = bytes(end - at)
        elif kind == 5:
            raw += rng.choice(others)
        else:
            raw[:0] = rng.choice(others)
    return bytes(raw)


@pytest.mark.parametrize("suffix", FORMS)
@pytest.mark.parametrize(("name", "kind"), [("a.jsonl", "jsonl"), ("a.txt", "text"), ("a.csv", "csv")])
def test_damaged_compressed_text(suffix: str, name: str, kind: str, tmp_path: Path) -> None:
    whole = FORMS[suffix](b"text\n" + PLAIN if kind == "csv" else PLAIN)
    others = [whole, FORMS[suffix](b""), bytes(8), FORMS[suffix](b"\n" * 100_000)]
    path = tmp_path / (name + suffix)
    file = SourceFile(path, path.name, kind)
    outcomes, n, until = set[str](), 0, time.monotonic() + SECONDS
    while n < LEAST or time.monotonic() < until:
        path.write_bytes(damaged(whole, Random(f"{suffix} {kind} {n}"), others))
        n += 1
        try:
            outcomes.add(f"{len(list(RecordReader(separator=0, render=as_text).documents(file))) > 0}")
        except AprError as error:
            outcomes.add(error.code if error.path == str(path) else "an error without its file")
    assert {"True", "corrupt"} <= outcomes <= {"True", "False", "corrupt", "limit", "refused"}
    if SECONDS:
        print(f"{suffix} {kind}: {n} cases, {sorted(outcomes)}")


# --- borders of streams ---


def unpacked(data: bytes, suffix: str) -> bytes:
    return io.BufferedReader(Unpacked(io.BytesIO(data), suffix, "file")).read()


def by_the_library(data: bytes, suffix: str) -> bytes:
    """What the format's own library makes of streams that are laid end to end."""
    import zstandard

    if suffix == ".zst":
        return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()
    return {".gz": gzip.decompress, ".xz": lzma.decompress}[suffix](data)


def streams(suffix: str, rng: Random) -> list[tuple[bytes, bytes]]:
    """One to six streams with what each holds: nothing, a byte, text, or more than a step of the reader."""
    found = []
    for _ in range(rng.randint(1, 6)):
        content = rng.choice((b"", b"x", PLAIN[:600], rng.randbytes(rng.randrange(9000)), b"y" * 70_000))
        if suffix == ".zst" and rng.random() < 0.3:
            found.append((struct.pack("<II", 0x184D2A50 + rng.randrange(16), len(content)) + content, b""))
        else:
            found.append((FORMS[suffix](content), content))
    return found


@pytest.mark.parametrize("suffix", FORMS)
def test_streams_are_read_as_their_library_does(suffix: str) -> None:
    """Zeros between them, which gzip skips, lose nothing; anything else there is refused."""
    n, until = 0, time.monotonic() + SECONDS
    while n < LEAST or time.monotonic() < until:
        rng = Random(f"{suffix} {n}")
        n += 1
        found = streams(suffix, rng)
        whole = b"".join(content for _, content in found)
        assert unpacked(b"".join(data for data, _ in found), suffix) == whole
        assert by_the_library(b"".join(data for data, _ in found), suffix) == whole
        padded = b"".join(data + bytes(rng.choice((0, 1, 4, 4095, 4096, 20_000))) for data, _ in found)
        assert unpacked(padded, suffix) == whole
        if suffix == ".gz":
            assert by_the_library(padded, suffix) == whole
        at = rng.randrange(len(found) + 1)
        garbage = bytes(rng.choice((0, 5, 5000)) if at else 0) + rng.choice((b"\1", b"PK", b"garbage" * 900))
        parts = [data for data, _ in found]
        with pytest.raises(CorruptError, match="cannot be decompressed"):
            unpacked(b"".join((*parts[:at], garbage, *parts[at:])), suffix)


@pytest.mark.parametrize("suffix", FORMS)
def test_a_cut_shows_wherever_it_is(suffix: str) -> None:
    """But between two streams, where nothing tells of the next."""
    first, second = FORMS[suffix](b"one"), FORMS[suffix](b"two")
    for n in range(len(first) + len(second)):
        data = (first + second)[:n]
        if n == len(first):
            assert unpacked(data, suffix) == b"one"
        else:
            with pytest.raises(CorruptError, match="cannot be decompressed"):
                unpacked(data, suffix)
    for zeros in (1, 5000):
        with pytest.raises(CorruptError, match="cannot be decompressed"):
            unpacked(bytes(zeros), suffix)


@pytest.mark.parametrize("suffix", FORMS)
@pytest.mark.parametrize("content", [b"", b"x"])
def test_streams_that_hold_next_to_nothing_are_bounded(
    suffix: str, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aprfmt.io.unpacked.MAX_UNPACKED_STREAMS", 600)
    stream, full = FORMS[suffix](content), FORMS[suffix](bytes(64))
    assert unpacked(stream * 600, suffix) == content * 600
    assert len(unpacked(full * 2000, suffix)) == 64 * 2000
    with pytest.raises(LimitError, match="compressed streams hold only"):
        unpacked(stream * 620, suffix)
