"""Parses and checks the values of conversion options, from the command line and from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from reprlib import repr as short

from aprfmt import formats
from aprfmt.convert.options import Options
from aprfmt.errors import UsageError
from aprfmt.io import chunks
from aprfmt.io.pipe import MOST_THREADS
from aprfmt.text import plural
from aprfmt.types import construct


def parse_options(given: Mapping[str, object]) -> Options:
    """The options in `given`. Raises UsageError for an unknown name or a value of the wrong type."""
    known = {f.name: f for f in fields(Options)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise UsageError(f"unknown option {unknown[0]!r}", hint="known: " + ", ".join(sorted(known)))
    values: dict[str, object] = {}
    for name, f in known.items():
        parser = _PARSERS.get(name) or _PARSERS_BY_TYPE[str(f.type)]
        values[name] = parser(name, given.get(name, f.default))
    return construct(Options, values)


def _wrong(name: str, expected: str, value: object) -> UsageError:
    return UsageError(f"{name} must be {expected}, not {short(value)}")


def parse_flag(name: str, value: object) -> bool:
    """`value`, a bool. Raises UsageError for anything else."""
    if not isinstance(value, bool):
        raise _wrong(name, "True or False", value)
    return value


_FLAGS: dict[object, bool | str] = {True: True, "true": True, False: False, "false": False, "logits": "logits"}


def _verify(name: str, value: object) -> bool | str:
    if not isinstance(value, bool | str) or value not in _FLAGS:
        raise _wrong(name, 'True, False or "logits"', value)
    return _FLAGS[value]


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a string", value)
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise _wrong(name, "a list of strings", value)
    return tuple(value)


def _path_or_flag(name: str, value: object) -> object:
    return value if value is None or isinstance(value, bool) else formats.path_text(value, name)


def _progress(name: str, value: object) -> object:
    if not callable(value):
        raise _wrong(name, "a function", value)
    return value


def _whole(name: str, value: object) -> int:
    if type(value) is not int:
        raise _wrong(name, "an integer", value)
    return value


def _threads(name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MOST_THREADS:
        raise _wrong(name, f"a number from 1 to {MOST_THREADS}", value)
    return value


_UNITS = {"": 1, "b": 1} | {
    letter + end: base**power
    for power, letter in enumerate("kmgt", 1)
    for end, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


_LEAST_TYPED_SHARD = 100
"""Bytes."""

_MEANT = {100: "GB", 100_000: "MB", 1 << 64: "KB"}
"""The unit that is probably missing from a number below the key."""


def parse_size(value: object, *, least: int = 1, name: str = "", least_typed: int = 0) -> int:
    """`5GB`, `500MiB`, `123456` or a number as bytes.

    Args:
        value: what the user gave.
        least: the minimum.
        name: the option's.
        least_typed: the minimum of a text without a unit: a smaller number probably lacks its unit. 0 is no size.

    Raises:
        UsageError: another value.
    """
    size, option = value if type(value) is int else -1, f"--{name.replace('_', '-')}: " if name else ""
    if isinstance(value, str):
        text = value.strip().lower()
        number = text.rstrip("bkmgti").strip()
        unit = text[len(number) :].strip()
        try:
            size = int(float(number) * _UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            size = -1
        if not unit and 0 <= size < least_typed and float(number):
            meant = next(unit for most, unit in _MEANT.items() if size < most)
            raise UsageError(f"{option}{plural(size, 'byte')} is too small", hint=f"did you mean {number}{meant}?")
    if size < least:
        raise UsageError(
            f"{option}{short(value)} is not a valid size", hint="write it as 5GB, 500MiB or a number of bytes"
        )
    return size


Parser = Callable[[str, object], object]


def _optional(parser: Parser) -> Parser:
    return lambda name, value: None if value is None else parser(name, value)


def _shard_size(name: str, value: object) -> int:
    return parse_size(value, least=0, name=name, least_typed=_LEAST_TYPED_SHARD)


# By name if the type is not sufficient, the others by the annotation of the field.
_PARSERS: dict[str, Parser] = {
    "verify": _verify,
    "threads": _optional(_threads),
    "bits": _optional(_whole),
    "group_size": _optional(_whole),
    "carry": lambda name, value: parse_size(value, least=0, name=name),
    "max_memory": _optional(lambda name, value: parse_size(value, name=name)),
    "max_disk": _optional(lambda name, value: parse_size(value, least=chunks.LEAST_STORED_BYTES, name=name)),
    "shard_size": _optional(_shard_size),
}


_PARSERS_BY_TYPE: dict[str, Parser] = {
    "bool": parse_flag,
    "str": _text,
    "str | None": _optional(_text),
    "str | Sequence[str]": _texts,
    "PathLike | bool | None": _path_or_flag,
    "PathLike | None": _optional(lambda name, value: formats.path_text(value, name)),
    "StartProgress | None": _optional(_progress),
}
