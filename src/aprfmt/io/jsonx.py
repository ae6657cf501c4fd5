"""JSON as the reference implementation reads and writes it: strict parsing, compact text, shortest digits for floats.

Text rules: `"` and `\\` escaped, `\\b \\f \\n \\r \\t` short, other bytes below 0x20 as `\\u00xx`, all else
raw UTF-8; keys of nested objects sorted by bytes; with a float written as d.ddd x 10^e, positional for -5 <=
e <= 15 (f64) or -6 <= e <= 12 (f32), else `d.ddde<exp>` without a plus sign; NaN and infinities are `null`.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NoReturn, cast

from aprfmt.errors import CorruptError, LimitError, UsageError
from aprfmt.io.source import Buffer
from aprfmt.limits import MAX_JSON_DEPTH, MAX_PARSED_BYTES
from aprfmt.types import Json, JsonObject

INT_MIN = -(1 << 63)
INT_MAX = (1 << 64) - 1
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_MINUS_ZERO = re.compile(r"-0(?:[\s,\]}]|$)")
_CONTAINERS = {dict, list}
_NUMBERS = {int, float}
_SMALL_GROUP = 64
_MAYBE_SURROGATE_BYTES = re.compile(rb"\\u[dD][89a-fA-F]")
_MAYBE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(raw: Buffer) -> object:
    """Parses a JSON text in UTF-8.

    Duplicate keys: the last wins. Integers beyond 64 bits become floats. Raises CorruptError with the byte offset for
    anything that RFC 8259 forbids, and for a byte-order mark, lone surrogates, NaN and numbers beyond f64; LimitError
    for more than MAX_JSON_DEPTH levels or MAX_PARSED_BYTES of memory.
    """
    check_size(raw)
    try:
        text = str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise CorruptError("the JSON text is not valid UTF-8", offset=error.start) from None
    if text.startswith("\ufeff"):
        raise CorruptError("the JSON text begins with a byte-order mark", offset=0)
    if _MAYBE_SURROGATE.search(text):
        _check_surrogates(text)
    # Number hooks double the time for a vocabulary, and hardly any text needs them.
    if not _MINUS_ZERO.search(text):
        try:
            value = _decode(_PLAIN_DECODER, text)
            if _check(value):
                return value
        except ValueError:  # an integer of thousands of digits
            pass
    value = _decode(_DECODER, text)
    _check(value)
    return value


# A list of strings or of integers, as `"key":[...]` in compact text. It cannot occur inside a string, where the
# quotation mark before the colon would be escaped.
_LIST = re.compile(rb'"([\w.]+)":\[(?=["\d-])')
_INTEGERS = re.compile(rb"(?:(?:0|-?[1-9]\d{0,17}+),)*+(?:0|-?[1-9]\d{0,17}+)\]")
_TEXTS = re.compile(rb'(?:[^"]*+",")*+[^"]*+')
_FIRST = re.compile(rb'\[("(?:[^"\\]|\\.)*+"|[^,\]]+)')
_ESCAPED = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ALL_BUT_CONTROLS = bytes(range(0x20, 0x100))
_LONG = 1 << 16
"""Lists of at least this many bytes stay unparsed."""
_ESCAPED_QUOTE = re.compile(rb"\\(.)")


_ESCAPED_KEY = re.compile(rb'\\u[0-9a-fA-F]{4}[^"\\]*"\s*:')


class LongList:
    """A list that was checked but not parsed: the strings of a vocabulary take longer than the rest of a file."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def __len__(self) -> int:
        if self._raw[1:2] != b'"':
            return self._raw.count(b",") + 1
        return (self._raw.count(b'"') - _ESCAPED_QUOTE.findall(self._raw).count(b'"')) // 2

    def first(self) -> object:
        """The first item, parsed."""
        found = _FIRST.match(self._raw)
        assert found is not None
        return loads(found[1])

    def read(self) -> list[object]:
        """All items, parsed."""
        return cast("list[object]", loads(self._raw))


