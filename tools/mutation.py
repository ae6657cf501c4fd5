"""A fault that tests must notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A fault and what must notice it.

    Attributes:
        name: what is wrong with the mutant.
        place: the file below src and, after a colon, the function: "aprfmt/io/pipe.py:_Pipeline.batches".
        tests: separated by blanks, without their folders; at least one must fail.
        old: text that occurs there exactly once.
        new: what replaces it.
        cuda: whether the tests need a GPU.
    """

    name: str
    place: str
    tests: str
    old: str
    new: str
    cuda: bool = False

    @property
    def file(self) -> str:
        """The file below src."""
        return self.place.partition(":")[0]

    @property
    def function(self) -> str:
        """The qualified name of the function, "" for the whole file."""
        return self.place.partition(":")[2]

    @property
    def package(self) -> str:
        """The package that the fault is in."""
        return self.place.partition("/")[0]
