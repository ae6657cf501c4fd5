from __future__ import annotations

import json
import math
import struct
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.errors import CorruptError, LimitError, UsageError
from aprfmt.io import jsonx

F32 = [
    (1e-5, "0.00001"), (1e-6, "0.000001"), (1e-7, "1e-7"), (1.5e-7, "1.5e-7"), (1e-12, "1e-12"), (10000,
    "10000.0"),
    (500000, "500000.0"), (1e6, "1000000.0"), (1e12, "1000000000000.0"), (1e13, "1e13"), (0.1, "0.1"), (0.0,
    "0.0"),
    (-0.0, "-0.0"), (math.nan, "null"), (math.inf, "null"), (1e39, "null"), (9.999999974752427e-07,
    "0.000001"),
    (-2.5, "-2.5"), (16777216, "16777216.0"), (3.4028234663852886e38, "3.4028235e38"),
    (1.401298464324817e-45, "1e-45"),
]  # fmt: skip
F64 = [
    (1e-6, "1e-6"), (1e-5, "0.00001"), (-1.5e-5, "-0.000015"), (1e15, "1000000000000000.0"), (1e16, "1e16"),
    (9.999999974752427e-07, "9.999999974752427e-7"), (0.10000000149011612, "0.10000000149011612"), (0.0,
    "0.0"),
    (-0.0, "-0.0"), (math.nan, "null"), (-math.inf, "null"), (16.0, "16.0"), (1.2345678901234568e17,
    "1.2345678901234568e17"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), F32)
def test_f32_text(value: float, text: str) -> None:
    assert jsonx.f32_text(value) == text


@pytest.mark.parametrize(("value", "text"), F64)
def test_f64_text(value: float, text: str) -> None:
    assert jsonx.f64_text(value) == text


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_f32_text_is_the_shortest_that_comes_back(value: float) -> None:
    import numpy as np

    text = jsonx.f32_text(value)
    assert struct.pack("<f", float(text)) == struct.pack("<f", value)
    shortest = np.format_float_scientific(np.float32(value), unique=True, trim="-")
    digits = [t.lower().lstrip("-").partition("e")[0].replace(".", "").strip("0") for t in (text, shortest)]
    assert digits[0] == digits[1]


@pytest.mark.parametrize("exponent", range(-149, 128))
def test_f32_text_at_powers_of_two(exponent: int) -> None:
    import numpy as np

    value = 2.0**exponent
    digits = np.format_float_scientific(np.float32(value), unique=True, trim="-").partition("e")[0].replace(".", "")
    assert jsonx.f32_text(value).partition("e")[0].replace(".", "").strip("0") == digits.strip("0")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_f64_text_comes_back(value: float) -> None:
    assert struct.pack("<d", float(jsonx.f64_text(value))) == struct.pack("<d", value)


@given(st.recursive(
    st.none() | st.booleans() | st.integers(jsonx.INT_MIN, jsonx.INT_MAX) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
))  # fmt: skip
def test_dumps_and_loads_are_inverse(value: Any) -> None:
    text = jsonx.dumps(value)
    assert jsonx.loads(text.encode()) == value
    assert json.loads(text) == value


@given(st.text(max_size=30))
def test_strings_are_written_as_the_reference_does(text: str) -> None:
    short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    want = "".join(short.get(c) or (f"\\u{ord(c):04x}" if ord(c) < 0x20 else c) for c in text)
    assert jsonx.dumps(text) == f'"{want}"'


def test_nested_keys_are_sorted_by_bytes() -> None:
    assert jsonx.dumps({"\uffff": 1, "\U0001f600": 2, "b": {"z": [], "A": {}}}) == (
        '{"b":{"A":{},"z":[]},"\uffff":1,"\U0001f600":2}'
    )


def test_lists_of_strings_and_of_integers_come_out_as_their_items_do() -> None:
    strings = [f'{i}\x00\x1f"\\/\x7f\u2028é😀\ud800' for i in range(100)]
    for items in (strings, tuple(strings), [0, -1, jsonx.INT_MIN, jsonx.INT_MAX], [True, 1]):
        assert jsonx.dumps(items) == "[" + ",".join(map(jsonx.dumps, items)) + "]"


_ODD: tuple[Any, ...] = (1e-7, 2.0**70, float("nan"), None, True, (1, "a"), [], {}, {"b": 1.5, "a": 2}, -0.0)


@pytest.mark.parametrize("odd", ["plain", *_ODD], ids=repr)
def test_long_lists_and_objects_come_out_as_their_items_do(odd: Any) -> None:
    items = [*([f"é{i}", i, [i, "\n"], {"z": i, "\uffff": [], "a": "😀"}] for i in range(80)), [odd], odd]
    want = [jsonx.dumps(item) for item in items]
    assert jsonx.dumps(items) == f"[{','.join(want)}]"
    rows = {f"k{80 - i:02}": item for i, item in enumerate(items)}
    pairs = sorted(zip(rows, want, strict=True))
    assert jsonx.dumps(rows) == "{" + ",".join(f'"{key}":{text}' for key, text in pairs) + "}"


