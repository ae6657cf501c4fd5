"""The protocol for stored bytes of a tensor that can be read at any place, and totals of tensors by dtype."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypedDict

from aprfmt.codecs.dtypes import n_elements
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


class DtypeTotals(TypedDict):
    """What a file holds of one dtype."""

    tensors: int
    params: int
    bytes: int


class _Measured(Protocol):
    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> Shape: ...

    @property
    def n_bytes(self) -> int: ...


def dtype_totals(tensors: Iterable[_Measured]) -> dict[str, DtypeTotals]:
    """Totals by dtype, in the order in which the dtypes first occur."""
    totals: dict[str, DtypeTotals] = {}
    for tensor in tensors:
        row = totals.setdefault(tensor.dtype, DtypeTotals(tensors=0, params=0, bytes=0))
        row["tensors"] += 1
        row["params"] += n_elements(tensor.shape)
        row["bytes"] += tensor.n_bytes
    return totals
