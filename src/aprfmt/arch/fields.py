"""Readers and writers of single values: untrusted ones from JSON and GGUF, typed ones for a GGUF."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import field

from aprfmt.errors import AprError, CorruptError, RefusedError
from aprfmt.io.jsonx import to_f32
from aprfmt.light_dataclass import light_dataclass

OTHER_FORMAT = "use another output format: -o NAME.apr, or -o NAME --format hf"
"""The hint for what a GGUF cannot express."""

GgufKey = tuple[str, str | tuple[str, str], object]
"""(key, type name as in GgufType or ("ARRAY", element type name), value)."""


@light_dataclass(frozen=True, slots=True)
class Misfit:
    """A value that its GGUF key cannot store, and the error that says so."""

    value: object
    error: AprError = field(compare=False, repr=False)


def as_int(value: object, key: str) -> int | None:
    """`value` as a non-negative integer, None for None. Raises CorruptError for anything else."""
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise CorruptError(f"{key} is {_short(value)}, not a valid size")
    return value


def as_float(value: object, key: str) -> float | None:
    """`value` as a finite float, None for None. Raises CorruptError for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CorruptError(f"{key} is {_short(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise CorruptError(f"{key} is {_short(value)}, not a finite number")
    return number


def as_id(value: object, key: str) -> int | None:
    """A token id, the first one of a list; null, [] and -1 (meaning none) are None. Raises CorruptError."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, int) and not isinstance(value, bool) and value < 0:
        return None
    return as_int(value, key)


def as_mapping(value: object) -> Mapping[str, object]:
    """`value` if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def as_text(value: object) -> str | None:
    """`value` if it is a non-empty string, else None."""
    return value if isinstance(value, str) and value else None


def from_f32(value: object, key: str) -> float | None:
    """A float32 by its shortest digits: 9.99999997e-07 is 1e-06. Raises CorruptError."""
    number = as_float(value, key)
    if number is None or abs(number) > 3.4e38 or to_f32(number) != number:
        return number
    for digits in range(1, 9):
        short = float(f"{number:.{digits}g}")
        if abs(short) < 3.4e38 and to_f32(short) == number:
            return short
    return number


def shorten(number: float) -> float:
    """The number with the fewest digits that is the same float32 as `number`."""
    stored = to_f32(number)
    return from_f32(stored, "") or 0.0 if math.isfinite(stored) else number


_TYPES = {"u32": "UINT32", "u64": "UINT64", "i32": "INT32", "f32": "FLOAT32", "bool": "BOOL", "str": "STRING"}


def typed_key(key: str, kind: str, value: object) -> GgufKey:
    """A key-value pair of a `kind` of row.Key. A list for a number becomes an array of INT32, or of its kind.

    Raises CorruptError for a value of another kind, RefusedError for one that a GGUF cannot store.
    """
    if isinstance(value, list | tuple):
        inner = kind.removesuffix("[]")
        inner = "i32" if inner == kind == "u32" else inner
        return key, ("ARRAY", _TYPES[inner]), [typed_key(key, inner, item)[2] for item in value]
    kind = kind.removesuffix("[]")
    fits = True
    if kind == "u32":
        value = as_int(value, key)
        fits = value is not None and value < 1 << 32
    elif kind == "u64":
        value = as_int(value, key)
        fits = value is not None
    elif kind == "f32":
        value = as_float(value, key)
        fits = value is not None and abs(value) <= 3.4e38
    elif kind == "i32":
        if isinstance(value, bool) or not isinstance(value, int):
            raise CorruptError(f"{key} is {_short(value)}, not an integer")
        fits = -(1 << 31) <= value < 1 << 31
    elif not isinstance(value, bool if kind == "bool" else str):
        raise CorruptError(f"{key} is {_short(value)}, not {_A[kind]}")
    if not fits:
        raise RefusedError(f"{key} is {_short(value)}, which a GGUF cannot hold")
    return key, _TYPES[kind], value


_A = {"i32": "an integer", "bool": "true or false", "str": "a string"}
_PYTHON: dict[str, type] = {"i32": int, "bool": bool, "str": str}


def config_value(key: str, kind: str, value: object) -> object:
    """A GGUF value as its config.json value: float32 by shortest digits, arrays as lists. Raises CorruptError."""
    value = plain_value(key, value)
    if isinstance(value, list):
        return [config_value(key, kind.removesuffix("[]"), item) for item in value]
    kind = kind.removesuffix("[]")
    if value is None:
        return None
    if kind == "f32":
        return from_f32(value, key)
    if kind in ("u32", "u64"):
        return as_int(value, key)
    if not isinstance(value, _PYTHON[kind]):
        raise CorruptError(f"{key} is {_short(value)}, not {_A[kind]}")
    return value


def converter_value(key: str, kind: str, value: object) -> object:
    """A GGUF value for a converter: unchanged, but of the kind's type. Raises CorruptError.

    A list for a single number is the common value of its items; a number may replace a list, as in llama.cpp, and a
    list of flags the period of layers.
    """
    value = plain_value(key, value)
    inner = kind.removesuffix("[]")
    if isinstance(value, list):
        items = [converter_value(key, inner, item) for item in value]
        if inner != kind or (items and all(isinstance(item, bool) for item in items)):
            return items
        if not items or items.count(items[0]) != len(items):
            raise CorruptError(f"{key} differs between layers")
        return items[0]
    if value is None or (inner == "str" == kind and isinstance(value, str)):
        return value
    if inner == "f32":
        return as_float(value, key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if inner == "str" or not isinstance(value, int):
        raise CorruptError(f"{key} is {_short(value)}, not of type {kind}")
    return value


def plain_value(key: str, value: object) -> object:
    """A GGUF value with an array as a list. Raises CorruptError for anything but a number, string or array."""
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise CorruptError(f"{key} is not a number, string or array")
    return [item.item() if hasattr(item, "item") else item for item in value]


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return "a very large integer"
    text = repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."
