"""Dataclasses whose methods are shared: those of the standard library are compiled one by one, for each class anew.

Compiling them takes 0.5 ms a class, a quarter of the time that `apr inspect` takes with the forty classes that it
imports; so takes 0.1. What differs: nothing stops an assignment to a field of a frozen record but the type checker.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(
        cls: type | None = None, /, *, frozen: bool = False, eq: bool = True, repr: bool = True, **more: Any
    ) -> Any:
        """As dataclasses.dataclass; `frozen` makes records hashable."""
        if cls is None:
            return lambda cls: record(cls, frozen=frozen, eq=eq, repr=repr, **more)
        if eq and "__eq__" not in vars(cls):
            cls.__eq__ = _is_equal
            if "__hash__" not in vars(cls):
                cls.__hash__ = _hash if frozen else None
        if repr and "__repr__" not in vars(cls):
            cls.__repr__ = _repr
        made = dataclasses.dataclass(cls, eq=False, repr=False, **more)
        made._values_of_record = staticmethod(_getter([f.name for f in dataclasses.fields(made) if f.compare]))
        return made


def _getter(names: list[str]) -> Any:
    return attrgetter(*names) if names else lambda _: ()


def _is_equal(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self._values_of_record(self) == self._values_of_record(other)


def _hash(self: Any) -> int:
    return hash(self._values_of_record(self))


def _repr(self: Any) -> str:
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"
