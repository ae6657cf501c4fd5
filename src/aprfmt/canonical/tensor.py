"""One tensor under its Hugging Face name, and how its bytes come from the source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from aprfmt.arch.links import Link, RowMap
from aprfmt.canonical.rowmap import Produced, produce
from aprfmt.codecs.convert import stored_bytes
from aprfmt.codecs.dtypes import DTYPES, find_dtype
from aprfmt.codecs.pieces import Piece
from aprfmt.codecs.recode import OverflowCount, recode_jobs
from aprfmt.formats.out import OutTensor
from aprfmt.io.segments import Item
from aprfmt.io.source import Buffer
from aprfmt.model import Tensor
from aprfmt.types import Array, Shape


@dataclass(frozen=True)
class CanonicalTensor:
    """A tensor of the network: the stored one, or one of those that a link makes of the tensors of a GGUF.

    Attributes:
        name: Hugging Face name; the source's own where there is no such thing.
        pieces: what its bytes are taken from; one that is the tensor itself without a `row_map`.
        row_map, position: which tensor of the row_map it is; `inverse` tells that the pieces are of the GGUF side.
        link: the link that it comes through, for tensors of a GGUF.
    """

    name: str
    pieces: tuple[Piece, ...]
    row_map: RowMap | None = None
    position: int = 0
    inverse: bool = False
    link: Link | None = None

    @cached_property
    def produced(self) -> Produced:
        """What it is in Hugging Face order."""
        if self.row_map is not None:
            return produce(self.pieces, self.row_map, self.position, inverse=self.inverse)
        piece = self.pieces[0]
        plain = RowMap((piece.shape,), (piece.shape,))
        return produce(self.pieces, plain, 0)

    @property
    def dtype(self) -> str:
        """Dtype that it has without conversion."""
        return self.produced.dtype

    @property
    def shape(self) -> Shape:
        """Row-major shape."""
        return self.produced.shape

    @property
    def is_decoded(self) -> bool:
        """Whether its blocks had to be decoded to be brought into order."""
        return DTYPES[self.pieces[0].dtype].kind != "plain" and self.pieces[0].dtype != self.dtype

    @property
    def original_dtype(self) -> str:
        """Dtype of its values before any were decoded."""
        return self.pieces[0].dtype if self.is_decoded else self.dtype

    @property
    def n_bytes(self) -> int:
        """Bytes in that dtype."""
        return self.produced.n_bytes

    @property
    def source(self) -> Tensor | None:
        """The stored tensor that it is, unchanged; None where it is made of others."""
        piece = self.pieces[0]
        unchanged = self.row_map is None or self.row_map.is_plain
        return piece if unchanged and isinstance(piece, Tensor) else None

    def chunks(self) -> Iterator[Buffer]:
        """The bytes in Hugging Face order."""
        return self.produced.chunks()

    def piece(self) -> Piece:
        """This tensor as something that another row_map can read from."""
        if self.row_map is None or self.row_map.is_plain:
            return self.pieces[0]
        return self.produced.piece(self.name)

    def out(
        self,
        name: str,
        dtype: str | None = None,
        overflow: OverflowCount | None = None,
        weights: Array | None = None,
        *,
        padded: bool = False,
    ) -> OutTensor:
        """This tensor as the output tensor `name` of `dtype`.

        `weights` [matrices * cols] tells a quantized dtype how much each column matters. With `padded`, rows that
        blocks do not divide are filled up, which only an `.apr` can hold; else they raise UsageError.
        """
        made = self.produced
        target = find_dtype(dtype or made.dtype).name
        if target == made.dtype:
            return OutTensor(name, target, made.shape, made.n_bytes, lambda: made.items(1), made.held_bytes)

        def chunks() -> Iterator[Item]:
            return recode_jobs(made.dtype, target, made.shape, made.items, overflow, weights)

        n_bytes = stored_bytes(target, made.shape, padded=padded)
        return OutTensor(name, target, made.shape, n_bytes, chunks, made.held_bytes)
