"""`record` gives what dataclasses.dataclass gives, but for the assignment that only a type checker refuses."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import pytest

from aprfmt.light_dataclass import light_dataclass


def made(decorate: Any, **options: Any) -> Any:
    class Point:
        x: int
        y: list[int] = field(default_factory=list, compare=False)
        z: str = field(default="z", repr=False)

    return decorate(**options)(Point)


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"slots": True}, {"frozen": True, "slots": True}])
def test_light_dataclasses_behave_like_dataclasses(options: dict[str, bool]) -> None:
    ours, theirs = made(light_dataclass, **options), made(dataclass, **options)
    assert [f.name for f in fields(ours)] == [f.name for f in fields(theirs)]
    assert hasattr(ours, "__slots__") == hasattr(theirs, "__slots__")
    for kind in (ours, theirs):
        a, b, c = kind(1), kind(1, [2]), kind(1, z="other")
        assert a == b != c
        assert a != (1, [], "z")
        assert replace(a, x=5).x == 5
        assert asdict(b) == {"x": 1, "y": [2], "z": "z"}
    assert repr(ours(1, [3])) == repr(theirs(1, [3]))
    if options.get("frozen"):
        assert hash(ours(1)) == hash(ours(1, [2])) == hash(theirs(1))
    else:
        with pytest.raises(TypeError, match="unhashable"):
            hash(ours(1))


def test_what_a_class_says_itself_counts() -> None:
    @light_dataclass(eq=False, repr=False)
    class Plain:
        x: int

    @light_dataclass(frozen=True)
    class Named:
        x: int

        def __repr__(self) -> str:
            return "named"

    assert Plain(1) != Plain(1)
    assert len({Plain(1), Plain(1)}) == 2
    assert repr(Named(1)) == "named"
    assert len({Named(1), Named(1)}) == 1


def test_fields_of_a_base_come_first() -> None:
    @light_dataclass(frozen=True, kw_only=True)
    class Base:
        x: int

    @light_dataclass(frozen=True, kw_only=True)
    class Further(Base):
        y: int = 2

    assert Further(x=1) == Further(x=1, y=2) != Further(x=1, y=3)
    assert repr(Further(x=1)).endswith("Further(x=1, y=2)")
