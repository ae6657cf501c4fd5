"""How the tensors of a source file are had back from the tensors of the `.apr`, segment by segment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from aprfmt.arch.links import Link
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.rowmap import BufferedPiece
from aprfmt.canonical.tensor import of_pieces
from aprfmt.convert.lossless.recipe import RecipeWriter
from aprfmt.formats.out import OutTensor
from aprfmt.io.segments import resolved
from aprfmt.io.source import Buffer
from aprfmt.model import Tensor

MAX_MAPPED_BYTES = 64 << 20
"""Largest tensor of mapped values (norms, decays) that is made a second time to see whether it is exact."""


@dataclass(slots=True)
class SourceTensors:
    """The tensors of the source of `c`, of which the `.apr` holds some in fewer bytes (`stored`)."""

    c: Canonical
    stored: Mapping[str, str]
    _own: dict[str, str] = field(init=False)
    _links: dict[str, Link] = field(init=False)

    def __post_init__(self) -> None:
        tensors = self.c.tensors.values()
        self._own = {t.source.name: t.name for t in tensors if t.source is not None}
        self._links = {name: t.link for t in tensors if t.link is not None for name in t.link.gguf}

    def write(self, writer: RecipeWriter, name: str) -> None:
        """Adds the source tensor `name`: the `.apr`'s own, one of a link, or its bytes where a link is not exact."""
        c, original = self.c, self.c.model.tensors[name]
        own, link = self._own.get(name), self._links.get(name)
        if own is None and (link is None or link.row_map.is_plain):
            own = c.dropped[name]
        if own is not None:
            writer.tensor(c.tensors[own], self.stored.get(own))
        elif link is not None and (not link.row_map.value or self._comes_back(link, original)):
            writer.link(link, original, c.tensors, self.stored)
        else:
            writer.literal(original.raw())

    def _comes_back(self, link: Link, original: Tensor) -> bool:
        """Whether the mapped values of the `.apr` give the source's again, bit by bit."""
        if original.n_bytes > MAX_MAPPED_BYTES:
            return False
        outs = [self.c.tensors[name].out(name, self.stored.get(name)) for name in link.hf]
        pieces = [BufferedPiece(out.name, out.dtype, out.shape, partial(_bytes_of, out)) for out in outs]
        made = of_pieces(original.name, pieces, link.row_map, link.gguf.index(original.name))
        return made.dtype == original.dtype and b"".join(map(bytes, made.chunks())) == original.raw()


def _bytes_of(tensor: OutTensor) -> Iterator[Buffer]:
    return resolved(tensor.chunks())