@pytest.mark.parametrize("wrong", [object(), {1: 2}, 1 << 64, b"x"])
def test_long_lists_and_objects_refuse_the_same(wrong: object) -> None:
    many = ["a"] * 80
    for value in (
        [*many, wrong],
        [*many, [wrong]],
        dict(enumerate(many)),
        {**{f"{i}": "a" for i in range(80)}, "b": wrong},
    ):
        with pytest.raises(UsageError):
            jsonx.dumps(value)


@pytest.mark.parametrize("value", [object(), {1: 2}, 1 << 64, -(1 << 63) - 1, [1 << 64], {"a": b"x"}])
def test_dumps_refuses_what_json_cannot_hold(value: Any) -> None:
    with pytest.raises(UsageError):
        jsonx.dumps(value)


BROKEN = [
    b"", b" ", b"{", b'{"a":1,}', b'{"a":1}\0', b'{"a":1} x', b"\xef\xbb\xbf{}", b'"\xff"', b'"\\ud800"',
    b'"\\udc00"',
    b'"\\ud800\\ud800\\udc00"', b'"\\ud800 \\udc00"', b'"\\ud83d\\n\\ude00"', b'{"a":"\\ud800","a":1}',
    b"NaN", b"Infinity",
    b"-Infinity", b"1e999", b"-1e400", b"[01]", b"[1.]", b"[.5]", b"[+1]", b'"\x01"', b"['a']", b"9" * 400,
    b"tru", b"[1 2]",
]  # fmt: skip


@pytest.mark.parametrize("raw", BROKEN, ids=lambda raw: raw[:20].hex() or "empty")
def test_broken_json_is_refused(raw: bytes) -> None:
    with pytest.raises(CorruptError):
        jsonx.loads(raw)


@pytest.mark.parametrize(("raw", "value"), [
    (b' {\n"a" : [ 1 , 2.0e0 ]\t}\r', {"a": [1, 2.0]}),
    (b'"\\ud83d\\ude00\\u00e9\\/"', "😀é/"),
    (b'"\\\\ud800"', "\\ud800"),
    (b'{"a":1,"a":2}', {"a": 2}),
    (b"18446744073709551615", (1 << 64) - 1),
    (b"18446744073709551616", float(1 << 64)),
    (b"-9223372036854775809", float(-(1 << 63) - 1)),
    (b"1e-400", 0.0),
])  # fmt: skip
def test_what_the_reference_accepts(raw: bytes, value: Any) -> None:
    got = jsonx.loads(raw)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    "around", ["{}", "[{}]", '{{"a":{}}}', '["-0 ",{},"x"]', "[" + "7," * 500 + "{}]", '[[[{},"x"]]]']
)
@pytest.mark.parametrize(
    "number", ["-0", "-0.0", "-0e1", "18446744073709551616", "-9223372036854775809", "9" * 30, "1e308"]
)
def test_numbers_are_read_alike_wherever_they_stand(around: str, number: str) -> None:
    """Texts whose numbers are all plain are read without a hook for each."""
    got = repr(jsonx.loads(around.format(number).encode()))
    assert got == around.replace('{{"a"', "{{'a'").replace('"', "'").replace(",", ", ").replace(":", ": ").format(
        float(number)
    )


@pytest.mark.parametrize("number", ["1e400", "-1e999", "9" * 400, "1" * 5000])
def test_numbers_beyond_a_float_are_refused_wherever_they_stand(number: str) -> None:
    for around in ("{}", '["x",{}]', "[[1.5,{}]]"):
        with pytest.raises(CorruptError, match="exceeds the range"):
            jsonx.loads(around.format(number).encode())


def test_depth_limit_is_127_levels() -> None:
    assert jsonx.loads(b"[" * 127 + b"]" * 127)
    assert jsonx.loads(b'["' + b"[" * 500 + b'"]') == ["[" * 500]
    for depth in (128, 2000, 200_000):
        with pytest.raises(LimitError):
            jsonx.loads(b"[" * depth + b"]" * depth)
    deep: Any = []
    for _ in range(127):
        deep = {"a": deep}
    with pytest.raises(LimitError):
        jsonx.dumps(deep)
    deep = ["a"]
    for _ in range(125):
        deep = [deep]
    assert jsonx.dumps([deep] * 80)
    with pytest.raises(LimitError):
        jsonx.dumps([[deep]] * 80)


def test_offsets_are_bytes() -> None:
    with pytest.raises(CorruptError) as caught:
        jsonx.loads('{"é":}'.encode())
    assert caught.value.offset == 6


