"""A dataclass decorator that makes imports faster: all classes share `__eq__`, `__hash__` and `__repr__`.

`dataclasses.dataclass` compiles these methods for every class, 0.5 ms each; here a class takes 0.1 ms, which saves 5 %
of the CPU time of `apr inspect`. The one difference: `frozen` makes instances hashable, but only the type checker
prevents assignments to their fields.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import TYPE_CHECKING

__all__ = ["light_dataclass"]

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass as light_dataclass
    from typing import Protocol

    from _typeshed import DataclassInstance

    class _HasComparedValues(Protocol):
        _compared_values: Callable[[object], object]
else:

    def light_dataclass(
        cls: type | None = None, /, *, frozen: bool = False, eq: bool = True, repr: bool = True, **more: object
    ) -> object:
        """As dataclasses.dataclass; `frozen` makes instances hashable."""
        if cls is None:
            return lambda cls: light_dataclass(cls, frozen=frozen, eq=eq, repr=repr, **more)
        if eq and "__eq__" not in vars(cls):
            cls.__eq__ = _is_equal
            if "__hash__" not in vars(cls):
                cls.__hash__ = _hash if frozen else None
        if repr and "__repr__" not in vars(cls):
            cls.__repr__ = _repr
        made = dataclasses.dataclass(cls, eq=False, repr=False, **more)
        made._compared_values = staticmethod(_getter([f.name for f in dataclasses.fields(made) if f.compare]))
        return made


def _getter(names: list[str]) -> Callable[[object], object]:
    return attrgetter(*names) if names else lambda _: ()


def _is_equal(self: _HasComparedValues, other: object) -> object:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self._compared_values(self) == self._compared_values(other)


def _hash(self: _HasComparedValues) -> int:
    return hash(self._compared_values(self))


def _repr(self: DataclassInstance) -> str:
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"
