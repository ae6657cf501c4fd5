"""What tensors are made from, and what they become: stored bytes that can be read at any place, and made ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from aprfmt.codecs.convert import decode
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.recode import Items
from aprfmt.io.segments import resolved
from aprfmt.io.source import Buffer
from aprfmt.model import Tensor
from aprfmt.types import Array, Shape

if TYPE_CHECKING:
    pass


class Piece(Protocol):
    """Stored bytes that can be read at any place: a tensor of a file, or one that was decoded."""

    @property
    def name(self) -> str:
        """Name of the tensor."""

    @property
    def dtype(self) -> str:
        """Stored dtype."""

    @property
    def shape(self) -> Shape:
        """Row-major shape."""

    @property
    def n_bytes(self) -> int:
        """Stored bytes."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the tensor."""

    def raw(self) -> memoryview:
        """All bytes."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file as a Piece."""

    tensor: Tensor

    @property
    def name(self) -> str:
        """Name in the file."""
        return self.tensor.name

    @property
    def dtype(self) -> str:
        """Stored dtype."""
        return self.tensor.dtype

    @property
    def shape(self) -> Shape:
        """Row-major shape."""
        return self.tensor.shape

    @property
    def n_bytes(self) -> int:
        """Stored bytes."""
        return self.tensor.n_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the tensor."""
        self.tensor.source.read_into(self.tensor.offset + offset, buffer)

    def raw(self) -> memoryview:
        """All bytes, mapped."""
        return self.tensor.raw()


@dataclass(slots=True)
class Decoded:
    """Values that have to be made first (packed weights, blocks that cannot move): held while they are read."""

    name: str
    dtype: str
    shape: Shape
    make: Callable[[], Iterable[Buffer]]
    _data: bytes | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes once decoded."""
        return DTYPES[self.dtype].n_bytes(self.shape)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the decoded tensor."""
        buffer[:] = self.raw()[offset : offset + len(buffer)]

    def raw(self) -> memoryview:
        """All bytes; made on first use."""
        if self._data is None:
            self._data = b"".join(bytes(chunk) for chunk in self.make())
        return memoryview(self._data)

    def drop(self) -> None:
        """Frees the memory; the next use makes the bytes again."""
        self._data = None


@dataclass(frozen=True, slots=True)
class Produced:
    """One output tensor of a RowMap: what it will be, its bytes, and the memory that they take to make."""

    dtype: str
    shape: Shape
    n_bytes: int
    items: Items
    held_bytes: int = 0

    def chunks(self) -> Iterator[Buffer]:
        """Its bytes, piece by piece."""
        return resolved(self.items(1))


def values_of(produced: Produced) -> Array:
    """The tensor in memory, decoded."""
    data = b"".join(bytes(chunk) for chunk in produced.chunks())
    return decode(produced.dtype, data, produced.shape)