def test_numpy_floats_are_written_as_numbers() -> None:
    assert jsonx.dumps([np.float64(1.5), np.float64(-0.0), np.float64(1e-6)]) == "[1.5,-0.0,1e-6]"


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"0," * 40 + b"0]",
        b"[" * 30 + b"]" * 30,
        b'{"a":' * 12 + b"1" + b"}" * 12,
        b'["' + b"x" * 1000 + b'"]',
        '["\U0001f600","'.encode() + b'x","x' * 130 + b'"]',
        '["\u4e00","'.encode() + b'x","x' * 190 + b'"]',
        b'["\\ud83d\\ude00","' + b'x","x' * 130 + b'"]',
        b'["\\u4e00","' + b'x","x' * 190 + b'"]',
    ],
    ids=[
        "commas",
        "lists",
        "objects",
        "a long string",
        "four bytes a character",
        "two bytes a character",
        "escaped pairs",
        "escapes",
    ],
)
def test_what_may_take_too_much_memory_is_refused(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonx, "_SURELY_SMALL", 0)
    monkeypatch.setattr(jsonx, "_LONG_STRING_BYTES", 64)
    monkeypatch.setattr(jsonx, "_OBJECT_BYTES", {b",": 72, b"[": 96, b"{": 240} if len(text) < 100 else {b",": 1})
    monkeypatch.setattr(jsonx, "MAX_PARSED_BYTES", 2700)
    with pytest.raises(LimitError, match="bytes of memory"):
        jsonx.loads(text)
    monkeypatch.setattr(jsonx, "MAX_PARSED_BYTES", 6000)
    jsonx.loads(text)


LONG = 64
WORDS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), min_size=1, max_size=5)


def unread(raw: bytes) -> Any:
    """What is given where a list of LONG bytes is a long one."""
    with patch.object(jsonx, "_LONG", LONG):
        return jsonx.loads_lazily(raw)


def lazily(raw: bytes) -> Any:
    """The value with what was left unread read."""
    value = unread(raw)
    if not isinstance(value, dict):
        return value
    for name, item in value.items():
        if isinstance(item, jsonx.LongList):
            items = item.read()
            assert (len(item), item.first()) == (len(items), items[0])
            value[name] = items
    return value


@given(WORDS, st.lists(st.integers(-(1 << 59), 1 << 59), min_size=1, max_size=5), st.booleans())
def test_long_lists_are_read_later_and_alike(words: list[str], numbers: list[int], ascii: bool) -> None:
    many = {"a": 1, "tokens": words * LONG, "ids": numbers * LONG, "short": words, "z": {"b": numbers[:1]}}
    raw = json.dumps(many, ensure_ascii=ascii, separators=(",", ":")).encode()
    found = unread(raw)
    assert isinstance(found, dict)
    assert list(found) == list(many)
    if not ascii:  # else there may be escapes of surrogates, which take the long way
        assert isinstance(found["ids"], jsonx.LongList)
    assert lazily(raw) == many


A, B = '"a"' + ',"a"' * LONG, '"b"' + ',"b"' * LONG


@pytest.mark.parametrize(
    "text",
    [
        f'{{"x":[{A}],"x":[{B}]}}', f'{{"x":null,"x":[{A}]}}', f'{{"y":{{"x":[{A}]}},"x":1}}', f'{{"y":{{"x":[{A}]}}}}',
        f'[{{"x":[{A}]}}]', f'{{"x":[{A},1]}}', f'{{"x":[{A},null]}}', f'{{"x" : [{A}]}}', f'{{"y":"\\"x\\":[{A[1:]}}}',
        f'{{"x":[{A}],"\\u0078":1}}', f'{{"x":[{A},"\\ud83d\\ude00"]}}',
    ],
)  # fmt: skip
def test_odd_places_of_long_lists_change_nothing(text: str) -> None:
    try:
        expected = jsonx.loads(text.encode())
    except CorruptError:
        with pytest.raises(CorruptError):
            unread(text.encode())
    else:
        assert lazily(text.encode()) == expected


@pytest.mark.parametrize(
    "text",
    [
        f'{{"x":[{A},]}}', f'{{"x":[{A}"a"]}}', f'{{"x":[{A},"\\x"]}}', f'{{"x":[{A},"\n"]}}', f'{{"x":[{A}],"y":}}',
        f'{{"x":[{A},"\\ud800"]}}', f'{{"x":[{A}]', f'{{"x":[{"01," * LONG}1]}}', f'{{"x":[{A},"\\u12"]}}',
    ],
)  # fmt: skip
def test_damage_in_and_beside_long_lists_is_told_as_ever(text: str) -> None:
    with pytest.raises(CorruptError) as expected:
        jsonx.loads(text.encode())
    with pytest.raises(CorruptError) as found:
        unread(text.encode())
    assert (found.value.message, found.value.offset) == (expected.value.message, expected.value.offset)


def test_long_lists_are_utf_8() -> None:
    raw = f'{{"x":[{A},"?"]}}'.encode().replace(b"?", b"\xff")
    with pytest.raises(CorruptError, match="UTF-8"):
        unread(raw)
