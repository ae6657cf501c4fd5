"""What a conversion may be asked for: every option once, checked in one place, whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from reprlib import repr as short
from typing import Any

from aprfmt.errors import UsageError
from aprfmt.formats import path_text
from aprfmt.io.pipe import MOST_THREADS, StartProgress
from aprfmt.types import PathLike


@dataclass(frozen=True, slots=True)
class Options:
    """Every option of a conversion; `apr convert --help` explains them. Sizes are in bytes."""

    arch: str | None = None
    dtype: str = "keep"
    imatrix: PathLike | None = None
    tensor_type: Sequence[str] = ()
    output_type: str | None = None
    embedding_type: str | None = None
    pure: bool = False
    leave_output: bool = False
    allow_requantize: bool = False
    tokenizer: PathLike | None = None
    license: str | None = None
    data_source: str | None = None
    data_license: str | None = None
    allow_no_config: bool = False
    allow_unmapped: bool = False
    format: str | None = None
    pre: str | None = None
    pad_style: str = "llama.cpp"
    shard_size: int | None = None
    verify: bool = False
    plan: bool = False
    force: bool = False
    progress: StartProgress | None = None
    threads: int | None = None
    max_memory: int | None = None
    fsync: bool = True

    def non_defaults(self) -> list[str]:
        """The options that are not left at their defaults."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]

    def changes_nothing(self) -> bool:
        """Whether the options leave the model itself alone."""
        return (
            not set(self.non_defaults()) - (COMMON - {"arch"}) - {"shard_size", "verify", "allow_requantize"}
        )


COMMON = frozenset(
    (
        *("arch", "allow_no_config", "allow_unmapped", "format"),
        *("plan", "force", "progress", "threads", "max_memory", "fsync"),
    )
)
"""Options about reading the source and running the conversion, which mean the same for every target."""

MIX = frozenset(
    ("imatrix", "tensor_type", "output_type", "embedding_type", "pure", "leave_output", "allow_requantize")
)
"""What goes with a quantization mix."""

PROVENANCE = frozenset(("license", "data_source", "data_license"))
"""What the user says about the model."""


def parse_options(given: Mapping[str, object]) -> Options:
    """The options named in `given`. Raises UsageError for an unknown one and for a value of the wrong kind."""
    known = {f.name: f for f in fields(Options)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise UsageError(f"unknown option {unknown[0]!r}", hint="known: " + ", ".join(sorted(known)))
    values: dict[str, Any] = {}
    for name, value in given.items():
        parser = _PARSERS.get(name) or _PARSERS_BY_TYPE[str(known[name].type)]
        values[name] = parser(name, value)
    return Options(**values)


def _wrong(name: str, expected: str, value: object) -> UsageError:
    return UsageError(f"{name} must be {expected}, not {short(value)}")


def parse_flag(name: str, value: object) -> bool:
    """`value` where it is True or False. Raises UsageError."""
    if not isinstance(value, bool):
        raise _wrong(name, "True or False", value)
    return value


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


def _path(name: str, value: object) -> str:
    return path_text(value, name)


def _progress(name: str, value: object) -> object:
    if not callable(value):
        raise _wrong(name, "a function", value)
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


def parse_size(value: object, *, least: int = 1) -> int:
    """`5GB`, `500MiB`, `123456` or a number as bytes, at least `least`. Raises UsageError."""
    size = value if type(value) is int else -1
    if isinstance(value, str):
        text = value.strip().lower()
        number = text.rstrip("bkmgti").strip()
        try:
            size = int(float(number) * _UNITS[text[len(number) :].strip()])
        except (ValueError, KeyError, OverflowError):
            size = -1
    if size < least:
        raise UsageError(f"{short(value)} is not a size", hint="write it as 5GB, 500MiB or a number of bytes")
    return size


Parser = Callable[[str, object], object]


def _optional(parser: Parser) -> Parser:
    return lambda name, value: None if value is None else parser(name, value)


# By name what a type does not tell, the others by the annotation of their field.
_PARSERS: dict[str, Parser] = {
    "threads": _optional(_threads),
    "max_memory": _optional(lambda _, value: parse_size(value)),
    "shard_size": _optional(lambda _, value: parse_size(value, least=0)),
}
_PARSERS_BY_TYPE: dict[str, Parser] = {
    "bool": parse_flag,
    "str": _text,
    "str | None": _optional(_text),
    "Sequence[str]": _texts,
    "PathLike | None": _optional(_path),
    "StartProgress | None": _optional(_progress),
}
