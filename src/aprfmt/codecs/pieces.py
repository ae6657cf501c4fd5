"""The one protocol for stored bytes of a tensor that can be read at any place."""

from __future__ import annotations

from typing import Protocol

from aprfmt.types import Shape


class Piece(Protocol):
    """A tensor of a file (model.Tensor), or one whose bytes are made while they are read."""

    @property
    def name(self) -> str:
        """Name of the tensor."""

    @property
    def dtype(self) -> str:
        """Dtype of the bytes, a row of codecs.dtypes."""

    @property
    def shape(self) -> Shape:
        """Row-major shape."""

    @property
    def n_bytes(self) -> int:
        """Length in bytes."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the tensor."""

    def raw(self) -> memoryview:
        """All bytes."""
