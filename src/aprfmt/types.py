"""Names of types that every room uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

_T = TypeVar("_T")

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
    """A numpy array of any dtype and shape; docstrings give both."""
else:
    Array = object  # numpy stays unloaded

PathLike: TypeAlias = str | os.PathLike[str]
"""What functions take for a path."""

Shape: TypeAlias = tuple[int, ...]
"""Of a tensor: row-major, outermost dimension first."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""A value that was parsed from JSON text."""

JsonObject: TypeAlias = "dict[str, Json]"
"""A JSON object."""

Numbers: TypeAlias = dict[str, float | None]
"""Measured numbers by name; None for one that was not measured. JSON data."""


def construct(kind: Callable[..., _T], values: Mapping[str, object]) -> _T:
    """`kind(**values)`, for values whose types were checked, or that come from `asdict` of the same class."""
    return kind(**values)


def paths_of(value: PathLike | Sequence[PathLike | _T]) -> list[PathLike | _T]:
    """One path or several as a list; several may hold other things too."""
    return [value] if isinstance(value, str | os.PathLike) else [*value]
