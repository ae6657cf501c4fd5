"""A fault that tests must notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A fault and what must notice it.

    Attributes:
        name: what is wrong with the mutant.
        file: below src.
        tests: separated by blanks, without their folders; at least one must fail.
        old: text that stands there exactly once.
        new: what takes its place.
        cuda: whether the tests need a GPU.
    """

    name: str
    file: str
    tests: str
    old: str
    new: str
    cuda: bool = False

    @property
    def package(self) -> str:
        """The package that the fault is in."""
        return self.file.partition("/")[0]
