"""Options that are declared once: fields of dataclasses that carry their help and their form on a command line.

The parameters of Python functions (`takes`), the options of commands (cli/options.py), settings files and the
documentation are made from these fields.
"""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from aprfmt.errors import UsageError
from aprfmt.types import construct

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S")
_V = TypeVar("_V")
_Row = TypeVar("_Row", bound="OptionRow")

TARGET = "Types for a target"
QUANTIZATION = "Quantization"
MLX = "MLX"
TOKENIZER = "Tokenizer"
PROVENANCE = "Provenance"
BESIDE = "Adapters, draft models and towers"
SOURCE = "Source"
MACHINE = "Speed, memory and disk"
SECTIONS = (TARGET, QUANTIZATION, MLX, TOKENIZER, PROVENANCE, BESIDE, SOURCE, MACHINE)
"""Sections of --help, in order."""

_KINDS = (("Sequence[float]", float), ("bool", bool), ("PathLike", Path), ("str", str), ("float", float), ("int", int))
"""Part of an annotation -> type of a value on the command line; the first that fits."""

_LISTS = ("tuple", "Sequence[str]", "Sequence[float]", "Sequence[PathLike]")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRow:
    """One option.

    Attributes:
        kind: type of a value on the command line: bool, int, float, str or Path.
        many: whether the option is repeatable.
        default: None, () or the value of an option that is not given.
        shown: the default as --help shows it; "": `default`.
        help: one sentence, for --help and the documentation.
        flags: names besides `flag`.
        metavar: placeholder of the value in --help; "": by `kind`.
        section: title in --help; "": none.
        complete: completion of values, by name in COMPLETIONS of cli/complete.py.
        low, high: the smallest and largest value.
        optional: for a switch with an optional number, its placeholder in --help, then other values, each behind a `|`;
            the bare switch means true.
        choices: the allowed values; (): any.
        negatable: whether a switch has a `--no-` form.
    """

    name: str
    kind: type
    many: bool = False
    default: object = None
    shown: str = ""
    help: str
    flags: tuple[str, ...] = ()
    metavar: str = ""
    section: str = ""
    complete: str = ""
    low: float = -math.inf
    high: float = math.inf
    optional: str = ""
    choices: tuple[str, ...] = ()
    negatable: bool = False

    @property
    def flag(self) -> str:
        """Its long option."""
        return flag_of(self.name.rstrip("_"))


def option(default: _V, help: str, **form: object) -> _V:
    """A field of a schema; `form` are attributes of its OptionRow. Name and type come from the class."""
    return field(default=default, metadata={"help": help, **form})


@cache
def rows(schema: type, kind: type[_Row]) -> dict[str, _Row]:
    """The options of a schema by name, those that it adds to its base classes first; fields without help are none."""
    found = {}
    for f in sorted(fields(schema), key=lambda f: f.name not in schema.__annotations__):
        if "help" in f.metadata:
            default = None if f.default is MISSING else f.default
            found[f.name] = construct(kind, {"name": f.name, "default": default, **_form(str(f.type)), **f.metadata})
    return found


def _form(annotation: str) -> dict[str, object]:
    kind = next(kind for part, kind in _KINDS if part in annotation)
    return {"kind": kind, "many": any(part in annotation for part in _LISTS)}


def takes(schema: Callable[_P, _S]) -> Callable[[Callable[[_S], _R]], Callable[_P, _R]]:
    """Decorates a function of a schema: it takes the fields as parameters, for callers and type checkers.

    The help of the options is added to the docstring.
    """

    def decorate(function: Callable[[_S], _R]) -> Callable[_P, _R]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            made = schema(*args, **kwargs)
            for name, row in rows(schema, OptionRow).items() if isinstance(schema, type) else ():
                _check_range(row, getattr(made, name))
            return function(made)

        parameters = inspect.signature(schema).parameters.values()
        returned = function.__annotations__.get("return", inspect.Signature.empty)
        vars(call)["__signature__"] = inspect.Signature([*parameters], return_annotation=returned)
        if isinstance(schema, type) and call.__doc__:
            call.__doc__ = _documented(inspect.cleandoc(call.__doc__), rows(schema, OptionRow))
        return call

    return decorate


def _documented(text: str, options: dict[str, OptionRow]) -> str:
    """A docstring with the help of the options at the end of its Args."""
    head, raises, tail = text.partition("\n\nRaises:")
    head += "" if "\nArgs:\n" in head else "\n\nArgs:"
    lines = [
        textwrap.fill(f"{row.name}: {row.help}", 116, initial_indent="    ", subsequent_indent="        ")
        for row in options.values()
    ]
    return "\n".join([head, *lines]) + raises + tail


def _check_range(row: OptionRow, value: object) -> None:
    """Raises UsageError for a value that is not a number, or is outside the range of its option, if that has one."""
    if value is None or (row.low, row.high) == (-math.inf, math.inf):
        return
    is_number = type(value) is int or (row.kind is float and isinstance(value, float))
    if not is_number or not row.low <= value <= row.high:  # type: ignore[operator]
        wanted = f"at least {row.low:g}" if row.high == math.inf else f"between {row.low:g} and {row.high:g}"
        raise UsageError(f"{row.flag} must be {wanted}, not {value!r:.40}")


def flag_of(name: str) -> str:
    """The option of a parameter, as messages name it."""
    return "--" + name.replace("_", "-")


def check_numbers(**given: tuple[object, int]) -> None:
    """Raises UsageError for a value that is not an integer from its least one on; None means no value."""
    for name, (value, least) in given.items():
        if value is not None and (type(value) is not int or value < least):
            raise UsageError(f"{flag_of(name)} must be at least {least}, not {value!r:.40}")
