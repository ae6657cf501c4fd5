"""JSON as the reference reads and writes it: strict parsing, compact text, shortest digits for floats.

Text rules: `"` and `\\` escaped, `\\b \\f \\n \\r \\t` short, other bytes below 0x20 as `\\u00xx`, all else
raw UTF-8; keys of nested objects sorted by bytes; with a float written as d.ddd x 10^e, positional for -5 <=
e <= 15 (f64) or -6 <= e <= 12 (f32), else `d.ddde<exp>` without a plus sign; NaN and infinities are `null`.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from aprfmt.errors import CorruptError, LimitError, UsageError
from aprfmt.limits import MAX_JSON_DEPTH

INT_MIN = -(1 << 63)
INT_MAX = (1 << 64) - 1
# Below this many strings the import of orjson costs more than it saves.
_LARGE_LIST = 4096

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_MINUS_ZERO = re.compile(r"-0(?:[\s,\]}]|$)")
_CONTAINERS = {dict, list}
_NUMBERS = {int, float}
_SMALL_GROUP = 64
_MAYBE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(raw: bytes | bytearray | memoryview) -> Any:
    """The value of a JSON text in UTF-8.

    Duplicate keys: the last wins. Integers beyond 64 bits become floats. Raises CorruptError, with the byte
    offset, for anything RFC 8259 does not allow and for a byte-order mark, lone surrogates, NaN, numbers
    beyond f64; LimitError for more than MAX_JSON_DEPTH levels.
    """
    try:
        text = str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise CorruptError("the JSON text is not valid UTF-8", offset=error.start) from None
    if text.startswith("\ufeff"):
        raise CorruptError("the JSON text begins with a byte-order mark", offset=0)
    if _MAYBE_SURROGATE.search(text):
        _check_surrogates(text)
    # Hooks for numbers double the time of a vocabulary, and hardly a text has numbers that need them.
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


def _decode(decoder: json.JSONDecoder, text: str) -> Any:
    try:
        return decoder.decode(text)
    except json.JSONDecodeError as error:
        offset = len(text[: error.pos].encode())
        raise CorruptError(f"not valid JSON: {error.msg[:1].lower()}{error.msg[1:]}", offset=offset) from None
    except RecursionError:
        raise LimitError(f"JSON nested deeper than {MAX_JSON_DEPTH} levels") from None


def _parse_int(text: str) -> int | float:
    if len(text) <= 20 and text != "-0":
        value = int(text)
        if INT_MIN <= value <= INT_MAX:
            return value
    return _parse_float(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise CorruptError(f"the JSON number {text[:40]} is beyond a 64-bit float")
    return value


def _parse_constant(text: str) -> Any:
    raise CorruptError(f"{text} is not a JSON value")


_DECODER = json.JSONDecoder(parse_int=_parse_int, parse_float=_parse_float, parse_constant=_parse_constant)
_PLAIN_DECODER = json.JSONDecoder(parse_constant=_parse_constant)


def _check_surrogates(text: str) -> None:
    """Every escaped high surrogate must be followed at once by an escaped low one, and no low one stands
    alone.
    """
    expected = -1
    for match in _ESCAPE.finditer(text):
        code = int(match[1], 16) if match[1] else 0
        is_low = 0xDC00 <= code < 0xE000
        if is_low != (match.start() == expected) or 0 <= expected < match.start():
            raise CorruptError(
                "a lone surrogate escape in the JSON text", offset=len(text[: match.start()].encode())
            )
        expected = match.end() if 0xD800 <= code < 0xDC00 else -1
    if expected >= 0:
        raise CorruptError("a lone surrogate escape in the JSON text", offset=len(text[:expected].encode()))


def _check(value: Any) -> bool:
    """Whether every number lies within 64-bit integers. Raises LimitError for deep nesting."""
    in_range = True
    depth = -1
    level: list[Any] = [[value]]
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise LimitError(f"JSON nested deeper than {MAX_JSON_DEPTH} levels")
        small: list[Any] = []
        groups: list[Collection[Any]] = [small]
        for node in level:
            children = node.values() if type(node) is dict else node
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
                in_range = in_range and min(numbers) >= INT_MIN and max(numbers) <= INT_MAX
    return in_range


def dumps(value: Any, _depth: int = 1) -> str:
    """`value` as compact JSON text; mappings come out sorted by key.

    Raises UsageError for what JSON cannot hold (other types, integers beyond 64 bits), LimitError for deep
    nesting.
    """
    for kind, write in _SCALARS:
        if isinstance(value, kind):
            return write(value)
    if _depth > MAX_JSON_DEPTH:
        raise LimitError(f"JSON nested deeper than {MAX_JSON_DEPTH} levels")
    if isinstance(value, Mapping):
        return _dump_mapping(value, _depth)
    if isinstance(value, list | tuple):
        return _dump_list(value, _depth)
    raise UsageError(f"JSON cannot hold a value of type {type(value).__name__}")


def _dump_mapping(value: Mapping[Any, Any], depth: int) -> str:
    if not all(isinstance(key, str) for key in value):
        raise UsageError("the keys of a JSON object must be strings")
    # Code point order of Python strings is the byte order of their UTF-8 forms.
    return "{" + ",".join(f"{quote(key)}:{dumps(value[key], depth + 1)}" for key in sorted(value)) + "}"


def _dump_list(value: Sequence[Any], depth: int) -> str:
    kinds = set(map(type, value))
    if kinds == {str}:
        return _dump_strings(value)
    if kinds == {int} and min(value) >= INT_MIN and max(value) <= INT_MAX:
        return "[" + ",".join(map(str, value)) + "]"
    return "[" + ",".join([dumps(item, depth + 1) for item in value]) + "]"


def _dump_strings(value: Sequence[str]) -> str:
    if len(value) >= _LARGE_LIST:
        try:
            import orjson

            return orjson.dumps(value).decode()
        except (ImportError, TypeError):  # absent, or a lone surrogate that the caller reports
            pass
    return "[" + ",".join(map(quote, value)) + "]"


quote = json.encoder.encode_basestring
"""A string as JSON text, non-ASCII characters raw."""


def int_text(value: int) -> str:
    """An integer; raises UsageError outside -2^63 ... 2^64-1."""
    if not INT_MIN <= value <= INT_MAX:
        raise UsageError(f"the integer {value} does not fit 64 bits")
    return str(value)


def f64_text(value: float) -> str:
    """Shortest digits that give the same f64."""
    if not math.isfinite(value):
        return "null"
    text = float.__repr__(value)  # numpy's float64 is a float that spells itself differently
    if "e" not in text:  # Python is positional for -4 <= e <= 15, in the same form
        return text
    mantissa, _, exponent = text.partition("e")
    return _layout_digits(mantissa.replace(".", ""), int(exponent), -5, 15)


def f32_text(value: float) -> str:
    """Shortest digits that give the same f32 as `value` rounded to f32."""
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


# In this order: a bool is an int too.
_SCALARS: tuple[tuple[type, Callable[[Any], str]], ...] = (
    (str, quote),
    (type(None), lambda _: "null"),
    (bool, lambda value: "true" if value else "false"),
    (int, int_text),
    (float, f64_text),
)
