"""Damaged compressed text gives documents or an AprError. APR_FUZZ_SECONDS=60 goes on for so long."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from aprfmt.errors import AprError
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
