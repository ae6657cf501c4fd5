"""Damaged and hostile GGUF files: each is refused at once, with the right error."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_images import image, info, pair, string
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from natives import gguf_parts
from turns import examples

import aprfmt
from aprfmt.errors import AprError, CorruptError, LimitError, TruncatedError, UnsupportedError
from aprfmt.formats import gguf, gguf_fields
from aprfmt.formats.gguf_fields import Cursor
from aprfmt.limits import MAX_ARRAY_DEPTH, MAX_ELEMENT_BYTES, MAX_KEY_BYTES, MAX_NAME_BYTES, MAX_STRING_BYTES

Put = Callable[[bytes], Path]

U32, STRING, ARRAY = 4, 8, 9
HUGE = 1 << 62
ONE = info(b"t", [4], 0, 0)


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + body


def nested(depth: int) -> bytes:
    """An array of `depth` levels; the innermost is empty."""
    return array(ARRAY, 1) * (depth - 1) + array(U32, 0)


def alignment(value: int, kind: int = U32, form: str = "<I") -> bytes:
    return pair(b"general.alignment", kind, struct.pack(form, value))


CASES: dict[str, tuple[bytes, type[AprError], str]] = {
    "version 0": (image(version=0), CorruptError, "version 0"),
    "version 1": (image(version=1), UnsupportedError, "version 1"),
    "version 4": (image(version=4), UnsupportedError, "version 4"),
    "big-endian version": (image(version=3 << 24), UnsupportedError, "big-endian"),
    "big-endian magic": (b"FUGG" + image()[4:], UnsupportedError, "big-endian"),
    "magic only": (b"GGUF", TruncatedError, "the version"),
    "key count": (image(counts=(0, HUGE)), TruncatedError, "keys"),
    "tensor count": (image(counts=(HUGE, 0)), TruncatedError, "tensors"),
    "both counts": (image(counts=((1 << 64) - 1, (1 << 64) - 1)), TruncatedError, "keys"),
    "key length": (image([struct.pack("<Q", 20) + b"k" * 8]), TruncatedError, "a key"),
    "key cap": (image([pair(b"k" * (MAX_KEY_BYTES + 1), 0, b"\0")]), LimitError, "a key"),
    "empty key": (image([pair(b"", 2, b"\0\0")]), CorruptError, "empty"),
    "key twice": (image([pair(b"k", 0, b"\0")] * 2), CorruptError, "twice"),
    "value type": (image([pair(b"k", 13, b"\0")]), CorruptError, "unknown type 13"),
    "element type": (image([pair(b"k", ARRAY, array(99, 0))]), CorruptError, "unknown type 99"),
    "string length": (image([pair(b"k", STRING, struct.pack("<Q", HUGE))]), TruncatedError, "the value"),
    "array count": (image([pair(b"k", ARRAY, array(U32, HUGE))]), TruncatedError, "elements"),
    "string array count": (image([pair(b"k", ARRAY, array(STRING, HUGE))]), TruncatedError, "elements"),
    "long string": (
        image([pair(b"general.name", STRING, string(b"x" * (MAX_STRING_BYTES + 1)))]),
        LimitError,
        "general.name",
    ),
    "long element": (
        image([pair(b"k", ARRAY, array(STRING, 1, string(b"x" * (MAX_ELEMENT_BYTES + 1))))]),
        LimitError,
        "a string of 'k'",
    ),
    "empty strings": (
        image([pair(b"k", ARRAY, array(STRING, 6_000_000, bytes(48_000_000)))]),
        LimitError,
        "bytes of memory",
    ),
    "long names": (
        image([], [info(b"%04d" % i + b"n" * 65_000, [0], 0, 0) for i in range(400)], bytes(32)),
        LimitError,
        "the tensor names have",
    ),
    "string in an array": (
        image([pair(b"k", ARRAY, array(STRING, 2, struct.pack("<QQ", (1 << 64) - 1, 0)))]),
        TruncatedError,
        "strings",
    ),
    "array of arrays count": (image([pair(b"k", ARRAY, array(ARRAY, HUGE))]), TruncatedError, "elements"),
    "nesting": (image([pair(b"k", ARRAY, nested(MAX_ARRAY_DEPTH + 1))]), LimitError, "nested"),
    "deep nesting": (image([pair(b"k", ARRAY, nested(100_000))]), LimitError, "nested"),
    "alignment 0": (image([alignment(0)]), CorruptError, "power of two"),
    "alignment 48": (image([alignment(48)]), CorruptError, "power of two"),
    "alignment as u64": (image([alignment(32, 10, "<Q")]), CorruptError, "power of two"),
    "dims": (image([], [info(b"t", [1] * 5, 0, 0)], bytes(32)), LimitError, "5 dimensions"),
    "dims count": (image([], [string(b"t") + b"\xff" * 24]), LimitError, "dimensions"),
    "dim over 2^63": (image([], [info(b"t", [0, 1 << 63], 0, 0)], bytes(32)), LimitError, "2^63"),
    "elements over 2^63": (image([], [info(b"t", [1 << 32] * 4, 0, 0)], bytes(32)), LimitError, "elements"),
    "name cap": (image([], [info(b"n" * (MAX_NAME_BYTES + 1), [4], 0, 0)], bytes(32)), LimitError, "a tensor name"),
    "name twice": (image([], [ONE, info(b"t", [4], 0, 32)], bytes(64)), CorruptError, "duplicate tensor name"),
    "tensor type": (image([], [info(b"t", [4], 31, 0)], bytes(32)), UnsupportedError, "GGML type 31"),
    "row of half a block": (image([], [info(b"t", [48], 2, 0)], bytes(64)), CorruptError, "row of 48"),
    "unaligned": (image([], [info(b"t", [4], 0, 16)], bytes(64)), CorruptError, "alignment 32"),
    "outside": (image([], [info(b"t", [4], 0, 64)], bytes(64)), TruncatedError, "is cut short|are missing"),
    "far outside": (
        image([], [info(b"t", [4], 0, (1 << 64) - 32)], bytes(64)),
        TruncatedError,
        "is cut short|are missing",
    ),
    "too large": (image([], [info(b"t", [HUGE], 0, 0)], bytes(64)), TruncatedError, "is cut short|are missing"),
    "overlap": (image([], [ONE, info(b"u", [4], 0, 0)], bytes(64)), CorruptError, "overlaps 't'"),
    "overlap inside": (
        image([], [info(b"t", [32], 0, 0), info(b"u", [4], 0, 32)], bytes(128)),
        CorruptError,
        "overlaps 't'",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(put: Put, name: str) -> None:
    data, kind, text = CASES[name]
    started = time.perf_counter()
    with pytest.raises(kind, match=text.replace("^", r"\^")) as caught:
        aprfmt.open(put(data))
    assert time.perf_counter() - started < 1
    assert type(caught.value) is kind
    assert caught.value.path is not None
    assert caught.value.exit_code == 4


def test_the_characters_of_an_array_are_counted(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    data = image([pair(b"k", ARRAY, array(STRING, 5, string(b"x" * 60) * 5))])
    monkeypatch.setattr(gguf_fields, "MAX_PARSED_BYTES", 5 * (80 + 4 * 60))
    aprfmt.open(put(data)).close()
    monkeypatch.setattr(gguf_fields, "MAX_PARSED_BYTES", 5 * (80 + 4 * 60) - 1)
    with pytest.raises(LimitError, match="arrays up to 'k'"):
        aprfmt.open(put(data))


@pytest.mark.parametrize("name", ["version 1", "big-endian version", "big-endian magic", "outside", "tensor type"])
def test_the_hint_says_what_to_do(put: Put, name: str) -> None:
    with pytest.raises(AprError) as caught:
        aprfmt.open(put(CASES[name][0]))
    assert caught.value.hint


def test_the_type_error_names_the_tensor(put: Put) -> None:
    with pytest.raises(UnsupportedError) as caught:
        aprfmt.open(put(CASES["tensor type"][0]))
    assert caught.value.tensor == "t"


def test_a_49_byte_file_with_a_huge_array_fails_at_once(put: Put) -> None:
    data = image([pair(b"a", ARRAY, array(STRING, 1 << 40))])
    assert len(data) == 49
    started = time.perf_counter()
    with pytest.raises(TruncatedError):
        aprfmt.open(put(data))
    assert time.perf_counter() - started < 0.1


def outcome(data: bytes, count: int, skip: Callable[[Cursor, int], object]) -> object:
    """Where a walk over `count` strings ends, or its error."""
    cursor = Cursor(data, "a.gguf")
    try:
        skip(cursor, count)
    except AprError as error:
        return type(error), str(error)
    return cursor.pos


def skip_one_by_one(cursor: Cursor, count: int) -> None:
    for _ in range(count):
        length = cursor.u64("the strings of 'k'")
        cursor.need(length, "the strings of 'k'")
        cursor.pos += length


LENGTHS = st.one_of(
    st.integers(0, 90), st.sampled_from([0, 1, 63, 64, 254, 255, 256, 257, 300, 1 << 16, 5 + (1 << 56)])
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(LENGTHS, max_size=40), st.integers(0, 3), st.integers(0, 300), st.sampled_from([b"\0", b"\1", b"a"]))
def test_strings_skipped_by_fours_end_where_single_ones_do(
    lengths: list[int], more: int, missing: int, filler: bytes
) -> None:
    data = b"".join(struct.pack("<Q", length) + filler * min(length, 400) for length in lengths)
    data, count = data[: max(0, len(data) - missing)], len(lengths) + more
    found, wanted = (outcome(data, count, skip) for skip in (lambda c, n: c._skip_strings("k", n), skip_one_by_one))
    if isinstance(wanted, int):
        assert found == wanted
    else:
        assert isinstance(found, tuple)
        assert found[0] is TruncatedError


@pytest.mark.parametrize("place", range(9))
@pytest.mark.parametrize("byte", range(1, 8))
def test_no_byte_of_a_length_is_overlooked(place: int, byte: int) -> None:
    fields = [bytearray(string(b"abc")) for _ in range(9)]
    fields[place][byte] = 1  # what follows reads as strings if only the first byte counts
    data = b"".join(fields) + bytes(1 << 17)
    found, wanted = (outcome(data, 9, skip) for skip in (lambda c, n: c._skip_strings("k", n), skip_one_by_one))
    assert (found == wanted) if isinstance(wanted, int) and wanted < MAX_ELEMENT_BYTES else isinstance(found, tuple)


def test_the_header_cap(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_fields, "MAX_HEADER_BYTES", 4096)
    body = array(STRING, 500, string(b"x") * 500)
    with pytest.raises(LimitError, match="limit of a header"):
        aprfmt.open(put(image([pair(b"k", ARRAY, body)])))
    with aprfmt.open(put(image([pair(b"k", 0, b"\1")], [ONE], bytes(8192)))) as model:
        assert model.metadata["k"] == 1


@pytest.mark.parametrize(("name", "cap"), [("MAX_KEYS", 2), ("MAX_TENSORS", 1)])
def test_the_caps_of_keys_and_tensors(name: str, cap: int, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(image([pair(b"k", 0, b"\1"), pair(b"l", 0, b"\1")], [ONE], bytes(8192)))
    monkeypatch.setattr(gguf, name, cap)
    aprfmt.open(path).close()
    monkeypatch.setattr(gguf, name, cap - 1)
    with pytest.raises(LimitError, match="2 keys and 1 tensors"):
        aprfmt.open(path)


@pytest.mark.parametrize("depth", [1, 2, MAX_ARRAY_DEPTH])
def test_nesting_up_to_the_cap_is_read(put: Put, depth: int) -> None:
    with aprfmt.open(put(image([pair(b"k", ARRAY, nested(depth))]))) as model:
        value = model.metadata["k"]
    for _ in range(depth - 1):
        (value,) = value
    assert value == []


def test_empty_tensors_and_scalars_are_read(put: Put) -> None:
    infos = [
        info(b"a", [4], 0, 0),
        info(b"none", [4, 0], 0, 32),
        info(b"none too", [256, 0], 12, 32),
        info(b"scalar", [], 0, 32),
        info(b"last", [0], 0, 64),
    ]
    with aprfmt.open(put(image([], infos, bytes(36)))) as model:
        assert [t.n_bytes for t in model.tensors.values()] == [16, 0, 0, 4, 0]
        assert model.tensors["none"].shape == (0, 4)
        assert model.tensors["scalar"].shape == ()
        assert all(len(t.raw()) == t.n_bytes for t in model.tensors.values())


def test_gaps_between_tensors_are_no_error(put: Put) -> None:
    infos = [info(b"b", [4], 0, 128), info(b"a", [4], 0, 0)]
    with aprfmt.open(put(image([], infos, bytes(144)))) as model:
        assert list(model.tensors) == ["b", "a"]


def test_long_names_are_warned_of(put: Put) -> None:
    infos = [info(b"n" * 63, [4], 0, 0), info(b"m" * 64, [4], 0, 32)]
    with aprfmt.open(put(image([], infos, bytes(64)))) as model:
        assert len(model.warnings) == 1
        assert "m" * 64 in model.warnings[0]


def test_every_cut_of_a_small_file_is_refused(put: Put) -> None:
    strings = array(STRING, 3, string(b"one") + string(b"") + string(b"three"))
    pairs = [pair(b"k", ARRAY, strings), pair(b"n", ARRAY, array(ARRAY, 1, array(U32, 2, bytes(8)))), alignment(32)]
    data = image(pairs, [ONE, info(b"u", [256, 2], 12, 32)], bytes(32 + 288))
    aprfmt.open(put(data)).close()
    for size in [*range(len(data) - 300), *range(len(data) - 300, len(data), 13)]:
        with pytest.raises(AprError) as caught:
            aprfmt.open(put(data[:size]))
        assert caught.value.exit_code == (3 if size < 4 else 4), size


def test_twenty_cuts_of_a_real_file_are_refused(smollm2_gguf: Path, tmp_path: Path) -> None:
    size = smollm2_gguf.stat().st_size
    with aprfmt.open(smollm2_gguf) as model:
        part = gguf_parts(model)[0]
        marks = [e.value_start + 5 for e in part.kv.entries.values() if e.count][:4]
        start = min(tensor.offset for tensor in model.tensors.entries)
        marks += [start, start - 40, start - 47]
    cuts = [0, 1, 3, 4, 7, 23, 24, 31, *marks, size // 2, size - 1, size - 4096, size // 3, 100_000]
    cuts = sorted({*cuts, 5_000_000})
    assert len(cuts) >= 20
    with smollm2_gguf.open("rb") as file:
        head = file.read(8 << 20)
    path = tmp_path / "cut.gguf"
    for cut in cuts:
        path.write_bytes(head[:cut])
        if cut > len(head):
            with path.open("r+b") as file:  # a sparse tail: only its length matters
                file.truncate(cut)
        with pytest.raises(AprError) as caught:
            aprfmt.open(path)
        assert caught.value.exit_code in (3, 4), cut


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_flipped_bytes_raise_nothing_else(put: Put, data: st.DataObject) -> None:
    strings = array(STRING, 2, string(b"one") + string(b"three"))
    good = image([pair(b"k", ARRAY, strings), alignment(32)], [ONE, info(b"u", [32, 2], 8, 32)], bytes(100))
    bad = bytearray(good)
    for position in data.draw(st.lists(st.integers(4, len(good) - 101), min_size=1, max_size=6)):
        bad[position] = data.draw(st.sampled_from([0, 1, 2, 9, 31, 127, 128, 255]))
    try:
        with aprfmt.open(put(bytes(bad))) as model:
            dict(model.metadata)
            for tensor in model.tensors.values():
                tensor.raw()
    except AprError as error:
        if error.exit_code != 4:
            raise
