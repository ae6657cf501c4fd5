"""Which file is it: every row of the magic table."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lz4.block
import pytest
import zstandard
from apr1_images import apr1_bytes, v1_bytes, v2_head, with_footer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from turns import examples

import aprfmt
from aprfmt.errors import AprError, CorruptError, TruncatedError, UnknownFormatError, UnsupportedError

Put = Callable[[bytes], Path]
EMPTY_APR1 = apr1_bytes([], b"")


def wrap(magic: bytes, algorithm: int, packed: bytes, length: int = len(EMPTY_APR1)) -> bytes:
    return magic + struct.pack("<BI", algorithm, length) + packed


def tuner(magic: bytes, text: bytes) -> bytes:
    return magic + struct.pack("<I", len(text)) + text + bytes(4)


def test_every_vector_is_what_its_name_says(vectors_dir: Path, records: dict[str, dict[str, Any]]) -> None:
    expected = {"v1": "apr-v1", "v2": "apr-v2", "apr1": "apr-legacy", "wrapper": "apr-legacy", "v2c": "apr-legacy"}
    for name, record in records.items():
        if record["file"].startswith("golden/"):
            kind = "apr-legacy" if name.startswith("legacy_") else expected[record["kind"]]
            assert aprfmt.detect(vectors_dir / record["file"]) == kind, name


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (v1_bytes(), "apr-v1"),
        (b"APRN", "apr-v1"),
        (b"APRN\0", "apr-v1"),
        (v2_head(b"APR\0", 0x0400) + b"{}", "apr-v2"),
        (v2_head(b"APR\0", 0, major=1) + b"{}", "apr-v2"),
        (v2_head(b"APR\0", 1) + b"{}", "apr-v2"),
        (v2_head(b"APR\0", 1) + b"\x04\0\0\0", "apr-legacy"),
        (v2_head(b"APR\0", 2) + b"\x28\xb5\x2f\xfd", "apr-legacy"),
        (b"APR\0\2\0", "apr-v2"),
        (b"APR\0" + bytes(70), "unsupported"),
        (b"APR\0\1\0\0\0" + bytes(70), "unsupported"),
        (v2_head(b"APR2"), "apr-legacy"),
        (v2_head(b"APRN"), "apr-legacy"),
        (v2_head(b"APR2", 0x0400), "corrupt"),
        (v2_head(b"APRN", 0x0400), "corrupt"),
        (v2_head(b"APR2", major=3), "corrupt"),
        (v2_head(b"APR2")[:-1], "corrupt"),
        (v2_head(b"APR1"), "corrupt"),
        (b"APRN\2\0" + bytes(80), "unsupported"),
        (b"APRN\3", "unsupported"),
        (EMPTY_APR1, "apr-legacy"),
        (wrap(b"APR2", 0, EMPTY_APR1), "apr-legacy"),
        (wrap(b"APR2", 0, EMPTY_APR1, 5), "corrupt"),
        (wrap(b"APR2", 1, lz4.block.compress(EMPTY_APR1)), "apr-legacy"),
        (wrap(b"APR2", 2, zstandard.compress(EMPTY_APR1)), "apr-legacy"),
        (wrap(b"APR\0", 0, EMPTY_APR1), "apr-legacy"),
        (wrap(b"APR\0", 1, lz4.block.compress(EMPTY_APR1)), "apr-legacy"),
        (wrap(b"APR\0", 2, zstandard.compress(EMPTY_APR1)), "apr-legacy"),
        (wrap(b"APR\0", 2, zstandard.compress(bytes(256)), 256), "apr-legacy"),  # low byte of the length is 0, as in v2
        (tuner(b"APR1", b'{"kind":1}'), "unsupported"),
        (tuner(b"APR2", b"[1,2,3]"), "unsupported"),
        (b"APR1", "corrupt"),
        (b"APR2", "corrupt"),
        (b"APR", "truncated"),
        (b"APRIL is a month", "unknown"),
        (b"APR3" + bytes(70), "unknown"),
    ],
)
def test_detection(put: Put, data: bytes, expected: str) -> None:
    errors = {
        "corrupt": CorruptError,
        "truncated": TruncatedError,
        "unsupported": UnsupportedError,
        "unknown": UnknownFormatError,
    }
    if expected in errors:
        with pytest.raises(errors[expected]):
            aprfmt.detect(put(data))
    else:
        assert aprfmt.detect(put(data)) == expected


@pytest.mark.parametrize(("magic", "text", "what"), [(b"APR1", b"{}", "tuner model"), (b"APR2", b"[]", "samples")])
def test_tuner_caches_are_named(put: Put, magic: bytes, text: bytes, what: str) -> None:
    with pytest.raises(UnsupportedError, match=what):
        aprfmt.open(put(tuner(magic, text)))


def test_a_flagged_plain_file_with_spaces_in_its_metadata_is_plain(put: Put) -> None:
    text = b' \n{ "model_type": "x" } '
    data = v2_head(b"APR\0", 0x0401, size=len(text)) + text.ljust(64, b"\0")
    assert aprfmt.detect(put(with_footer(data))) == "apr-v2"


def test_a_json_index_is_told_from_a_binary_one(put: Put) -> None:
    index = json.dumps([{"name": "weights", "dtype": "json", "shape": [2], "offset": 0, "size": 2}]).encode()
    body = b"{}".ljust(64) + index + b"{}"
    head = v2_head(b"APR\0", 0, data=128 + len(index))
    assert aprfmt.detect(put(head + body)) == "apr-legacy"
    assert aprfmt.detect(put(head[:40] + bytes(4) + head[44:] + body)) == "apr-legacy"  # header CRC never written
    assert aprfmt.detect(put(v2_head(b"APR\0", 0x0400, data=128 + len(index)) + body)) == "apr-v2"


@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(magic=st.sampled_from([b"APR\0", b"APRN", b"APR1", b"APR2", b"APR"]), rest=st.binary(max_size=150))
def test_any_bytes_give_an_answer_or_an_apr_error(put: Put, magic: bytes, rest: bytes) -> None:
    with contextlib.suppress(AprError):
        aprfmt.open(put(magic + rest)).close()
