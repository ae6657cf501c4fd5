"""MessagePack of v1: the vectors' bytes, the msgpack library as an oracle, hostile input."""

from __future__ import annotations

import contextlib
import math
import struct
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.errors import AprError, CorruptError, LimitError, TruncatedError, UsageError
from aprfmt.formats.apr1_metadata import dump_metadata as dump
from aprfmt.formats.apr1_metadata import parse_metadata as parse

BASE = {"created_at": "0", "aprender_version": "0"}
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=8), inner, max_size=20),
    max_leaves=40,
)


@pytest.mark.parametrize("name", ["v1_metadata_full_license", "v1_golden_none", "v1_zstd3_vec"])
def test_writes_the_bytes_of_the_vectors(records: dict[str, Any], name: str) -> None:
    record = records[name]
    assert dump(record["input"]["metadata"]).hex() == record["v1_metadata_msgpack_hex"]


def test_reads_what_the_vectors_hold(records: dict[str, Any]) -> None:
    record = records["v1_metadata_full_license"]
    assert parse(bytes.fromhex(record["v1_metadata_msgpack_hex"]), "x") == record["v1_metadata"]


@given(st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=20))
def test_agrees_with_msgpack_in_both_directions(custom: dict[str, Any]) -> None:
    raw = dump(BASE | {"custom": custom})
    expected = BASE | ({"custom": custom} if custom else {})
    assert parse(raw, "x") == expected == msgpack.unpackb(raw, strict_map_key=False)
    assert parse(msgpack.packb(expected), "x") == expected
    assert len(raw) == len(msgpack.packb(expected))  # integers and lengths in their shortest form


@pytest.mark.parametrize(
    ("value", "hex_bytes"),
    [
        (0, "00"),
        (127, "7f"),
        (128, "cc80"),
        (255, "ccff"),
        (256, "cd0100"),
        (65536, "ce00010000"),
        (1 << 32, "cf0000000100000000"),
        ((1 << 64) - 1, "cfffffffffffffffff"),
        (-1, "ff"),
        (-32, "e0"),
        (-33, "d0df"),
        (-128, "d080"),
        (-129, "d1ff7f"),
        (-32769, "d2ffff7fff"),
        (-(1 << 31) - 1, "d3ffffffff7fffffff"),
        (1.0, "cb3ff0000000000000"),
        ("x" * 31, "bf" + "78" * 31),
        ("x" * 32, "d920" + "78" * 32),
        ([None] * 16, "dc0010" + "c0" * 16),
    ],
)
def test_shortest_forms(value: Any, hex_bytes: str) -> None:
    assert dump(BASE | {"custom": {"k": value}}).hex().endswith("a16b" + hex_bytes)


def test_typed_order_and_what_is_left_out() -> None:
    raw = dump({"metrics": {}, "description": None, "model_name": "n", **BASE, "training": {}})
    assert list(parse(raw, "x")) == ["created_at", "aprender_version", "model_name", "training"]


def test_f32_fields_are_float32_whatever_number_is_given() -> None:
    params = {"temperature": 3, "alpha": 0.1, "epochs": 1}
    raw = dump(BASE | {"distillation_info": {"method": "Standard", "params": params}})
    assert b"\xabtemperature\xca" + struct.pack(">f", 3.0) in raw
    assert b"\xa5alpha\xca" + struct.pack(">f", 0.1) in raw


def test_defaults() -> None:
    values = parse(dump({}), "x")
    assert int(str(values["created_at"])) > 1_600_000_000
    assert values["aprender_version"] == "aprfmt"


@pytest.mark.parametrize(
    "metadata",
    [
        {"unknown": 1},
        {"training": {"epochs": 1}},
        {"training": 5},
        {"custom": {"k": 1 << 64}},
        {"custom": {"k": -(1 << 63) - 1}},
        {"custom": {"k": object()}},
        {"custom": {"k": b"bytes"}},
        {"custom": {1: 2}},
        {"custom": {"k": "\ud800"}},
        {"distillation_info": {"params": {"alpha": "x"}}},
        {"distillation_info": {"params": {"alpha": 1e300}}},
    ],
)
def test_refuses_what_the_format_cannot_hold(metadata: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        dump(metadata)


def test_refuses_to_write_deep_nesting() -> None:
    deep: Any = 1
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(UsageError, match="nested"):
        dump({"custom": {"k": deep}})


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"", TruncatedError),
        (b"\x90", CorruptError),  # an array
        (b"\xc0", CorruptError),
        (b"\x80\x00", CorruptError),  # a byte too many
        (b"\x81\x01\x02", CorruptError),  # key is a number
        (b"\x82\xa1a\x01\xa1a\x02", CorruptError),  # key twice
        (b"\x81\xa1a\xc4\x01x", CorruptError),  # binary
        (b"\x81\xa1a\xd4\x01x", CorruptError),  # extension
        (b"\x81\xa1a\xc1", CorruptError),  # never used
        (b"\x81\xa1\xff\x01", CorruptError),  # no UTF-8
        (b"\x81\xa1a", TruncatedError),
        (b"\x81\xa1a\xdb\xff\xff\xff\xffx", TruncatedError),
        (b"\x81\xa1a\xdd\xff\xff\xff\xff", TruncatedError),
        (b"\xdf\xff\xff\xff\xff", TruncatedError),
        (b"\x81\xa1a" + b"\x91" * 5000, LimitError),
        (b"\x81\xaacreated_at\x01", CorruptError),
        (b"\x81\xa7license\xa3MIT", CorruptError),
    ],
)
def test_refuses_malformed_bytes(raw: bytes, kind: type[CorruptError]) -> None:
    with pytest.raises(kind) as caught:
        parse(raw, "m.apr", 32)
    assert caught.value.path == "m.apr"


def test_depth_limit_is_exact() -> None:
    inner = b"\x91" * 125 + b"\x90"  # with the outer map: 127 levels
    assert parse(b"\x81\xa1a" + inner, "x")
    with pytest.raises(LimitError):
        parse(b"\x81\xa1a\x91" + inner, "x")


@given(st.binary(max_size=200))
def test_any_bytes_give_a_map_or_an_apr_error(raw: bytes) -> None:
    for data in (raw, b"\x81\xa1a" + raw):
        with contextlib.suppress(AprError):
            assert isinstance(parse(data, "x"), dict)


def test_nan_and_infinity_survive() -> None:
    values = parse(dump(BASE | {"metrics": {"a": math.nan, "b": math.inf}}), "x")["metrics"]
    assert isinstance(values, dict)
    assert isinstance(values["a"], float)
    assert math.isnan(values["a"])
    assert values["b"] == math.inf


def test_claimed_lengths_are_not_allocated() -> None:
    """A hundred arrays inside each other that each claim a million elements: 8 bytes each would be 800 MB."""
    claims = (b"\xdd" + (1 << 20).to_bytes(4, "big")) * 100
    raw = b"\x81\xa1a" + claims + bytes(1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(TruncatedError):
            parse(raw, "x")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