def loads_lazily(raw: bytes) -> object:
    """Like `loads`, but long lists of strings or integers in the top-level object become LongList."""
    long, parts, at = dict[bytes, bytes](), list[bytes](), 0
    for key, start, end in _lists(raw):
        if end - start >= _LONG:
            long[key] = raw[start:end]
            parts += [raw[at:start], b"null"]
            at = end
    rest = b"".join([*parts, raw[at:]])
    if not long or any(rest.count(b'"%b":' % key) != 1 for key in long) or _ESCAPED_KEY.search(rest):
        return loads(raw)
    check_size(raw)
    try:
        value = loads(rest)
        for text in long.values():
            str(text, "utf-8")
    except (CorruptError, UnicodeDecodeError):
        return loads(raw)  # reports the offset
    lists = {key.decode(): LongList(text) for key, text in long.items()}
    is_at_top = isinstance(value, dict) and lists.keys() <= value.keys()
    if not is_at_top or any(map(_MAYBE_SURROGATE_BYTES.search, long.values())):
        return loads(raw)
    return cast("dict[str, object]", value) | lists


def _lists(raw: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Start and end of lists under a key that hold only strings or only integers.

    They are valid except for their UTF-8 and surrogates.
    """
    at = 0
    while found := _LIST.search(raw, at):
        at = found.end()
        end = _end_of_strings(raw, at + 1) if raw[at] == ord('"') else _end_of_integers(raw, at)
        if end is not None:
            yield found[1], at - 1, end
            at = end


def _end_of_integers(raw: bytes, at: int) -> int | None:
    found = _INTEGERS.match(raw, at)
    return found and found.end()


def _end_of_strings(raw: bytes, first: int) -> int | None:
    """The position after the bracket of a string list whose first string begins at `first`; None if it is another list.

    It jumps from backslash to backslash and looks only for quotation marks in between: twice as fast.
    """
    at, backslash = first, first
    while True:
        if backslash < at or backslash == first:
            backslash = raw.find(b"\\", at)
            backslash = len(raw) if backslash < 0 else backslash
        texts = _TEXTS.match(raw, at, backslash)
        at = texts.end() if texts else at
        if at < backslash:
            is_end = raw[at : at + 2] == b'"]' and not raw[first:at].translate(None, _ALL_BUT_CONTROLS)
            return at + 2 if is_end else None
        escape = _ESCAPED.match(raw, at)
        if escape is None:
            return None
        at = escape.end()


def check_size(raw: Buffer) -> None:
    """Raises LimitError for a JSON text that may need more than MAX_PARSED_BYTES when parsed.

    The estimate is an upper bound: the text once encoded and once decoded, an object per comma and bracket (also inside
    strings), and a copy of long strings.
    """
    if len(raw) <= _SURELY_SMALL:
        return
    data = bytes(raw)
    width = 4 if data.translate(None, _BELOW_FOUR) else 2 if data.translate(None, _BELOW_TWO) else 1
    if width < 4 and b"\\u" in data:
        width = 4 if _MAYBE_SURROGATE_BYTES.search(data) else max(width, 2 if _WIDE_ESCAPE.search(data) else 1)
    copies = 1 + _has_long_string(data)
    n_bytes = len(data) * (1 + width * copies) + sum(data.count(sign) * size for sign, size in _OBJECT_BYTES.items())
    if n_bytes > MAX_PARSED_BYTES:
        raise LimitError(
            f"parsing {len(data):,} bytes of JSON may take {n_bytes:,} bytes of memory; the limit is "
            f"{MAX_PARSED_BYTES:,}"
        )


_WIDE_ESCAPE = re.compile(rb"\\u(?!00)")
_SURELY_SMALL = 1 << 20
_BELOW_TWO, _BELOW_FOUR = bytes(range(0xC4)), bytes(range(0xF0))
"""UTF-8 bytes that Python stores with one byte, or with at most two bytes, per character."""
_OBJECT_BYTES = {b",": 72, b"[": 96, b"{": 240}
_LONG_STRING_BYTES = 4 << 20


def _has_long_string(data: bytes) -> bool:
    """Whether there may be a string, or a gap, longer than _LONG_STRING_BYTES; certain beyond twice that."""
    starts = range(0, len(data) - _LONG_STRING_BYTES, _LONG_STRING_BYTES)
    return any(data.find(b'"', start, start + _LONG_STRING_BYTES) < 0 for start in starts)


def _decode(decoder: json.JSONDecoder, text: str) -> Json:
    try:
        value: Json = decoder.decode(text)
    except json.JSONDecodeError as error:
        offset = len(text[: error.pos].encode())
        raise CorruptError(f"not valid JSON: {error.msg[:1].lower()}{error.msg[1:]}", offset=offset) from None
    except RecursionError:
        raise LimitError(f"JSON nested deeper than {MAX_JSON_DEPTH} levels") from None
    return value


def _parse_int(text: str) -> int | float:
    if len(text) <= 20 and text != "-0":
        value = int(text)
        if INT_MIN <= value <= INT_MAX:
            return value
    return _parse_float(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise CorruptError(f"the JSON number {text[:40]} exceeds the range of a 64-bit float")
    return value


def _parse_constant(text: str) -> NoReturn:
    raise CorruptError(f"{text} is not a JSON value")


_DECODER = json.JSONDecoder(parse_int=_parse_int, parse_float=_parse_float, parse_constant=_parse_constant)
_PLAIN_DECODER = json.JSONDecoder(parse_constant=_parse_constant)
_PLAIN_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"), sort_keys=True)


def _check_surrogates(text: str) -> None:
    """Raises unless each escaped high surrogate is followed by an escaped low one, and no low one stands alone."""
    expected = -1
    for match in _ESCAPE.finditer(text):
        code = int(match[1], 16) if match[1] else 0
        is_low = 0xDC00 <= code < 0xE000
        if is_low != (match.start() == expected) or 0 <= expected < match.start():
            raise CorruptError("a lone surrogate escape in the JSON text", offset=len(text[: match.start()].encode()))
        expected = match.end() if 0xD800 <= code < 0xDC00 else -1
    if expected >= 0:
        raise CorruptError("a lone surrogate escape in the JSON text", offset=len(text[:expected].encode()))


def _check(value: Json) -> bool:
    """Whether all numbers fit 64-bit integers. Raises LimitError for deep nesting.

    It works level by level on groups of values: a set finds the types of a vocabulary at C speed.
    """
    in_range = True
    depth = -1
    level: list[Json] = [[value]]
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise LimitError(f"JSON nested deeper than {MAX_JSON_DEPTH} levels")
        small: list[Json] = []
        groups: list[Collection[Json]] = [small]
        for node in level:
            children = node.values() if isinstance(node, dict) else cast("list[Json]", node)
            if len(children) < _SMALL_GROUP:
                small += children
            else:
                groups.append(children)
        level = []
        for group in groups:
            kinds = set(map(type, group))
            if kinds & _CONTAINERS:
                level += [child for child in group if type(child) in _CONTAINERS]
            if kinds & _NUMBERS:
                numbers = group if kinds <= _NUMBERS else [c for c in group if type(c) in _NUMBERS]
                in_range = in_range and _in_range(numbers)
    return in_range


def _in_range(numbers: Collection[object]) -> bool:
    values = cast("Collection[int]", numbers)
    return min(values) >= INT_MIN and max(values) <= INT_MAX


def dumps(value: object, _depth: int = 1) -> str:
    """Serializes `value` as compact JSON; mappings are sorted by key.

    Raises UsageError for what JSON cannot express (other types, integers beyond 64 bits), LimitError for deep nesting.
    """
    if value is None:
        text = "null"
    elif isinstance(value, str):
        text = quote(value)
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, int):
        text = int_text(value)
    elif isinstance(value, float):
        text = f64_text(value)
    elif _depth > MAX_JSON_DEPTH:
        raise LimitError(f"JSON nested deeper than {MAX_JSON_DEPTH} levels")
    elif isinstance(value, Mapping):
        if len(value) >= _SMALL_GROUP and _is_plain(value, _depth):
            return _PLAIN_ENCODER.encode(value)
        keys = [key for key in value if isinstance(key, str)]
        if len(keys) < len(value):
            raise UsageError("the keys of a JSON object must be strings")
        # Code point order of Python strings equals byte order of their UTF-8 forms.
        items = (f"{quote(key)}:{dumps(value[key], _depth + 1)}" for key in sorted(keys))
        text = "{" + ",".join(items) + "}"
    elif isinstance(value, list | tuple):
        if len(value) >= _SMALL_GROUP and _is_plain(value, _depth):
            return _PLAIN_ENCODER.encode(value)
        text = f"[{','.join(_texts(value, _depth + 1))}]"
    else:
        raise UsageError(f"JSON cannot represent a value of type {type(value).__name__}")
    return text


def _is_plain(value: object, depth: int) -> bool:
    """Whether a list or dict contains only strings, integers, lists and dicts: json's own encoder then writes the same.

    Level by level, as in _check.
    """
    level = [value]
    while level:
        depth += 1
        lists = [node for node in level if type(node) is list]
        dicts = [node for node in level if type(node) is dict]
        if len(lists) + len(dicts) < len(level) or not set(map(type, chain.from_iterable(dicts))) <= {str}:
            return False
        children = [*chain.from_iterable(lists), *chain.from_iterable(map(dict.values, dicts))]
        kinds = set(map(type, children))
        if not kinds <= {str, int, *_CONTAINERS} or (kinds & _CONTAINERS and depth > MAX_JSON_DEPTH):
            return False
        if int in kinds and not _in_range([child for child in children if type(child) is int]):
            return False
        level = [child for child in children if type(child) in _CONTAINERS] if kinds & _CONTAINERS else []
    return True


def _texts(values: Sequence[object], depth: int) -> Iterable[str]:
    kinds = set(map(type, values))
    if kinds == {str}:  # a vocabulary: at C speed
        return map(quote, cast("Sequence[str]", values))
    if kinds == {int} and _in_range(values):
        return map(str, values)
    return [dumps(value, depth) for value in values]


quote = json.encoder.encode_basestring
"""Serializes a string as JSON, non-ASCII characters unescaped."""


def int_text(value: int) -> str:
    """Serializes an integer; raises UsageError outside -2^63 ... 2^64-1."""
    if not INT_MIN <= value <= INT_MAX:
        raise UsageError(f"the integer {value} does not fit 64 bits")
    return str(value)


def f64_text(value: float) -> str:
    """The shortest digits that round-trip as f64."""
    if not math.isfinite(value):
        return "null"
    text = float.__repr__(value)  # numpy's float64 is a float with another repr
    if "e" not in text:  # Python is positional for -4 <= e <= 15, in the same form
        return text
    mantissa, _, exponent = text.partition("e")
    return _layout_digits(mantissa.replace(".", ""), int(exponent), -5, 15)


def f32_text(value: float) -> str:
    """The shortest digits that round-trip as f32, for `value` rounded to f32."""
    value = to_f32(value)
    if not math.isfinite(value):
        return "null"
    if value == 0:
        return repr(value)
    sign, size = ("-", -value) if value < 0 else ("", value)
    for precision in range(9):
        mantissa, _, exponent = f"{size:.{precision}e}".partition("e")
        nearest = int(mantissa.replace(".", ""))
        scale = int(exponent) - precision
        # At a power of two the gap below is half the gap above: the nearest decimal may miss where the next
        # one hits.
        for digits in (nearest, nearest + 1):
            if to_f32(float(f"{digits}e{scale}")) == size:
                return sign + _layout_digits(str(digits), scale + len(str(digits)) - 1, -6, 12)
    raise AssertionError("nine digits identify every f32")


def to_f32(value: float) -> float:
    """`value` rounded to f32; infinite beyond its range."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def _layout_digits(digits: str, exponent: int, low: int, high: int) -> str:
    """`d.ddd x 10^exponent` positionally within [low, high], else in exponent form."""
    sign, digits = ("-", digits[1:]) if digits.startswith("-") else ("", digits)
    digits = digits.rstrip("0") or "0"
    if not low <= exponent <= high:
        return f"{sign}{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e{exponent}"
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    whole = digits[: exponent + 1].ljust(exponent + 1, "0")
    return f"{sign}{whole}.{digits[exponent + 1 :] or '0'}"


def objects_of(value: Json) -> list[JsonObject]:
    """The objects in an array; [] for another value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
